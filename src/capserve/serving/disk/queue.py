"""What waits to be written, in which order, and what is given up when it is too much?

Changes in the order in which they came. A newer row of the same session or capsule takes the place
of one that waits. Parts keep their memory while they wait, so saves are bounded in bytes, but for
the newest one; rows that only say that something is gone or pinned are small, and are never given
up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from capserve.engine.seam import CapsulePart
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, SessionRow, TurnRow
from capserve.serving.disk.manifest import BadRow

BATCH_BYTES = 64 << 20
"""Parts that one transaction waits for: what a kill may lose although it was written."""
BATCH_CHANGES = 256


@dataclass(frozen=True, slots=True)
class Save:
    row: CapsuleRow
    parts: Sequence[CapsulePart]


@dataclass(frozen=True, slots=True)
class Forget:
    key: CapsuleKey


@dataclass(frozen=True, slots=True)
class Pin:
    key: CapsuleKey
    pinned: bool


@dataclass(frozen=True, slots=True)
class PutSession:
    row: SessionRow


@dataclass(frozen=True, slots=True)
class DropSession:
    id: str


@dataclass(frozen=True, slots=True)
class PutTurn:
    row: TurnRow


@dataclass(frozen=True, slots=True)
class DropTurns:
    namespace: str
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DropPart:
    """Its file is bad. The writer unlinks it, who may be writing it anew."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Clear:
    """Everything goes."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """The manifest that was the `generation`th is damaged."""

    reason: str
    generation: int


@dataclass(frozen=True, slots=True)
class DropRows:
    """They can't be read."""

    rows: tuple[BadRow, ...]


Change: TypeAlias = (
    Save
    | Forget
    | Pin
    | PutSession
    | DropSession
    | PutTurn
    | DropTurns
    | DropPart
    | Clear
    | StartOver
    | DropRows
)
ROWS = (PutSession, PutTurn)
"""Those that outlive a fault: small, and nobody would hand them over again."""
HEAVY = (Save, *ROWS)
"""Those that bring new bytes."""


class WriteQueue:
    """No lock of its own. Bytes of what was taken count until it is released."""

    def __init__(self) -> None:
        self.pending_bytes = 0
        self._changes: OrderedDict[int, Change] = OrderedDict()
        self._next = 0
        self._places: dict[CapsuleKey | str, int] = {}
        """Where the save of a capsule, or the row of a session, waits."""
        self._counted: dict[int, tuple[tuple[bytes, int], ...]] = {}
        """Parts counted for a save, by the identity of the change."""
        self._uses: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._changes)

    def put(self, change: Change, on_disk: Container[bytes] = ()) -> None:
        """`on_disk`: names of parts that have a file, and so no bytes to be written."""
        self._supersede(change)
        match change:
            case Save(row, parts):
                counted = tuple((p.name, p.nbytes) for p in parts if p.name not in on_disk)
                self._counted[id(change)] = counted
                for name, nbytes in counted:
                    self._uses[name] += 1
                    if self._uses[name] == 1:
                        self.pending_bytes += nbytes
                self._places[row.key] = self._next
            case PutSession(session):
                self._places[session.id] = self._next
            case _:
                pass
        self.pending_bytes += _row_bytes(change)
        self._changes[self._next] = change
        self._next += 1

    def put_back(self, changes: Sequence[Change]) -> None:
        """At the front: what was taken and could not be written. No saves."""
        for change in reversed(changes):
            assert not isinstance(change, Save)
            place = next(iter(self._changes), self._next) - 1
            if isinstance(change, PutSession):
                if change.row.id in self._places:
                    continue  # a newer row waits
                self._places[change.row.id] = place
            self.pending_bytes += _row_bytes(change)  # its taker releases it
            self._changes[place] = change
            self._changes.move_to_end(place, last=False)

    def waiting(self, key: CapsuleKey) -> Save | None:
        place = self._places.get(key)
        found = None if place is None else self._changes[place]
        return found if isinstance(found, Save) else None

    def replace_waiting(self, row: CapsuleRow) -> None:
        """Another row for a save that waits; its place and its parts stay."""
        place = self._places[row.key]
        old = self._changes[place]
        assert isinstance(old, Save)
        new = Save(row, old.parts)
        self._counted[id(new)] = self._counted.pop(id(old))
        self._changes[place] = new

    def cancel(self, key: CapsuleKey) -> bool:
        """Give up a save that waits."""
        if key not in self._places:
            return False
        self._remove(self._places[key])
        return True

    def trim(self, bound_bytes: int) -> list[CapsuleKey]:
        """Give up the oldest saves, then the oldest turns, until the rest is within the bound.

        The newest save stays, or one that is larger than the bound would never be written.
        """
        lost: list[CapsuleKey] = []
        newest = next((p for p, c in reversed(self._changes.items()) if isinstance(c, Save)), None)
        for kind in (Save, PutTurn):
            for place, change in list(self._changes.items()):
                if self.pending_bytes <= bound_bytes:
                    return lost
                if isinstance(change, kind) and place != newest:
                    self._remove(place)
                    if isinstance(change, Save):
                        lost.append(change.row.key)
        return lost

    def drop(self, kinds: tuple[type, ...] = HEAVY) -> list[CapsuleKey]:
        """Give up all changes of these kinds; the capsules among them."""
        dropped = [(place, c) for place, c in self._changes.items() if isinstance(c, kinds)]
        for place, _ in dropped:
            self._remove(place)
        return [c.row.key for _, c in dropped if isinstance(c, Save)]

    def take(self) -> list[Change]:
        """The next changes, for one transaction. `release` each when it is done with."""
        taken: list[Change] = []
        nbytes = 0
        while self._changes and len(taken) < BATCH_CHANGES and nbytes < BATCH_BYTES:
            change = self._unlink(next(iter(self._changes)))
            nbytes += sum(size for _, size in self._counted.get(id(change), ()))
            taken.append(change)
        return taken

    def release(self, change: Change) -> None:
        self.pending_bytes -= _row_bytes(change)
        for name, nbytes in self._counted.pop(id(change), ()):
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                self.pending_bytes -= nbytes

    def _supersede(self, change: Change) -> None:
        match change:
            case Save(row, _):
                self.cancel(row.key)
            case PutSession(session):
                self._remove(self._places.get(session.id))
            case DropSession(session_id):
                self._remove(self._places.get(session_id))
            case _:
                pass

    def _remove(self, place: int | None) -> None:
        if place is not None:
            self.release(self._unlink(place))

    def _unlink(self, place: int) -> Change:
        change = self._changes.pop(place)
        match change:
            case Save(row, _):
                self._places.pop(row.key, None)
            case PutSession(session):
                self._places.pop(session.id, None)
            case _:
                pass
        return change


def _row_bytes(change: Change) -> int:
    """Bytes that a row keeps alive, near enough for a bound."""
    match change:
        case PutSession(row):
            return len(row.tokens) + len(row.conversation)
        case PutTurn(row):
            return len(row.record.text) + row.record.tokens.nbytes
        case _:
            return 0
