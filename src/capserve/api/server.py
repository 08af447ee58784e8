"""How is the app put on a socket, and taken off it again?

`serve` blocks until a signal; `running` serves from a thread, for tests and for the demo. The
socket is bound before the server starts: a taken port is one clear error, port 0 is known at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capserve.errors import StartupError

log = logging.getLogger("capserve.api")

KEEP_ALIVE_S = 90
"""Longer than the 60-75 s of common connection pools: the client must be the one who closes first,
or a pooled connection dies in its hand."""

GRACE_S = 10
"""Turns in flight may take this long to finish once the server is told to stop."""

BACKLOG = 2048

MAX_HEADER_BYTES = 64 << 10
"""Request line and headers together. Agents send one or two kilobytes."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `StartupError` naming the address when it is taken or not ours."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise StartupError(f"Can't listen on {host}: {error.strerror}.", param="host") from None
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"Can't listen on {host} port {port}: {error.strerror}."
        raise StartupError(message, param="port") from None
    return listener


def base_url(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _ClosesAfterTimeout:
    """Closes the connection after a 408: what the client still owes would be read as a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 408:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing)


def _config(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        _ClosesAfterTimeout(app),
        # Not the faster httptools: it has no limit on headers, so that one endless header froze the
        # event loop, and it drops the body of a POST that offers h2c. Per request it saves 0.2 ms.
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        backlog=BACKLOG,
        log_config=None,  # the composition root decides where logs go
        access_log=False,  # one line per turn comes from the metrics record instead
        server_header=False,
        ws="none",
    )


def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    listener: socket.socket | None = None,
    on_started: Callable[[str], None] = lambda url: log.info("listening on %s", url),
    grace_s: int = GRACE_S,
) -> None:
    """Serve `app` until SIGINT or SIGTERM, then let turns in flight finish for `grace_s` seconds.

    Returns after either signal, so that the caller can stop what it started. `listener` is a socket
    from `bind`, for a caller that wants a taken port to fail before a model is loaded; else one is
    bound here. `on_started` gets the base URL. Raises `StartupError`. Main thread only.
    """
    bound = listener or bind(host, port)
    url = base_url(bound)
    with bound, _outlived_signals():
        _Server(_config(app, grace_s), lambda: on_started(url)).run(sockets=[bound])


@contextmanager
def _outlived_signals() -> Iterator[None]:
    """uvicorn shuts down on a signal and then raises it again for whoever handled it before.

    Python's own handlers would end the process there, before the worker is stopped.
    """
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        for sig in before:
            signal.signal(sig, lambda *_: None)
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@contextmanager
def running(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    grace_s: int = 1,
) -> Iterator[str]:
    """Serve `app` from a thread while the block runs, on `listener` or a new one; gives its URL.

    At the end of the block turns in flight may take `grace_s` seconds, then they are cancelled.
    """
    bound = listener or bind(host, port)
    with bound:
        started = threading.Event()
        server = _Server(_config(app, grace_s), started.set)
        thread = threading.Thread(
            target=server.run, args=([bound],), name="capserve-http", daemon=True
        )
        url = base_url(bound)
        thread.start()
        try:
            while not started.wait(0.05):
                if not thread.is_alive():
                    raise StartupError(f"The HTTP server at {url} ended before it listened.")
            yield url
        finally:
            server.should_exit = True
            thread.join()
