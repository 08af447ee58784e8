"""What did the client and the server really say to each other?

`recorded` listens on loopback, passes every byte on to the server as it comes, and keeps it. As the
client's proxy for everything else it refuses, and keeps what was asked for: an agent with telemetry
switched off should ask for nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from capserve.api.server import running

OF_A_CONNECTION = frozenset(
    (
        *("connection", "content-length", "host", "keep-alive", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""Headers that belong to one connection or that each side makes for itself."""

READ_TIMEOUT_S = 120.0
"""The server sends a sign of life every five seconds."""


@dataclass
class Exchange:
    """One request and what came back, as far as it came."""

    method: str
    path: str
    body: bytes
    status: int
    reply: bytearray = field(default_factory=bytearray)
    whole: bool = False
    """The server ended its reply."""
    broken: str | None = None
    """How it broke off. Neither this nor `whole`: the client left."""


class Relay:
    """An ASGI application in front of `server`, a URL without a path."""

    def __init__(self, server: str) -> None:
        self._http = httpx.AsyncClient(base_url=server, timeout=READ_TIMEOUT_S, trust_env=False)
        self.exchanges: list[Exchange] = []
        self.elsewhere: list[str] = []
        """What the client wanted from other hosts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if not scope["path"].startswith("/"):  # the target of a request to a proxy
            self.elsewhere.append(f"{request.method} {scope['path']}")
            await Response("Only loopback here.", 403)(scope, receive, send)
            return
        await (await self._pass_on(request))(scope, receive, send)

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        kept = [(k, v) for k, v in request.headers.items() if k not in OF_A_CONNECTION]
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._http.build_request(request.method, target, headers=kept, content=body)
        exchange = Exchange(request.method, request.url.path, body, 502)
        self.exchanges.append(exchange)
        try:
            answer = await self._http.send(asked, stream=True)
        except httpx.TransportError as error:
            exchange.broken = repr(error)
            return Response(exchange.broken, exchange.status)
        exchange.status = answer.status_code

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    exchange.reply += piece
                    yield piece
                exchange.whole = True
            except httpx.TransportError as error:
                exchange.broken = repr(error)
                raise
            finally:
                await answer.aclose()  # a client that left: the server must see it too

        response = StreamingResponse(pieces(), answer.status_code)
        response.raw_headers = [
            (k.lower(), v)
            for k, v in answer.headers.raw
            if k.lower().decode("latin-1") not in OF_A_CONNECTION
        ]
        return response


@contextmanager
def recorded(server: str) -> Iterator[tuple[Relay, str]]:
    """A relay in front of `server` while the block runs, and its URL."""
    relay = Relay(server)
    with running(relay) as url:
        yield relay, url
