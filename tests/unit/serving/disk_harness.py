"""Parts and rows for tests of the disk tier, made from labels so that any process can make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind

FINGERPRINT = "engine-1"
ROOMY = 1 << 30


@dataclass(frozen=True)
class FakePart:
    """A part whose bytes follow from its label."""

    label: str
    nbytes: int = 1000
    tier: str = "host"

    @property
    def name(self) -> bytes:
        return blake2b(self.label.encode(), digest_size=16).digest()

    @property
    def content(self) -> bytes:
        block = blake2b(self.label.encode(), digest_size=50).digest()
        return (block * (self.nbytes // 50 + 1))[: self.nbytes]

    def pack(self) -> Sequence[memoryview]:
        view = memoryview(self.content)
        return (view[: self.nbytes // 3], view[self.nbytes // 3 :])


def key(label: str, position: int = 100, namespace: str = "k/a") -> CapsuleKey:
    return CapsuleKey(namespace, position, blake2b(label.encode(), digest_size=16).digest())


def row(
    label: str,
    parts: Sequence[FakePart],
    position: int = 100,
    based_on: CapsuleKey | None = None,
    pinned: bool = False,
    used_at: float = 1.0,
) -> CapsuleRow:
    return CapsuleRow(
        key=key(label, position),
        spans=(
            Span(SpanKind.PREFILL, 0, position - 1),
            Span(SpanKind.DECODE, position - 1, position),
        ),
        parts=tuple(PartRow(part.name, part.nbytes) for part in parts),
        based_on=based_on,
        pinned=pinned,
        used_at=used_at,
    )


def save(tier: DiskTier, label: str, parts: Sequence[FakePart], **fields: object) -> CapsuleRow:
    made = row(label, parts, **fields)  # type: ignore[arg-type]
    tier.save(made, parts)
    return made
