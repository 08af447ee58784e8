"""Which models are served? `GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from capserve.api.errors import ModelNotFoundError
from capserve.api.json_response import json_response
from capserve.api.state import ModelInfo, ServerState


def _card(name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "capserve",
        "max_model_len": model.max_model_len,
    }


def router(state: ServerState) -> APIRouter:
    """The two routes over `state.model`."""
    routes = APIRouter()
    model = state.model

    @routes.get("/v1/models")
    async def list_models() -> Response:
        cards = [_card(name, model) for name in model.served_names]
        return json_response({"object": "list", "data": cards})

    # A path parameter, since hub ids have a slash in them.
    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name not in model.served_names:
            served = ", ".join(repr(known) for known in model.served_names)
            raise ModelNotFoundError(f"The model {name!r} is not served here; {served} is.")
        return json_response(_card(name, model))

    return routes
