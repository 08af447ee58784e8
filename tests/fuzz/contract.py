"""Does the served document say what the parsers take? Both are asked about the same body.

`accepts` is the parser's own word about the form of a body: types, ranges, required fields. What
needs more than one field, or the state of the server, is no matter of form: `BEYOND_FORM`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from capserve.api import messages_translate, responses_translate
from capserve.api.completions import CompletionRequest, _settings
from capserve.api.messages_schema import CountRequest, MessagesRequest
from capserve.api.responses_schema import ResponsesRequest, as_items, read_items
from capserve.api.responses_tools import offered
from capserve.api.schemas import ChatRequest
from capserve.api.sessions import ForkBody, PinBody, UndoBody
from capserve.api.tokens import DetokenizeRequest, TokenizeRequest
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError

Json = dict[str, Any]

# `1.0` is an integer to JSON Schema, and none to the parser, which looks at how it is written.
_WRITTEN = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)

BEYOND_FORM = (
    ("messages[", ".tool_use_id"),
    ("tool_choice", ".name"),
    ("tool_choice.tools", ""),
    ("thread", ""),
)
"""Heads and tails of fields that are refused for what stands in others."""


def _chat(body: Json) -> None:
    validated(ChatRequest, body)


def _completions(body: Json) -> None:
    _settings(validated(CompletionRequest, body), body)


def _responses(body: Json) -> None:
    request = validated(ResponsesRequest, body)
    responses_translate.settings(request, body, offered(request.tools or ()))
    items = as_items(request.input)
    if not items:
        raise InvalidRequestError("input is required", param="input")
    read_items(items)


def _messages(body: Json) -> None:
    request = validated(MessagesRequest, body)
    validated(ChatRequest, messages_translate.chat_body(request, body))


def _count(body: Json) -> None:
    asked = messages_translate.chat_body(validated(CountRequest, body), body)
    asked.pop("max_tokens", None)
    validated(ChatRequest, asked)


def _tokenize(body: Json) -> None:
    request = validated(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("either prompt or messages", param="prompt")
    if request.prompt is None:
        validated(ChatRequest, body)


PARSERS: Mapping[str, Callable[[Json], Any]] = {
    "ChatRequest": _chat,
    "CompletionRequest": _completions,
    "ResponsesRequest": _responses,
    "MessagesRequest": _messages,
    "CountRequest": _count,
    "TokenizeRequest": _tokenize,
    "DetokenizeRequest": lambda body: validated(DetokenizeRequest, body),
    "ForkBody": lambda body: validated(ForkBody, body),
    "UndoBody": lambda body: validated(UndoBody, body),
    "PinBody": lambda body: validated(PinBody, body),
}
"""Component of a request's body -> its parser."""


def refusal(parser: str, body: Json) -> InvalidRequestError | None:
    """Why the parser does not take the form of `body`."""
    try:
        PARSERS[parser](body)
    except InvalidRequestError as error:
        if any(
            (error.param or "").startswith(head) and (error.param or "").endswith(tail)
            for head, tail in BEYOND_FORM
        ):
            return None
        return error
    return None


@dataclass(frozen=True)
class Document:
    """The document, ready to judge values by the names of its components."""

    root: Json

    def judge(self, component: str, *, written: bool = True) -> Validator:
        """`written`: integers are those that are written as such."""
        registry = Registry().with_resource(
            "urn:document", Resource.from_contents(self.root, default_specification=DRAFT202012)
        )
        kind = _WRITTEN if written else Draft202012Validator
        reference = {"$ref": f"urn:document#/components/schemas/{component}"}
        judge: Validator = kind(reference, registry=registry)
        return judge

    def properties(self, component: str) -> Json:
        """Fields of a component with their schemas."""
        form = self.root["components"]["schemas"][component]
        found: Json = {}
        for part in (form, *form.get("allOf", ()), *form.get("anyOf", ())):
            target = part.get("$ref")
            if target is not None:
                found |= self.properties(target.rpartition("/")[2])
            found |= part.get("properties", {})
        return found


def copied(body: Json) -> Json:
    """The parser may hand on parts of a body; the next one gets its own."""
    again: Json = json.loads(json.dumps(body))
    return again
