"""How does a turn reach its client, and how do we notice that the client has left?

Guarantees:

  - Headers and the reply's opening go out at once; a comment follows whenever nothing was sent for
    `heartbeat_s`, by the clock, whatever the engine does.
  - A reply is complete if and only if `[DONE]` was sent. After an error event it is not: a client
    that does not know error events sees a stream cut short, never a short answer.
  - A connection that closes sets the turn's `CancelToken` at once, also while the turn is queued.
    However this ends (reply, error, disconnect, stalled reader, shutdown), the turn is over or its
    token is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capserve.api.errors import ClientGoneError, shutting_down
from capserve.errors import CapserveError
from capserve.serving.turn import CancelToken

log = logging.getLogger("capserve.api")

T = TypeVar("T")

GOODBYE_S = 0.5
"""For the last event of a stream that a shutdown cuts: a stalled reader must not hold that up."""


E = TypeVar("E")
E_out = TypeVar("E_out", covariant=True)
E_in = TypeVar("E_in", contravariant=True)


class Events(Protocol[E_out]):
    """What a stream reads, such as `choices.ChoiceEvents`."""

    async def next(self, timeout_s: float | None = None, /) -> E_out | None:
        """The next event, or None when none came in `timeout_s`."""
        ...


class Chunks(Protocol[E_in]):
    """What an event is on the wire, in one protocol, such as `choices.ChoiceChunks`."""

    @property
    def heartbeat(self) -> bytes:
        """Sent when there was nothing else to send."""
        ...

    def opening(self) -> bytes:
        """What can be said before the first event; `written` does not say it again."""
        ...

    def cut(self, error: CapserveError, /) -> bytes:
        """The last bytes of a stream that the server has to end."""
        ...

    def written(self, event: E_in, /) -> tuple[bytes, bool]:
        """The bytes that it adds, perhaps none, and if the stream is over with them."""
        ...


class Departure:
    """Watches a connection from the moment its request was read.

    Use it on the event loop and `close` it when the response is over.
    """

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.ensure_future(_disconnected(receive))

    def cancels(self, token: CancelToken) -> None:
        """From now on the client's leaving cancels `token`, at once when it has left already."""
        self._task.add_done_callback(lambda _: token.cancel("disconnect"))

    def afterwards(self, callback: Callable[[], None]) -> None:
        """Call it on the event loop once the client has left, or the response is over."""
        self._task.add_done_callback(lambda _: callback())

    async def or_result(self, work: Awaitable[T]) -> T:
        """The result of `work`; `ClientGoneError`, with `work` cancelled, if that comes first."""
        task = asyncio.ensure_future(work)
        both: list[asyncio.Future[Any]] = [task, self._task]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGoneError("The client closed the connection.")
        finally:
            task.cancel()

    def close(self) -> None:
        """The end of the response: a turn that is not over by now is cancelled."""
        self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response, Generic[E]):
    """A turn's events as server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events[E],
        chunks: Chunks[E],
        departure: Departure,
        *,
        heartbeat_s: float,
        stall_timeout_s: float,
    ) -> None:
        """`departure` cancels the turn behind `events` when it is closed."""
        super().__init__()
        # A body of unknown length; and no proxy may collect events before it passes them on.
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._chunks = chunks
        self._departure = departure
        self._heartbeat_s = heartbeat_s
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._relay(send)
        except TimeoutError:
            # The server closes a connection whose response was left unfinished.
            log.warning("a stream was cut: its reader took nothing for %gs", self._stall_timeout_s)
        except asyncio.CancelledError:
            # Only the server's own shutdown cancels a response, when the time for it has run out.
            data = self._chunks.cut(shutting_down())
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await send({"type": "http.response.body", "body": data})
        finally:
            self._departure.close()

    async def _relay(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        sent_at = clock()

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal sent_at
            message = {"type": "http.response.body", "body": data, "more_body": more}
            async with asyncio.timeout(self._stall_timeout_s):
                await send(message)
            sent_at = clock()

        if opening := self._chunks.opening():
            await write(opening)
        while True:
            # Silence is counted from the last byte sent, not from the last event: while a long
            # call is written, many events come by that have nothing to show yet.
            quiet_s = clock() - sent_at
            if quiet_s >= self._heartbeat_s:
                await write(self._chunks.heartbeat)
                continue
            event = await self._events.next(self._heartbeat_s - quiet_s)
            if event is None:
                continue
            data, over = self._chunks.written(event)
            if data:
                await write(data, more=not over)
            if over:
                return
