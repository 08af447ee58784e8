"""How does a session's file go out without taking memory, threads, or the engine for long?

The order on the engine's thread only collects names and references. The parts are read and packed
in a pool thread, about a MiB ahead of the reader. One file at a time, and none for a reader that
has left or that takes nothing: each holds the states that it is made of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capserve.api.errors import ClientGoneError
from capserve.api.sessions_file import TAR_TYPE
from capserve.api.stream import Departure
from capserve.errors import CapserveError, QueueFullError
from capserve.serving.sessions.bundle import PIECE_BYTES, pieces
from capserve.serving.sessions.orders import Exported

log = logging.getLogger("capserve.api")


class FileExports:
    """Used from the event loop only."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._busy = False

    async def file(self, order: Coroutine[Any, Any, Exported]) -> Response:
        """The file of what `order` finds. Raises QueueFullError (429) while another one goes out,
        and what the order raises."""
        if self._busy:
            order.close()
            raise QueueFullError("Another session file is going out.", retry_after_s=5.0)
        self._busy = True
        try:
            found = await order
        except BaseException:
            self._over()
            raise
        return FileStream(found, self._stall_timeout_s, self._over)

    def _over(self) -> None:
        self._busy = False


class FileStream(Response):
    """A file of unknown length. One that was cut has no end on the wire, so no reader takes it for
    a whole one."""

    media_type = TAR_TYPE

    def __init__(self, found: Exported, stall_timeout_s: float, over: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        name = f"session-{found.session_id}.tar"
        self.headers["content-disposition"] = f'attachment; filename="{name}"'
        self._name = name
        self._source: Iterator[bytes | memoryview] = pieces(found)
        self._stall_timeout_s = stall_timeout_s
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure = Departure(receive)
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            while piece := await departure.or_result(asyncio.to_thread(self._next_piece)):
                await self._write(send, piece, more=True)
            await self._write(send, b"", more=False)
        except TimeoutError:
            waited_s = self._stall_timeout_s
            log.warning("%s was cut: its reader took nothing for %gs", self._name, waited_s)
        except ClientGoneError:
            log.info("%s was cut: its reader left", self._name)
        except CapserveError as error:
            # The headers are out. Asked for again, the file goes without that state.
            log.warning("%s was cut: %s", self._name, error.message)
        finally:
            departure.close()
            self._over()

    async def _write(self, send: Send, piece: bytes, *, more: bool) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    def _next_piece(self) -> bytes:
        joined = bytearray()
        for piece in self._source:
            joined += piece
            if len(joined) >= PIECE_BYTES:
                break
        return bytes(joined)
