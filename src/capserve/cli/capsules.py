"""What is in the capsule directory, is it whole, and how does it become less?

Works on the store directories themselves, with no server running: each is locked while it is looked
at, so a directory that a server has is an error with that server's pid. A base directory holds one
store for each engine fingerprint.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from capserve.errors import CapserveError, InvalidRequestError, NotFoundError
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, SessionRow
from capserve.serving.disk.index import Footprint
from capserve.serving.disk.manifest import FILE_NAME
from capserve.serving.disk.tier import DiskTier, default_capsule_dir
from capserve.serving.journal import prefix_digests

WAIT_S = 60.0
"""For what a command has removed to be gone."""

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Listed:
    """One capsule as a person sees it."""

    store: str
    row: CapsuleRow
    footprint: Footprint
    sessions: tuple[str, ...]
    """Those whose journal begins with the capsule's tokens."""

    @property
    def digest(self) -> str:
        return self.row.key.digest.hex()


def list_capsules(directory: Path | None, *, as_json: bool) -> None:
    """Print the capsules, the one used last at the end."""
    found: list[Listed] = []
    with _stores(directory) as tiers:
        for tier in tiers:
            found.extend(_list(tier))
    if as_json:
        print(json.dumps([_json(item) for item in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("store", "key", "namespace", "session", "pinned", "last used"):
        table.add_column(name)
    for name in ("position", "parts", "own bytes", "shared bytes"):
        table.add_column(name, justify="right")
    for item in found:
        table.add_row(
            item.store[:8],
            item.digest[:12],
            escape(item.row.key.namespace[:12]),
            escape(", ".join(item.sessions)),
            "pinned" if item.row.pinned else "",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.row.used_at)),
            f"{item.row.key.position:,}",
            str(len(item.row.parts)),
            f"{item.footprint.exclusive_bytes:,}",
            f"{item.footprint.shared_bytes:,}",
        )
    console = Console()
    if found:
        console.print(table)
    console.print(f"{len(found)} capsules in {escape(str(_base(directory)))}", soft_wrap=True)


def remove(
    directory: Path | None,
    *,
    prefix: str | None,
    everything: bool,
    session: str | None,
    older_than: str | None,
) -> None:
    """Exactly one of the four says which. Raises InvalidRequestError or NotFoundError."""
    given = [prefix is not None, everything, session is not None, older_than is not None]
    if sum(given) != 1:
        raise InvalidRequestError(
            "rm: exactly 1 of KEYPREFIX, --all, --session and --older-than is needed, "
            f"got {sum(given)}"
        )
    if prefix is not None and not re.fullmatch("[0-9a-f]{1,32}", prefix):
        raise InvalidRequestError(
            f"KEYPREFIX: 1 to 32 hexadecimal digits are needed, not {prefix!r}"
        )
    unused_s = None if older_than is None else _seconds(older_than)
    removed, freed, known = 0, 0, False
    with _stores(directory, tidies=True) as tiers:
        for tier in tiers:
            before = tier.used_bytes
            if everything:
                keys = [row.key for row in tier.capsules()]
                tier.clear()
            elif session is not None:
                keys, found = _of_session(tier, session)
                known = known or found
            elif unused_s is not None:
                border = time.time() - unused_s
                keys = [r.key for r in tier.capsules() if r.used_at < border and not r.pinned]
            else:
                assert prefix is not None
                keys = [r.key for r in tier.capsules() if r.key.digest.hex().startswith(prefix)]
            for key in keys:
                tier.forget(key)
            if not tier.flush(WAIT_S):
                raise CapserveError(f"{tier.directory}: not removed: {tier.fault or 'still busy'}")
            removed += len(keys)
            freed += before - tier.used_bytes
    if prefix is not None and not removed:
        raise NotFoundError(f"KEYPREFIX: no capsule's key begins with {prefix!r}")
    if session is not None and not known:
        raise NotFoundError(f"--session: there is no session {session!r}")
    print(f"{removed} capsules removed, {freed:,} bytes freed")


def verify(directory: Path | None) -> int:
    """Read every part file against its checksum; returns 1 when one is bad, else 0."""
    checked, bad = 0, 0
    with _stores(directory) as tiers:
        for tier in tiers:
            checked += len({part.name for row in tier.capsules() for part in row.parts})
            for found in tier.verify():
                bad += 1
                print(f"{found.path}: {found.reason}; {found.capsules} capsules need it")
    print(f"{checked} parts read, {bad} bad")
    if bad:
        print("A server drops these and their capsules when it comes upon them.")
        return 1
    return 0


def _base(directory: Path | None) -> Path:
    return default_capsule_dir() if directory is None else directory


@contextmanager
def _stores(directory: Path | None, *, tidies: bool = False) -> Iterator[list[DiskTier]]:
    """Each store below the base directory, or the one that it is itself. All are locked before
    anything is done to one. `tidies`: what no server could use any more goes too."""
    base = _base(directory)
    if directory is not None and not base.is_dir():
        raise NotFoundError(f"--dir: {base} is no directory")
    with ExitStack() as opened:
        tiers = []
        for manifest in sorted([*base.glob(FILE_NAME), *base.glob(f"*/{FILE_NAME}")]):
            # No budget: a look at a store must not evict from it.
            tier = DiskTier.open(manifest.parent, None, budget_bytes=1 << 62, tidies=tidies)
            opened.callback(tier.close, WAIT_S)
            tiers.append(tier)
        yield tiers


def _list(tier: DiskTier) -> list[Listed]:
    rows = tier.capsules()
    owners: dict[CapsuleKey, list[str]] = {}
    for session in tier.sessions():
        for key in _keys_of(session, rows):
            owners.setdefault(key, []).append(session.id)
    return [
        Listed(tier.directory.name, row, tier.footprint(row.key), tuple(owners.get(row.key, ())))
        for row in rows
    ]


def _keys_of(session: SessionRow, rows: list[CapsuleRow]) -> list[CapsuleKey]:
    """The capsules that are the state at some position of this session's journal."""
    tokens = np.frombuffer(session.tokens, dtype="<i4")
    mine = sorted(
        (
            row.key
            for row in rows
            if row.key.namespace == session.namespace and row.key.position <= len(tokens)
        ),
        key=lambda key: key.position,
    )
    digests = prefix_digests(tokens, [key.position for key in mine])
    return [key for key, digest in zip(mine, digests, strict=True) if key.digest == digest]


def _of_session(tier: DiskTier, session_id: str) -> tuple[list[CapsuleKey], bool]:
    rows, sessions = tier.capsules(), tier.sessions()
    chosen = [session for session in sessions if session.id == session_id]
    if not chosen:
        return [], False
    keys = set(_keys_of(chosen[0], rows))
    for session in sessions:
        if session.id != session_id:
            keys.difference_update(_keys_of(session, rows))
    tier.drop_session(session_id)
    tier.drop_turns(chosen[0].namespace, chosen[0].chain)
    return list(keys), True


def _json(item: Listed) -> dict[str, Any]:
    row = item.row
    return {
        "store": item.store,
        "key": item.digest,
        "namespace": row.key.namespace,
        "position": row.key.position,
        "parts": len(row.parts),
        "exclusive_bytes": item.footprint.exclusive_bytes,
        "shared_bytes": item.footprint.shared_bytes,
        "pinned": row.pinned,
        "used_at": row.used_at,
        "sessions": list(item.sessions),
    }


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise InvalidRequestError(
            f"--older-than: a number and s, m, h or d are needed, like 12h, not {text!r}"
        )
    return float(found[1]) * _UNITS_S[found[2]]
