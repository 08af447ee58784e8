"""In which steps does a session from a file come in?

One order after the other, each a unit of work of its own on the engine's thread: a state at a time,
so that whoever is being served waits for one and never for all of them, and so that no two are
unpacked before the first is kept. The session itself comes last; until then nobody can name it.
When an order fails, what the ones before it have kept is dropped again.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from typing import Any

from capserve.errors import CapserveError
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.journal import prefix_digests
from capserve.serving.sessions.orders import (
    CapsuleImported,
    DropImported,
    ImportCapsule,
    Imported,
    ImportSession,
    PackedCapsule,
    SessionInfo,
    SessionOrder,
)


def steps(
    session: ImportSession, capsules: Sequence[PackedCapsule]
) -> Generator[SessionOrder, Any, Imported]:
    """Yields each order and is sent its result, or thrown its CapserveError, which comes out again
    once the rest is undone. `capsules` ascend; their bytes must outlive this."""
    # Names of their own: nobody can prove that these bytes are what their tokens give.
    apart = secrets.token_bytes(16)
    digests = prefix_digests(session.tokens, [packed.position for packed in capsules])
    newest: CapsuleKey | None = None
    kept: list[CapsuleKey] = []
    known, refused = 0, None
    try:
        for packed, digest in zip(capsules, digests, strict=True):
            key = CapsuleKey(session.namespace, packed.position, digest)
            order = ImportCapsule(session.owner, key, packed, apart, newest)
            done: CapsuleImported = yield order
            if done.kept:
                kept.append(key)
            if done.kept or done.known:
                newest = key
            known += done.known
            refused = done.refused or refused
        info: SessionInfo = yield session.ending_at(newest)
    except CapserveError:
        if kept:
            yield DropImported(session.owner, tuple(kept))
        raise
    return Imported(info, len(kept), known, refused)
