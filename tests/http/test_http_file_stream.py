"""A file that nobody takes holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from capserve.api.file_stream import FileExports
from capserve.errors import CapsuleError, QueueFullError
from capserve.serving.journal import Span, SpanKind
from capserve.serving.sessions.orders import Exported, ExportedCapsule

WAIT_S = 10.0


@dataclass(frozen=True)
class Part:
    name: bytes = b"p" * 16
    is_lost: bool = False

    def pack(self) -> list[memoryview]:
        if self.is_lost:
            raise CapsuleError("it is not there any more")
        return [memoryview(bytes(4 << 20))]


def found(part: Part) -> Exported:
    spans = (Span(SpanKind.PREFILL, 0, 4),)
    return Exported(
        session_id="one",
        fingerprint="ours",
        model="fake",
        tokens=np.arange(4, dtype=np.int32),
        spans=spans,
        marks=(),
        turns=(),
        conversation=None,
        capsules=(ExportedCapsule(4, spans, (part,)),),
    )


async def order(part: Part) -> Exported:
    return found(part)


async def sent(
    exports: FileExports, part: Part, send: Callable[[Any], Awaitable[None]], *, leaves: bool
) -> None:
    async def receive() -> Any:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    response = await exports.file(order(part))
    with pytest.raises(QueueFullError):
        await exports.file(order(part))
    await asyncio.wait_for(response({"type": "http"}, receive, send), WAIT_S)


@pytest.mark.parametrize("reader", ["stalls", "leaves", "reads", "reads a lost part"])
def test_whatever_becomes_of_a_reader_the_next_file_may_go_out(reader: str) -> None:
    got: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        got.append(message)
        if reader == "stalls" and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run() -> None:
        exports = FileExports(0.05 if reader == "stalls" else WAIT_S)
        part = Part(is_lost=reader == "reads a lost part")
        for _ in range(2):
            got.clear()
            await sent(exports, part, send, leaves=reader == "leaves")

    asyncio.run(run())
    # Only a whole file has an end on the wire.
    assert (got[-1].get("more_body") is False) == (reader == "reads")
