"""How does a request body come in without taking the memory or the event loop?

Read on the loop in the pieces that the socket gives, counted while it comes: one body has a limit
(413), and so have all bodies that are held at once (503). One that stops coming, or comes too
slowly, is given up (408). Parsing is left to the text thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from capserve.api.errors import UnsupportedMediaError
from capserve.errors import CapserveError, TooLargeError, UnavailableError

HELD_BODIES = 8
"""Full-size bodies that may be in memory at once. Real ones are 100 times smaller than the limit,
so this only binds an attack: 8 x 16 MiB is what a small host can lose for a second."""

STALL_TIMEOUT_S = 30.0
"""Longest wait for the next piece. Retransmission after a lost packet takes a few seconds; a client
that is silent for longer has gone without saying so, or holds our memory on purpose."""

BODY_TIMEOUT_S = 120.0
"""Longest time for a whole body, against one that trickles. A full-size body then needs 1.1 Mbit/s;
a real one, 100 times smaller, passes over any line."""


class RequestTimeoutError(CapserveError):
    """The body did not come in time. The connection closes, since the rest of it may still come."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Bodies:
    """Bytes of all bodies that wait for their turn to be parsed."""

    def __init__(
        self,
        max_body_bytes: int,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._stall_timeout_s = stall_timeout_s
        self._body_timeout_s = body_timeout_s
        self._max_held_bytes = HELD_BODIES * max_body_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole JSON body; its bytes count as held from their arrival until the block ends.

        Raises `UnsupportedMediaError`, `TooLargeError`, `UnavailableError` or
        `RequestTimeoutError`.
        """
        _require_json(request)
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit():
            self._check(int(declared))  # refused before a byte of it is read
        body = bytearray()
        try:
            try:
                await self._receive(request, body)
            except TimeoutError:
                raise RequestTimeoutError(
                    f"The request body came too slowly: {len(body)} of {declared or 'unknown'} "
                    f"bytes are here. A pause may take {self._stall_timeout_s:g} s, the whole "
                    f"body {self._body_timeout_s:g} s."
                ) from None
            yield bytes(body)
        finally:
            self.held_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._body_timeout_s
        async with asyncio.timeout(self._stall_timeout_s) as clock:
            async for piece in request.stream():
                self._check(len(body) + len(piece))
                if self.held_bytes + len(piece) > self._max_held_bytes:
                    raise UnavailableError(
                        f"Request bodies of {self.held_bytes} bytes wait to be read; "
                        f"{self._max_held_bytes} are the most.",
                        retry_after_s=1.0,
                    )
                body += piece
                self.held_bytes += len(piece)
                clock.reschedule(min(loop.time() + self._stall_timeout_s, deadline))

    def _check(self, nbytes: int) -> None:
        if nbytes > self._max_body_bytes:
            raise TooLargeError(
                f"The request body has {nbytes} bytes or more; "
                f"max_body_bytes is {self._max_body_bytes}."
            )


def _require_json(request: Request) -> None:
    """Also a guard: a web page can post to a local server, but not with this type, unasked."""
    given = request.headers.get("content-type", "")
    essence = given.partition(";")[0].strip().lower()
    if essence != "application/json" and not essence.endswith("+json"):
        raise UnsupportedMediaError(
            f"The content-type must be application/json, got {given[:100] or 'none'}."
        )
