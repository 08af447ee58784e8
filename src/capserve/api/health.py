"""Is the server well, is it ready, what has it done? `/health`, `/ready`, `/metrics`.

None of these waits for the engine: they read values that the worker publishes. `/health` and
`/ready` need no key (supervisors have none); `/metrics` does.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from capserve import __version__
from capserve.api.json_response import json_response
from capserve.api.state import ServerState
from capserve.errors import UnavailableError

RETRY_READY_S = 2.0
"""A model that loads or an engine that recovers is a matter of seconds."""


def router(state: ServerState) -> APIRouter:
    """The three routes over `state`."""
    routes = APIRouter()
    model = state.model

    @routes.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """200 when green, 503 when red: a supervisor that only reads statuses sees it too."""
        worker = state.worker.health()
        green = worker["status"] == "ok"
        report: dict[str, Any] = {
            **worker,
            "status": "green" if green else "red",
            "reason": None if green else worker["fault"] or worker["stuck"] or worker["status"],
            "version": __version__,
            "uptime_s": round(time.monotonic() - state.started_at, 3),
            "model": {
                "name": worker["model"],
                "served_names": list(model.served_names),
                "max_model_len": model.max_model_len,
                "max_drafts": model.max_drafts,
            },
            "queue_depth": state.worker.depth(),
            "max_queue_depth": state.limits.max_queue_depth,
        }
        # No Retry-After here: a red server does not know when it will be well.
        return json_response(report, 200 if green else 503)

    @routes.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        if not state.worker.ready:
            worker = state.worker.health()
            what = "shutting down" if worker["draining"] else "not ready"
            raise UnavailableError(f"The server is {what}.", retry_after_s=RETRY_READY_S)
        return json_response({"ready": True})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return routes
