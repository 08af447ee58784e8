"""Which JSON does each endpoint answer?

Closed forms: a reply with a field that is not told here contradicts the document. What comes from a
dataclass (the `capserve` block, a session) is made of its fields.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from capserve.api.openapi_forms import (
    BOOLEAN,
    INTEGER,
    NULL,
    OBJECT,
    STRING,
    Json,
    maybe,
    one_of,
    ref,
)
from capserve.serving.metrics import TurnMetrics
from capserve.serving.sessions.orders import SessionInfo

NUMBER: Json = {"type": "number"}
ANY: Json = {}


def closed(optional: str = "", /, **properties: Json) -> Json:
    """An object with just these fields. `optional`: names of those that may be absent."""
    may_miss = optional.split()
    assert set(may_miss) <= properties.keys()
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in may_miss],
        "additionalProperties": False,
    }


def array(items: Json) -> Json:
    return {"type": "array", "items": items}


def const(*values: str | bool) -> Json:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def _dataclass(kind: type, **renamed: str) -> tuple[Json, dict[str, Json]]:
    """The fields of a dataclass as they are written in JSON, and the forms that they refer to."""
    made = TypeAdapter(kind).json_schema(
        ref_template="#/components/schemas/{model}", mode="serialization"
    )
    inner = made.pop("$defs", {})
    for form in (made, *inner.values()):
        fields = {renamed.get(name, name): value for name, value in form["properties"].items()}
        form["properties"] = {
            name: {key: entry for key, entry in value.items() if key not in ("title", "default")}
            for name, value in fields.items()
        }
    return made["properties"], {name: closed(**form["properties"]) for name, form in inner.items()}


def _logprobs() -> dict[str, Json]:
    token = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
    entry = closed(**token, top_logprobs=array(closed(**token)))
    return {"Logprobs": maybe(closed(content=array(entry), refusal=NULL))}


def _capserve() -> dict[str, Json]:
    metrics, _ = _dataclass(TurnMetrics)
    one = {**metrics, "seed": INTEGER, "notes": array(STRING)}
    # A turn that failed has neither.
    many = closed("seed notes choices", **one, choices=array(closed(**one)))
    return {"CapserveBlock": many}


def _chat() -> dict[str, Json]:
    function = closed(name=STRING, arguments=STRING)
    call = {"id": STRING, "type": const("function"), "function": function}
    message = closed(
        "reasoning_content tool_calls",
        role=const("assistant"),
        content=maybe(STRING),
        reasoning_content=STRING,
        tool_calls=array(closed(**call)),
    )
    reason = const("stop", "length", "tool_calls")
    choice = closed(
        "token_ids",
        index=INTEGER,
        message=message,
        logprobs=ref("Logprobs"),
        finish_reason=reason,
        token_ids=array(INTEGER),
    )
    delta = closed(
        "role content reasoning_content tool_calls",
        role=const("assistant"),
        content=STRING,
        reasoning_content=STRING,
        tool_calls=array(closed(index=INTEGER, **call)),
    )
    part = closed(
        "token_ids",
        index=INTEGER,
        delta=delta,
        logprobs=ref("Logprobs"),
        finish_reason=maybe(reason),
        token_ids=array(INTEGER),
    )
    head = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
    return {
        "ChatCompletion": closed(
            "prompt_token_ids",
            **head,
            object=const("chat.completion"),
            choices=array(choice),
            usage=ref("Usage"),
            prompt_token_ids=array(INTEGER),
            capserve=ref("CapserveBlock"),
        ),
        "ChatCompletionChunk": closed(
            "usage capserve prompt_token_ids",
            **head,
            object=const("chat.completion.chunk"),
            choices=array(part),
            usage=maybe(ref("Usage")),
            prompt_token_ids=array(INTEGER),
            capserve=ref("CapserveBlock"),
        ),
        "Usage": closed(
            "completion_tokens_details",
            prompt_tokens=INTEGER,
            completion_tokens=INTEGER,
            total_tokens=INTEGER,
            prompt_tokens_details=closed(cached_tokens=INTEGER),
            completion_tokens_details=closed(reasoning_tokens=INTEGER),
        ),
    }


def _completions() -> dict[str, Json]:
    logprobs = closed(
        tokens=array(STRING),
        token_logprobs=array(NUMBER),
        top_logprobs=array({"type": "object", "additionalProperties": NUMBER}),
        text_offset=array(INTEGER),
    )
    choice = closed(
        index=INTEGER,
        text=STRING,
        logprobs=maybe(logprobs),
        finish_reason=maybe(const("stop", "length")),
    )
    head = {
        "id": STRING,
        "object": const("text_completion"),
        "created": INTEGER,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": array(choice),
    }
    block = ref("CapserveBlock")
    usage = ref("Usage")
    return {
        "Completion": closed(**head, usage=usage, capserve=block),
        "CompletionChunk": closed("usage capserve", **head, usage=maybe(usage), capserve=block),
    }


def _messages() -> dict[str, Json]:
    usage = closed(
        "output_tokens_details",
        input_tokens=INTEGER,
        cache_creation_input_tokens=INTEGER,
        cache_read_input_tokens=INTEGER,
        output_tokens=INTEGER,
        output_tokens_details=closed(thinking_tokens=INTEGER),
    )
    blocks = one_of(
        closed(type=const("text"), text=STRING),
        closed(type=const("thinking"), thinking=STRING, signature=STRING),
        closed(type=const("tool_use"), id=STRING, name=STRING, input=OBJECT),
    )
    return {
        "MessageReply": closed(
            id=STRING,
            type=const("message"),
            role=const("assistant"),
            model=STRING,
            content=array(ref("MessageBlock")),
            stop_reason=ref("StopReason"),
            stop_sequence=maybe(STRING),
            usage=ref("MessageUsage"),
            capserve=ref("CapserveBlock"),
        ),
        "MessageBlock": blocks,
        "MessageUsage": usage,
        "StopReason": const("end_turn", "max_tokens", "tool_use", "stop_sequence"),
        "TokenCount": closed(input_tokens=INTEGER),
    }


def _responses() -> dict[str, Json]:
    status = const("in_progress", "completed", "incomplete")
    text = closed(
        type=const("output_text"), text=STRING, annotations=array(ANY), logprobs=array(ANY)
    )
    thought = closed(type=const("reasoning_text"), text=STRING)
    call = {"id": STRING, "status": status, "call_id": STRING, "name": STRING, "namespace": STRING}
    items = one_of(
        closed(
            id=STRING,
            type=const("message"),
            status=status,
            role=const("assistant"),
            content=array(text),
        ),
        closed(
            id=STRING,
            type=const("reasoning"),
            status=status,
            content=array(thought),
            summary=array(ANY),
        ),
        closed("namespace", type=const("function_call"), arguments=STRING, **call),
        closed("namespace", type=const("custom_tool_call"), input=STRING, **call),
    )
    usage = closed(
        input_tokens=INTEGER,
        input_tokens_details=closed(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=closed(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    )
    word = maybe(STRING)
    reply = closed(
        "capserve",
        id=STRING,
        object=const("response"),
        created_at=INTEGER,
        status=const("in_progress", "completed", "incomplete", "failed"),
        completed_at=maybe(INTEGER),
        error=maybe(closed(code=STRING, message=STRING)),
        incomplete_details=maybe(closed(reason=const("max_output_tokens"))),
        model=STRING,
        instructions=word,
        previous_response_id=word,
        max_output_tokens=maybe(INTEGER),
        temperature=NUMBER,
        top_p=NUMBER,
        tools=array(OBJECT),
        tool_choice=ANY,
        parallel_tool_calls=BOOLEAN,
        reasoning=closed(effort=word, summary=word),
        text=closed(format=OBJECT),
        truncation=const("auto", "disabled"),
        store=BOOLEAN,
        metadata=OBJECT,
        prompt_cache_key=word,
        safety_identifier=word,
        user=word,
        background=const(False),
        output=array(ref("ResponseOutput")),
        usage=maybe(usage),
        capserve=ref("CapserveBlock"),
    )
    listed = {"type": "object", "properties": {"id": STRING, "type": STRING}}
    return {
        "ResponseReply": reply,
        "ResponseOutput": items,
        "ResponsePart": one_of(text, thought),
        "ResponseDeleted": closed(id=STRING, object=const("response"), deleted=const(True)),
        "ResponseItems": _page(listed | {"required": ["id", "type"]}, first_id=word, last_id=word),
    }


def _page(items: Json, **more: Json) -> Json:
    return closed(object=const("list"), data=array(items), has_more=BOOLEAN, **more)


def _sessions() -> dict[str, Json]:
    fields, inner = _dataclass(SessionInfo, nbytes="bytes")
    fields["boundaries"] = array(ref("Boundary"))
    session: dict[str, Any] = {"object": const("session"), **fields}
    shown = closed("boundaries", **session)
    return {
        **inner,
        "Session": shown,
        "SessionList": _page(ref("Session")),
        "SessionForks": closed(object=const("list"), data=array(ref("Session"))),
        "SessionUndone": closed(
            "boundaries", **session, removed_turns=INTEGER, removed_tokens=INTEGER
        ),
        "SessionImported": closed(
            "boundaries", **session, capsules=INTEGER, known=INTEGER, refused=maybe(STRING)
        ),
        "SessionPinned": closed(id=STRING, position=INTEGER, pinned=BOOLEAN),
        "SessionDeleted": closed(
            object=const("session.deleted"),
            id=STRING,
            deleted=const(True),
            capsules=INTEGER,
        ),
    }


def _others() -> dict[str, Json]:
    card = closed(
        id=STRING,
        object=const("model"),
        created=INTEGER,
        owned_by=STRING,
        max_model_len=INTEGER,
    )
    error = closed(message=STRING, type=STRING, param=maybe(STRING), code=maybe(STRING))
    told = closed("details", type=STRING, message=STRING, details=OBJECT)
    health = {
        "status": const("green", "red"),
        "reason": maybe(STRING),
        "version": STRING,
        "uptime_s": NUMBER,
        "model": OBJECT,
        "queue_depth": INTEGER,
        "max_queue_depth": INTEGER,
    }
    return {
        "Model": card,
        "ModelList": closed(object=const("list"), data=array(ref("Model"))),
        "Tokens": closed(
            "token_strs",
            count=INTEGER,
            max_model_len=INTEGER,
            tokens=array(INTEGER),
            token_strs=array(STRING),
        ),
        "Spelling": closed(prompt=STRING),
        "Ready": closed(ready=const(True)),
        # The worker's own report grows with it, so this one is open: docs/operations.md has it.
        "Health": {"type": "object", "properties": health, "required": list(health)},
        "Error": closed(error=ref("ErrorBody")),
        "ErrorBody": error,
        "MessagesError": closed(
            type=const("error"), error=ref("MessagesErrorBody"), request_id=STRING
        ),
        "MessagesErrorBody": told,
    }


def reply_schemas() -> dict[str, Json]:
    """Every schema of an answer by its component's name."""
    return {
        **_logprobs(),
        **_capserve(),
        **_chat(),
        **_completions(),
        **_messages(),
        **_responses(),
        **_sessions(),
        **_others(),
    }
