"""Which forms do fields have that a function reads, and no type alone describes?

One table: the function that reads a field, and the JSON schema of all that it takes. A reader
without an entry has no schema, and the document can't be built: it can't fall behind in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from capserve.api import completions, messages_schema, responses_schema, schemas
from capserve.api.messages_schema import MAX_BLOCKS
from capserve.api.responses_schema import TEXT_PARTS
from capserve.api.schemas import MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOOLS

Json = dict[str, Any]

NULL: Json = {"type": "null"}
STRING: Json = {"type": "string"}
BOOLEAN: Json = {"type": "boolean"}
INTEGER: Json = {"type": "integer"}
OBJECT: Json = {"type": "object"}


def one_of(*forms: Json) -> Json:
    return {"anyOf": list(forms)}


def maybe(form: Json) -> Json:
    """`form`, or null, which is the same as absence."""
    return one_of(form, NULL)


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: str = "", /, **properties: Json) -> Json:
    """An object with these fields; others are ignored. `required`: names, separated by blanks."""
    form: Json = {"type": "object", "properties": properties}
    if required:
        form["required"] = required.split()
    return form


def tagged(kind: str, required: str = "", /, **properties: Json) -> Json:
    """A record that says in `type` what it is."""
    return record(f"type {required}".strip(), type={"const": kind}, **properties)


_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TOKENS: Json = {"type": "array", "items": ref("TokenId"), "minItems": 1}
_MARK = maybe(OBJECT)


def _text_list(*kinds: Json) -> Json:
    return one_of(STRING, {"type": "array", "items": one_of(*kinds), "maxItems": MAX_BLOCKS})


MODE: Json = {"enum": ["auto", "required"]}
"""Of allowed tools: may or must one of them be called?"""


def allowed(tool: Json) -> Json:
    return {"type": "array", "items": tool, "minItems": 1, "maxItems": MAX_TOOLS}


_FUNCTION = tagged("function", "function", function=record("name", name=STRING))

COMPONENTS: Mapping[str, Json] = {
    "CacheControl": maybe(tagged("ephemeral")),
    "Content": one_of(
        NULL,
        STRING,
        {
            "type": "array",
            "items": one_of(
                tagged("text", "text", text=STRING, cache_control=ref("CacheControl")),
                tagged("refusal", "refusal", refusal=STRING, cache_control=ref("CacheControl")),
            ),
        },
    ),
    "Stop": one_of(NULL, _STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}),
    "FunctionChoice": one_of(
        {"enum": ["auto", "none", "required", None]},
        _FUNCTION,
        tagged(
            "allowed_tools",
            "allowed_tools",
            allowed_tools=record("mode tools", mode=MODE, tools=allowed(_FUNCTION)),
        ),
    ),
    "ResponseFormat": one_of(
        NULL,
        tagged("text"),
        tagged("json_object"),
        tagged(
            "json_schema",
            "json_schema",
            json_schema=record("schema", name=maybe(STRING), strict=maybe(BOOLEAN), schema=OBJECT),
        ),
    ),
    "Pin": one_of(NULL, BOOLEAN, {"type": "integer", "minimum": 1}),
    "Prompt": one_of(
        STRING,
        _TOKENS,
        {
            "type": "array",
            "items": one_of(STRING, _TOKENS),
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        },
    ),
    # -- the Anthropic dialect
    "TextBlock": tagged("text", "text", text=STRING, cache_control=_MARK),
    "ThinkingBlock": tagged("thinking", "thinking", thinking=STRING),
    "RedactedThinkingBlock": tagged("redacted_thinking"),
    "ToolUseBlock": tagged(
        "tool_use", "id name", id=STRING, name=STRING, input=OBJECT, cache_control=_MARK
    ),
    "ToolResultBlock": tagged(
        "tool_result",
        "tool_use_id",
        tool_use_id=STRING,
        content=one_of(NULL, _text_list(ref("TextBlock"))),
        is_error=maybe(BOOLEAN),
        cache_control=_MARK,
    ),
    "System": one_of(NULL, _text_list(ref("TextBlock"))),
    "TurnForm": one_of(
        record(
            "role content",
            role={"const": "user"},
            content=_text_list(ref("TextBlock"), ref("ToolResultBlock")),
        ),
        record(
            "role content",
            role={"const": "assistant"},
            content=_text_list(
                *map(
                    ref,
                    ("TextBlock", "ThinkingBlock", "RedactedThinkingBlock", "ToolUseBlock"),
                )
            ),
        ),
        record("role content", role={"const": "system"}, content=_text_list(ref("TextBlock"))),
    ),
    # -- responses
    "PartsText": one_of(
        NULL,
        STRING,
        {
            "type": "array",
            "items": one_of(
                tagged("refusal", "refusal", refusal=STRING),
                record("type text", type={"enum": sorted(TEXT_PARTS - {"refusal"})}, text=STRING),
            ),
        },
    ),
}

_FORMS: Mapping[Callable[..., Any], Json] = {
    schemas.join_text: ref("Content"),
    schemas._cache_control: ref("CacheControl"),
    schemas._arguments: {"description": "JSON text; the object itself is taken, too"},
    schemas._stops: ref("Stop"),
    schemas._tool_choice: ref("FunctionChoice"),
    schemas._response_format: ref("ResponseFormat"),
    schemas._pin: ref("Pin"),
    completions._prompts: ref("Prompt"),
    completions._suffix: {"enum": ["", None]},
    messages_schema._system: ref("System"),
    messages_schema._tool_type: {"enum": ["custom", None]},
    responses_schema.text_of: ref("PartsText"),
    responses_schema._input: {},  # item by item, elsewhere
    responses_schema._include: maybe(
        {
            "type": "array",
            "items": {"type": "string", "not": {"const": "message.output_text.logprobs"}},
        }
    ),
}


def form_of(reader: Callable[..., Any], inner: Json) -> Json:
    """What `reader` takes; `inner` is the form of what it hands on. KeyError for an unknown one."""
    match reader.__qualname__.split(".")[0]:
        case "_at_most":
            kinds = [form.get("type") for form in inner.get("anyOf", [inner])]
            bound = "maxProperties" if "object" in kinds else "maxItems"
            return {**inner, bound: inspect.getclosurevars(reader).nonlocals["most"]}
        case "_never":
            return {"enum": [None, False, 0]}
        case _:
            return _FORMS[reader]
