"""A schema is kept from the request to the reply's last byte, in each protocol.

The embedded model writes at temperature 1 under a sample of the schemas of
`tests/engine/constrained_schemas.py`; the reply is read strictly (`sdk_replies.py`) and checked,
formats included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import NAME, user
from sdk_replies import send

from benchmarks.scenarios.server import OwnServer
from tests.engine.constrained_check import check
from tests.engine.constrained_more import MORE
from tests.engine.constrained_schemas import SCHEMAS

pytestmark = pytest.mark.slow

SAMPLE = [*SCHEMAS[::10], *list(MORE.values())[5::4]]
ASKED = [user("Which files are in the folder src?")]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = {"threads": 1, "max_model_len": 4096}
    with (
        OwnServer(settings) as server,
        httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=120) as client,
    ):
        yield client


def chat(schema: Any) -> dict[str, Any]:
    form = {"name": "form", "strict": True, "schema": schema}
    return {
        "messages": ASKED,
        "max_tokens": 600,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": form},
    }


def responses(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "name": "form", "strict": True, "schema": schema}
    return {
        "input": ASKED,
        "max_output_tokens": 600,
        "reasoning": {"effort": "none"},
        "text": {"format": form},
    }


def messages(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "schema": schema}
    return {"messages": ASKED, "max_tokens": 600, "output_config": {"format": form}}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("path", "form"),
    [("/v1/chat/completions", chat), ("/v1/responses", responses), ("/v1/messages", messages)],
    ids=["chat", "responses", "messages"],
)
def test_what_comes_back_is_valid_by_the_schema_that_was_sent(
    http: httpx.Client, path: str, form: Any, stream: bool
) -> None:
    assert len(SAMPLE) >= 16
    for seed, schema in enumerate(SAMPLE):
        fields = {"model": NAME, "temperature": 1.0, "seed": seed, "stream": stream}
        said = send(http, path, {**form(schema), **fields})
        assert said.reason in ("stop", "completed", "end_turn"), said
        check(json.loads(said.text), schema)
