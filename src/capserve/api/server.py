"""How is the app put on a socket, and taken off it again?

`serve` blocks until a signal; `running` serves from a thread, for tests and for the demo. The
socket is bound before the server starts: a taken port is one clear error, port 0 is known at once.

A signal drains: the socket stays open, so that probes and clients are told, while the worker takes
nothing new and ends what it has. Then, or at the deadline, the server leaves. A second signal ends
the wait.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capserve.errors import StartupError

log = logging.getLogger("capserve.api")

KEEP_ALIVE_S = 90
"""Longer than the 60-75 s of common connection pools: the client must be the one who closes first,
or a pooled connection dies in its hand."""

DRAIN_S = 30.0
"""Turns that were taken may take this long to finish once the server is told to stop."""

LAST_WORDS_S = 2
"""For the terminal events and replies of turns that the deadline cancels, on their way out."""

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


class Drains(Protocol):
    """What `serve` asks of `EngineWorker`. All of it returns at once."""

    def drain(self) -> None: ...

    @property
    def drained(self) -> bool: ...

    def cancel_all(self) -> None: ...


class _Server(uvicorn.Server):
    """Says when it listens, and leaves in two steps: drain `worker`, then close."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        worker: Drains | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._worker = worker
        self._drain_s = drain_s
        self._deadline: float | None = None
        self.signals: list[int] = []
        """Those that asked it to stop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Between any two instructions of the loop, perhaps in the middle of a lock: only noted.
        self.signals.append(sig)
        self.force_exit = len(self.signals) > 1

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second, on the loop. True: close the socket and leave."""
        return await super().on_tick(counter) or (bool(self.signals) and self._may_leave())

    def _may_leave(self) -> bool:
        if self._worker is None:
            return True
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain_s
            self._worker.drain()
            log.info("stopping: turns have %g s; another signal stops at once", self._drain_s)
        left_s = self._deadline - time.monotonic()
        if self.force_exit:
            log.warning("stopping at once")
            self._worker.cancel_all()
            grace_s = 0
        elif self._worker.drained:
            # The turns are over; what they said may still be on its way to a slow reader.
            grace_s = max(LAST_WORDS_S, math.ceil(left_s))
        elif left_s <= 0:
            log.warning("the drain timeout is over: what still runs is cancelled")
            self._worker.cancel_all()
            grace_s = LAST_WORDS_S
        else:
            return False
        self.config.timeout_graceful_shutdown = grace_s
        return True


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
    worker: Drains | None = None,
    drain_s: float = DRAIN_S,
) -> int | None:
    """Serve `app` until SIGINT or SIGTERM, then let turns in flight finish for `drain_s` seconds.

    Returns after that, so that the caller can stop what it started: None, or the number of a second
    signal that ended the wait. `worker` takes the turns; without one there is nothing to drain, and
    requests in flight have `drain_s`. `listener` is a socket from `bind`, for a caller that wants a
    taken port to fail before a model is loaded; else one is bound here. `on_started` gets the base
    URL. Raises `StartupError`. Main thread only.
    """
    bound = listener or bind(host, port)
    url = base_url(bound)
    with bound, _outlived_signals():
        config = _config(app, math.ceil(drain_s))
        server = _Server(config, lambda: on_started(url), worker, drain_s)
        server.run(sockets=[bound])
    return server.signals[1] if len(server.signals) > 1 else None


@contextmanager
def _outlived_signals() -> Iterator[None]:
    """Nothing ends the process between uvicorn's last line and the caller's next one.

    uvicorn puts back the handlers that it found. Python's own would end the process there, before
    the worker is stopped, when a second signal comes a moment late.
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
