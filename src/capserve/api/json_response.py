"""How does a JSON answer leave? Through orjson, which neither escapes nor sorts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`value` as an `application/json` response."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
