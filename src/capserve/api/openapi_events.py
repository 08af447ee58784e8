"""Which events does a stream of each protocol have?

Told as `itemSchema`: what a reader of server-sent events gets, one by one, with the JSON inside of
`data`. Comments, the heartbeat of two protocols, are no events.
"""

from __future__ import annotations

from capserve.api.openapi_forms import INTEGER, STRING, Json, one_of, record, ref
from capserve.api.openapi_replies import ANY, array, closed, const


def event(data: Json) -> Json:
    """An event whose `data` is JSON of this form."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return record("data", event=STRING, data=text)


DONE = record("data", data={"const": "[DONE]"})

STREAMS: dict[str, Json] = {
    "ChatCompletion": one_of(DONE, event(ref("ChatCompletionData"))),
    "Completion": one_of(DONE, event(ref("CompletionData"))),
    "MessageReply": event(ref("MessageEvent")),
    "ResponseReply": event(ref("ResponseEvent")),
}
"""Component of the plain reply -> an event of the stream."""


def event_schemas() -> dict[str, Json]:
    """Every schema of an event by its component's name."""
    error = ref("StreamError")
    return {
        "ChatCompletionData": one_of(ref("ChatCompletionChunk"), error),
        "CompletionData": one_of(ref("CompletionChunk"), error),
        # With what the turn had cost until then.
        "StreamError": closed("capserve", error=ref("ErrorBody"), capserve=ref("CapserveBlock")),
        "MessageEvent": _message_event(),
        "ResponseEvent": _response_event(),
    }


def _message_event() -> Json:
    head = closed(
        id=STRING,
        type=const("message"),
        role=const("assistant"),
        model=STRING,
        content={"type": "array", "maxItems": 0},
        stop_reason={"type": "null"},
        stop_sequence={"type": "null"},
        usage=ref("MessageUsage"),
    )
    delta = one_of(
        closed(type=const("text_delta"), text=STRING),
        closed(type=const("thinking_delta"), thinking=STRING),
        closed(type=const("signature_delta"), signature=STRING),
        closed(type=const("input_json_delta"), partial_json=STRING),
    )
    end = closed(stop_reason=ref("StopReason"), stop_sequence=one_of(STRING, {"type": "null"}))
    block = ref("MessageBlock")
    return one_of(
        closed(type=const("message_start"), message=head),
        closed(type=const("content_block_start"), index=INTEGER, content_block=block),
        closed(type=const("content_block_delta"), index=INTEGER, delta=delta),
        closed(type=const("content_block_stop"), index=INTEGER),
        closed(
            type=const("message_delta"),
            delta=end,
            usage=ref("MessageUsage"),
            capserve=ref("CapserveBlock"),
        ),
        closed(type=const("message_stop")),
        closed(type=const("ping")),
        closed(
            "capserve",
            type=const("error"),
            error=ref("MessagesErrorBody"),
            request_id=STRING,
            capserve=ref("CapserveBlock"),
        ),
    )


def _response_event() -> Json:
    ends = ("created", "in_progress", "completed", "incomplete", "failed")
    number = {"sequence_number": INTEGER}
    at = {**number, "output_index": INTEGER, "item_id": STRING}
    inside = {**at, "content_index": INTEGER}
    logprobs = array(ANY)

    def of(*names: str) -> Json:
        return const(*(f"response.{name}" for name in names))

    return one_of(
        closed(type=of(*ends), **number, response=ref("ResponseReply")),
        closed(
            type=of("output_item.added", "output_item.done"),
            **number,
            output_index=INTEGER,
            item=ref("ResponseOutput"),
        ),
        closed(
            type=of("content_part.added", "content_part.done"), **inside, part=ref("ResponsePart")
        ),
        closed(type=of("output_text.delta"), **inside, delta=STRING, logprobs=logprobs),
        closed(type=of("output_text.done"), **inside, text=STRING, logprobs=logprobs),
        closed(type=of("reasoning_text.delta"), **inside, delta=STRING),
        closed(type=of("reasoning_text.done"), **inside, text=STRING),
        closed(
            type=of("function_call_arguments.delta", "custom_tool_call_input.delta"),
            **at,
            delta=STRING,
        ),
        closed(type=of("function_call_arguments.done"), **at, name=STRING, arguments=STRING),
        closed(type=of("custom_tool_call_input.done"), **at, input=STRING),
    )
