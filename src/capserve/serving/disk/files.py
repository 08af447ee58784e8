"""How do bytes get into a store directory, and back out, so that no crash can leave half a part?

One lock, one folder of part files. A part is written to a temporary file, fsynced and renamed, and
its folder is fsynced before any row names it; it is read whole and checked against its checksum.
What has the form of a part but no row is a leftover of a crash; any other name is not ours.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from capserve.errors import CapsuleError, StartupError

PIECE_BYTES = 4 << 20
"""Most bytes of one write or hash call. Both release the GIL, so this bounds no other thread; it
bounds how long a stop waits."""

SUFFIX = ".safetensors"
_OURS = re.compile(r"[0-9a-f]{32}\.safetensors(\.tmp)?")

_write = os.write
"""The one call that puts part bytes on the disk: where a test makes a disk full."""


class DirectoryLock:
    """Held by one process for as long as it lives: the system releases it, even after kill -9."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StartupError(
                f"capsule directory {directory} is in use by process {pid}: one at a time"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class PartFile:
    """What its row says of a part file."""

    file_bytes: int
    checksum: bytes
    """XXH3-128 of the whole file: to find damage, not malice; a read must not wait for it."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    removed: int
    """Files that a crash left without a row."""
    foreign: tuple[str, ...]
    """Names that are not ours, left alone; at the most a few of them."""
    foreign_count: int


def make_directory(directory: Path) -> None:
    """`directory` for its owner alone, since it holds conversations. Raises StartupError."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "parts").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartupError(f"capsule directory {directory}: {error.strerror or error}") from None


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class PartFiles:
    """`parts/ab/<name in hex>.safetensors`. Every method but `read` belongs to one thread."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "parts"
        self._unsynced: set[Path] = set()

    def path(self, name: bytes) -> Path:
        text = name.hex()
        return self._root / text[:2] / (text + SUFFIX)

    def write(self, name: bytes, pieces: Sequence[memoryview]) -> PartFile:
        """Write and fsync a part; `sync` makes its name durable too. OSError leaves no file."""
        path = self.path(name)
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._unsynced.add(self._root)
        temporary = path.with_name(path.name + ".tmp")
        fold = xxh3_128()
        size = 0
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for piece in _cut(pieces):
                    fold.update(piece)
                    size += len(piece)
                    while len(piece):
                        piece = piece[_write(fd, piece) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            # The calls on a descriptor know no path, and a message without one helps nobody.
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._unsynced.add(path.parent)
        return PartFile(size, fold.digest())

    def sync(self) -> None:
        """Fsync the folders of all that was written: call it before a row names any of it."""
        while self._unsynced:
            sync_directory(self._unsynced.pop())

    def remove(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)

    def read(self, name: bytes, known: PartFile) -> memoryview:
        """The whole file. Raises CapsuleError that says what is wrong with it. Any thread."""
        view = np.empty(known.file_bytes, dtype=np.uint8).data
        fold = xxh3_128()
        done = 0
        try:
            with open(self.path(name), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != known.file_bytes:
                    raise CapsuleError(f"{size} bytes long instead of {known.file_bytes}")
                while done < size and (got := file.readinto(view[done : done + PIECE_BYTES])):
                    fold.update(view[done : done + got])
                    done += got
        except FileNotFoundError:
            raise CapsuleError("missing") from None
        except OSError as error:
            raise CapsuleError(f"unreadable, {error.strerror or error}") from None
        if done < known.file_bytes or fold.digest() != known.checksum:
            raise CapsuleError("its checksum is wrong")
        return view.toreadonly()

    def sizes(self) -> dict[bytes, int]:
        """Bytes of each part file that is there, by name."""
        return {
            bytes.fromhex(entry.name.removesuffix(SUFFIX)): entry.stat().st_size
            for entry in self._entries()
            if _OURS.fullmatch(entry.name) and entry.name.endswith(SUFFIX)
        }

    def remove_leftovers(self, known: Iterable[bytes]) -> Leftovers:
        """Remove files of ours that no row knows."""
        expected = {name.hex() + SUFFIX for name in known}
        removed, foreign = 0, []
        for entry in self._entries():
            if entry.name in expected:
                continue
            if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                removed += 1
            else:
                foreign.append(os.path.relpath(entry.path, self._root))
        return Leftovers(removed, tuple(sorted(foreign)[:3]), len(foreign))

    def _entries(self) -> list[os.DirEntry[str]]:
        found: list[os.DirEntry[str]] = []
        for entry in os.scandir(self._root):
            if re.fullmatch("[0-9a-f]{2}", entry.name) and entry.is_dir(follow_symlinks=False):
                found.extend(os.scandir(entry.path))
            else:
                found.append(entry)
        return found


def _cut(pieces: Sequence[memoryview]) -> Iterable[memoryview]:
    for piece in pieces:
        flat = piece.cast("B") if piece.format != "B" or piece.ndim != 1 else piece
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
