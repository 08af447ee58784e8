"""How does a request body come in without taking the memory or the event loop?

Read on the loop in the pieces that the socket gives, counted while it comes: one body has a limit
(413), and so have all bodies that are held at once (503). Parsing is left to the text thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from capserve.api.errors import UnsupportedMediaError
from capserve.errors import TooLargeError, UnavailableError

HELD_BODIES = 8
"""Full-size bodies that may be in memory at once. Real ones are 100 times smaller than the limit,
so this only binds an attack: 8 x 32 MB is what a small host can lose for a second."""


class Bodies:
    """Bytes of all bodies that wait for their turn to be parsed."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = HELD_BODIES * max_body_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole JSON body; its bytes count as held until the block ends.

        Raises `UnsupportedMediaError`, `TooLargeError` or `UnavailableError`.
        """
        _require_json(request)
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit():
            self._check(int(declared))  # refused before a byte of it is read
        body = bytearray()
        mine_bytes = 0
        try:
            async for piece in request.stream():
                self._check(len(body) + len(piece))
                if self.held_bytes + len(piece) > self._max_held_bytes:
                    raise UnavailableError(
                        f"Request bodies of {self.held_bytes} bytes wait to be read; "
                        f"{self._max_held_bytes} are the most.",
                        retry_after_s=1.0,
                    )
                body += piece
                mine_bytes += len(piece)
                self.held_bytes += len(piece)
            yield bytes(body)
        finally:
            self.held_bytes -= mine_bytes

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
