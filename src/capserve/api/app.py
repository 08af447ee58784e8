"""How do the parts of the wire become one ASGI app?

`create_app` wires routes, middleware and error handlers over a `ServerState`. The worker is started
and stopped by whoever made the state; the app owns only its two threads, for texts and grammars.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from capserve import __version__
from capserve.api import (
    chat,
    completions,
    health,
    messages,
    models,
    openapi,
    responses,
    sessions,
    tokens,
)
from capserve.api.auth import KeyRing
from capserve.api.body import Bodies
from capserve.api.errors import install_handlers
from capserve.api.middleware import RequestIds, RequireKey
from capserve.api.relay import Relay
from capserve.api.state import ServerState
from capserve.api.text_thread import TextThread

SPARE_TEXT_JOBS = 8
"""Requests that may be in preparation beyond what the queue takes: those a free queue is about to
take, plus a few whose refusal is about to be found."""


def create_app(state: ServerState) -> FastAPI:
    """The server as an ASGI app."""
    text = TextThread(state.limits.max_queue_depth + SPARE_TEXT_JOBS)
    grammars = TextThread(
        state.limits.max_queue_depth + SPARE_TEXT_JOBS, "capserve-grammar", "for a grammar"
    )
    bodies = Bodies(state.limits.max_body_bytes)
    relay = Relay(state, bodies, text, grammars)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        text.close()
        grammars.close()

    # No generated document, since no route declares a body; `openapi` has one. And no pages about
    # it: they would load scripts from the network.
    app = FastAPI(
        title="capserve",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(chat.router(relay))
    app.include_router(completions.router(relay))
    app.include_router(responses.router(relay, text))
    app.include_router(tokens.router(state, bodies, text))
    app.include_router(messages.router(relay, bodies))
    app.include_router(sessions.router(state, bodies))
    app.include_router(models.router(state))
    app.include_router(health.router(state))
    app.include_router(openapi.router(state))
    install_handlers(app)
    # The last one added is the outermost: an id first, then the origin, then a key, then a route.
    # So a preflight, which can't carry a key, is answered, and a page may read why it gets a 401.
    app.add_middleware(RequireKey, keys=KeyRing(state.api_keys))
    if state.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # SDKs send a dozen of their own
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(RequestIds)
    return app
