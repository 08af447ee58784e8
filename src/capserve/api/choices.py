"""How do several turns of one prompt become one reply with several choices?

Each choice is a turn of its own, with a sink and a cancel token of its own; here their events are
put on one line, each under its index, and their replies into one body. The prompt counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from capserve.api.errors import error_body
from capserve.api.sse import (
    DONE,
    HEARTBEAT,
    ChatChunks,
    Json,
    ReplyHead,
    TokenBytes,
    encode,
    usage,
    whole_body,
)
from capserve.errors import CapserveError
from capserve.serving.sinks import Reply, StreamSink
from capserve.serving.turn import Delta, Failed, Finished, TurnEvent

ChoiceEvent = tuple[int, TurnEvent]
"""A choice's index, and what happened to it."""


class ChoiceEvents:
    """The events of several sinks as they come, until every one has ended. One reader."""

    def __init__(self, sinks: Sequence[StreamSink]) -> None:
        self._sinks = sinks
        self._coming: dict[asyncio.Future[TurnEvent | None], int] = {}
        self._idle = list(range(len(sinks)))
        """Choices from which nothing is awaited: their last event was handed on."""

    async def next(self, timeout_s: float | None = None, /) -> ChoiceEvent | None:
        """The next event, or None when none came in `timeout_s`."""
        for index in self._idle:
            self._coming[asyncio.ensure_future(self._sinks[index].next())] = index
        self._idle.clear()
        done, _ = await asyncio.wait(
            self._coming, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return None
        # The longest awaited first, so that no choice is starved by a faster one.
        first = next(future for future in self._coming if future in done)
        index = self._coming.pop(first)
        event = first.result()
        assert event is not None, "without a timeout there is always an event"
        if isinstance(event, Delta):
            self._idle.append(index)
        return index, event

    def close(self) -> None:
        for future in self._coming:
            future.cancel()


class ChoiceChunks:
    """Chunks of several choices; the stream is over when all have finished, or one has failed."""

    def __init__(self, head: ReplyHead, token_bytes: TokenBytes, count: int) -> None:
        self._chunks = [ChatChunks(head, token_bytes, index) for index in range(count)]
        self._finished: dict[int, Finished] = {}

    heartbeat = HEARTBEAT

    def opening(self) -> bytes:
        return b"".join(encode(chunk) for chunks in self._chunks for chunk in chunks.opening())

    def cut(self, error: CapserveError) -> bytes:
        return encode(error_body(error))

    def written(self, event: ChoiceEvent) -> tuple[bytes, bool]:
        """What `event` adds to the stream, and if the stream is over with it."""
        index, what = event
        chunks = self._chunks[index]
        match what:
            case Delta():
                return b"".join(map(encode, chunks.delta(what))), False
            case Failed():
                return encode(chunks.failed(what)), True
            case Finished():
                self._finished[index] = what
        data = b"".join(map(encode, chunks.closing(what)))
        if len(self._finished) < len(self._chunks):
            return data, False
        total = usage(*(self._finished[i] for i in range(len(self._chunks))))
        return data + b"".join(map(encode, chunks.used(total))) + DONE, True


def body_of(head: ReplyHead, token_bytes: TokenBytes, replies: Sequence[Reply]) -> Json:
    """The plain reply with all choices. `capserve` is the first one's, with all in `choices`."""
    ends = [reply.end for reply in replies if isinstance(reply.end, Finished)]
    assert len(ends) == len(replies), "a failed choice has no body"
    bodies = [
        whole_body(ChatChunks(head, token_bytes, index), [reply.delta, end])
        for index, (reply, end) in enumerate(zip(replies, ends, strict=True))
    ]
    body = bodies[0]
    if len(bodies) > 1:
        body["choices"] = [choice for each in bodies for choice in each["choices"]]
        body["usage"] = usage(*ends)
        body["capserve"] = body["capserve"] | {"choices": [each["capserve"] for each in bodies]}
    return body
