"""Which JSON does each endpoint take? Told by the very models that read it.

The library makes schemas of their types and bounds; `openapi_forms` says what the reading functions
take. What a protocol shares with chat is copied from chat's own schema, by the same tables by which
it is handed on. What depends on the served model (names, vocabulary, drafts) is put in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema
from pydantic_core import core_schema as core

from capserve.api import completions, messages_translate, responses_translate
from capserve.api.completions import CompletionRequest
from capserve.api.messages_schema import CountRequest, MessagesRequest, Turn
from capserve.api.openapi_forms import (
    BOOLEAN,
    COMPONENTS,
    MODE,
    NULL,
    OBJECT,
    STRING,
    Json,
    allowed,
    form_of,
    maybe,
    one_of,
    record,
    ref,
    tagged,
)
from capserve.api.responses_schema import (
    HOSTED_TOOLS,
    ITEMS,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
)
from capserve.api.schemas import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Wire
from capserve.api.sessions import ForkBody, PinBody, UndoBody
from capserve.api.state import ModelInfo
from capserve.api.tokens import DetokenizeRequest, TokenizeRequest

MODELS: tuple[type[Wire], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    *dict.fromkeys(ITEMS.values()),
    FunctionTool,
    CustomTool,
    NamespaceTool,
    MessagesRequest,
    CountRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ForkBody,
    UndoBody,
    PinBody,
)


_OURS = "x-component"


class _Generator(GenerateJsonSchema):
    """The library's, for fields that a function of ours reads before or instead of a type."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def function_before_schema(self, schema: core.BeforeValidatorFunctionSchema) -> Json:
        inner = self.generate_inner(schema["schema"])
        return _hidden(form_of(schema["function"]["function"], inner))

    def function_after_schema(self, schema: core.AfterValidatorFunctionSchema) -> Json:
        inner = self.generate_inner(schema["schema"])
        return _hidden(form_of(schema["function"]["function"], inner))

    def function_plain_schema(self, schema: core.PlainValidatorFunctionSchema) -> Json:
        return _hidden(form_of(schema["function"]["function"], {}))

    def model_schema(self, schema: core.ModelSchema) -> Json:
        # What a block may be depends on the role beside it, which no type of one field can say.
        return _hidden(ref("TurnForm")) if schema["cls"] is Turn else super().model_schema(schema)


def _hidden(form: Json) -> Json:
    """The library looks every reference up, and knows none but its own: ours wait in a key."""
    if "$ref" in form and form["$ref"].rpartition("/")[2] in COMPONENTS:
        return {_OURS: form["$ref"]}
    return form


def _shown(value: Any) -> Any:
    """A copy of `value` with our references in place, without what the library adds for forms on a
    screen: titles, and that the default of an absent field is null."""
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        items = {("$ref" if key == _OURS else key): _shown(item) for key, item in value.items()}
        if isinstance(items.get("title"), str):
            del items["title"]
        if items.get("default", 0) is None:
            del items["default"]
        return items
    return value


def request_schemas(model: ModelInfo) -> dict[str, Json]:
    """Every schema of a request by its component's name."""
    mode: JsonSchemaMode = "validation"
    _, generated = models_json_schema(
        [(one, mode) for one in MODELS],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    made = _renamed(generated["$defs"])
    assert not made.keys() & COMPONENTS.keys(), "two forms of one name"
    found: dict[str, Json] = _shown({**COMPONENTS, **made})
    found["TokenId"] = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    chat = found["ChatRequest"]
    _of_the_model(chat["properties"], model)
    _share(found["CompletionRequest"], chat, completions.SHARED)
    _share(found["ResponsesRequest"], chat, responses_translate.SHARED)
    for name in ("MessagesRequest", "CountRequest"):
        # What a client counts is what it sends afterwards: fields of the reply are checked there.
        _share(found[name], chat, messages_translate.SHARED_FIELDS)
        found[name]["properties"]["model"] = {"enum": list(model.served_names)}
        found[name]["properties"]["thread"] = NULL
    del found["CountRequest"]["properties"]["max_tokens"]
    found["ResponsesRequest"]["properties"] |= {
        "tools": maybe({"type": "array", "items": ref("ResponsesTool"), "maxItems": MAX_TOOLS}),
        "tool_choice": ref("ResponsesToolChoice"),
        "input": ref("Input"),
    }
    found["ResponsesRequest"]["required"] = ["input"]
    found["TextOptions"]["properties"]["format"] = ref("ResponsesFormat")
    found |= _responses()
    found |= _tokens(found, chat)
    return found


def _renamed(generated: Json) -> Json:
    """Two models are called `Tool`; the library tells them apart by all of their modules' names."""
    text = json.dumps(generated)
    for module, name in (("schemas", "Tool"), ("messages_schema", "MessagesTool")):
        text = text.replace(f"capserve__api__{module}__Tool", name)
    renamed: Json = json.loads(text)
    return renamed


def _of_the_model(chat: Json, model: ModelInfo) -> None:
    chat["model"] = {"enum": [*model.served_names, None]}
    chat["flashrt_K"] = maybe({"type": "integer", "minimum": 0, "maximum": model.max_drafts})
    # Below the size of the vocabulary, too, which is no matter of digits.
    chat["logit_bias"]["propertyNames"] = {"pattern": "^[0-9]{1,10}$"}


def _share(form: Json, chat: Json, names: Iterable[str]) -> None:
    """Fields of chat's that `form` has not itself."""
    form["properties"] |= {
        name: chat["properties"][name] for name in names if name not in form["properties"]
    }


def _responses() -> dict[str, Json]:
    """What is read one by one: items and tools by their type."""
    items: list[Json] = []
    for kind, model in ITEMS.items():
        if kind == "message":
            # The short form has a role and no type.
            items.append(_also(model.__name__, type={"enum": [kind, None]}))
        elif kind == "item_reference":
            items.append(_also(model.__name__, "type", type={"const": kind}))
            items.append(_also(model.__name__, type=NULL, role=False))
        else:
            items.append(_also(model.__name__, "type", type={"const": kind}))
    hosted = record("type", type={"enum": sorted(HOSTED_TOOLS)})
    plain = [
        _also("FunctionTool", "type", type={"const": "function"}),
        _also("CustomTool", "type", type={"const": "custom"}),
        hosted,
    ]
    inner = {"properties": {"tools": {"items": one_of(*plain)}}}
    group = {**_also("NamespaceTool", "type", type={"const": "namespace"})}
    group["allOf"] = [*group["allOf"], inner]
    one_tool = [tagged(kind, "name", name=STRING) for kind in ("function", "custom")]
    return {
        "Input": one_of(
            STRING,
            {
                "type": "array",
                "items": one_of(*items),
                "minItems": 1,
                "maxItems": MAX_MESSAGES,
            },
        ),
        "ResponsesTool": one_of(*plain, group),
        "ResponsesToolChoice": one_of(
            {"enum": ["auto", "none", "required", None]},
            *one_tool,
            tagged(
                "allowed_tools", "mode tools", mode=MODE, tools=allowed(one_of(*one_tool, hosted))
            ),
        ),
        "ResponsesFormat": one_of(
            NULL,
            tagged("text"),
            tagged("json_object"),
            tagged(
                "json_schema", "schema", name=maybe(STRING), strict=maybe(BOOLEAN), schema=OBJECT
            ),
        ),
    }


def _also(name: str, required: str = "", /, **properties: Any) -> Json:
    """The component `name` with more fields."""
    return {"allOf": [ref(name), record(required, **properties)]}


def _tokens(found: Mapping[str, Json], chat: Json) -> dict[str, Json]:
    own = found["TokenizeRequest"]["properties"]
    switches = {key: own[key] for key in own if key not in ("prompt", "messages")}
    text = record(
        "prompt", prompt=STRING, messages=NULL, model=chat["properties"]["model"], **switches
    )
    talk = {"allOf": [ref("ChatRequest"), record(prompt=NULL, **switches)]}
    detokenize = found["DetokenizeRequest"]
    properties = {
        "model": chat["properties"]["model"],
        "tokens": detokenize["properties"]["tokens"] | {"items": ref("TokenId")},
    }
    return {
        "TokenizeRequest": one_of(text, talk),
        "DetokenizeRequest": detokenize | {"properties": properties},
    }
