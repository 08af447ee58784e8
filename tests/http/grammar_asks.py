"""Requests that demand a form, and what came of them: for tests of enforcement on the wire."""

from __future__ import annotations

import json
from typing import Any

from harness import Served, chat_body, user
from jsonschema import Draft202012Validator

CITIES = ["Oslo", "Rome"]
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": PLACE, "paint": COLOUR}
FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE, "strict": True}}
CHATTER = "I would rather talk about something else."


def tools(strict: bool | None = None) -> list[dict[str, Any]]:
    more = {} if strict is None else {"strict": strict}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in SCHEMAS.items()
    ]


def call(function: str, /, **parameters: str) -> str:
    written = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()
    )
    return f"<tool_call>\n<function={function}>\n{written}</function>\n</tool_call>"


def thought(content: str) -> str:
    return f"A thought.\n</think>\n\n{content}"


def asked(word: str = "hello", **fields: Any) -> dict[str, Any]:
    return {**chat_body([user(word)]), "seed": 5, "max_tokens": 900, **fields}


def choices(served: Served, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """Each choice's `message` and `finish_reason`, also from a stream."""
    if not stream:
        response = served.post(body)
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["choices"]
        return found
    lines, chunks = served.events(body)
    assert lines[-1] == "data: [DONE]", lines[-1]
    told = [
        {"message": {"content": "", "tool_calls": []}, "finish_reason": None}
        for _ in range(body.get("n") or 1)
    ]
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        choice, delta = told[piece["index"]], piece["delta"]
        choice["message"]["content"] += delta.get("content") or ""
        choice["message"]["tool_calls"] += delta.get("tool_calls") or []
        choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
    return told


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of valid calls."""
    found = []
    for one in choice["message"].get("tool_calls") or []:
        arguments = json.loads(one["function"]["arguments"])
        Draft202012Validator(SCHEMAS[one["function"]["name"]]).validate(arguments)
        found.append((one["function"]["name"], arguments))
    return found
