"""The Anthropic dialect over a real server: what its SDK sees, and which bytes make it see that."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from harness import NAME, Replies, Served, chat_body, fake_engine, serving, user

THINK = {"type": "enabled", "budget_tokens": 1024}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}


def spelled_call(city: str, days: str = "2") -> str:
    return (
        "<tool_call>\n<function=get_weather>\n"
        f"<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 400, "messages": messages, **fields}


def post(served: Served, request: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return served.http.post(path, json=request)


def client(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=served.url, **{"api_key": "any", "max_retries": 0, **options}
    )


def events(served: Served, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream; each one's name is its type."""
    found = []
    sent = {**request, "stream": True}
    with served.http.stream("POST", "/v1/messages?beta=true", json=sent) as reply:
        assert reply.status_code == 200, reply.read()
        for frame in reply.read().decode().strip().split("\n\n"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies), max_body_bytes=200_000, heartbeat_s=0.2) as running:
        yield running


def test_the_sdk_gets_a_plain_message_with_its_usage(served):
    message = client(served).messages.create(
        model=NAME, max_tokens=200, system="Be brief.", messages=[user("plain")]
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "I heard: plain"
    assert (message.type, message.role, message.model) == ("message", "assistant", NAME)
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 0
    assert message.usage.cache_creation_input_tokens == 0
    assert message._request_id


def test_thinking_is_a_signed_block_and_comes_only_when_it_is_asked_for(served):
    asked = client(served).messages.create(
        model=NAME, max_tokens=200, thinking=THINK, messages=[user("deep")]
    )
    thought, text = asked.content
    assert 0 < asked.usage.output_tokens_details.thinking_tokens < asked.usage.output_tokens
    assert (thought.type, thought.thinking) == ("thinking", "Thinking of deep")
    assert thought.signature
    assert text.text == "I heard: deep"
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        (only,) = post(served, body([user("deep")], **thinking)).json()["content"]
        assert only == {"type": "text", "text": "I heard: deep"}
    adaptive = post(served, body([user("deep")], thinking={"type": "adaptive"})).json()
    assert [block["type"] for block in adaptive["content"]] == ["thinking", "text"]


def test_thinking_that_comes_back_with_its_signature_goes_on_from_the_same_state(served, replies):
    replies.say["remember"] = "I need Oslo.\n</think>\n\n" + spelled_call("Oslo")
    ask = [user("remember")]
    fields: dict[str, Any] = {
        "model": NAME,
        "max_tokens": 300,
        "thinking": THINK,
        "tools": [WEATHER],
    }
    first = client(served).messages.create(messages=ask, **fields)
    echoed = [block.model_dump() for block in first.content]
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "rain"}
    second = client(served).messages.create(
        messages=[*ask, {"role": "assistant", "content": echoed}, user([result])], **fields
    )
    assert second.model_extra["capserve"]["prefix_action"] == "message_append"
    whole = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= whole + first.usage.output_tokens - 1


def test_the_bytes_of_a_stream_are_these_events(served, replies):
    replies.say["sequence"] = "A thought\n</think>\n\nSome text.\n\n" + spelled_call("Oslo")
    found = events(served, body([user("sequence")], tools=[WEATHER], thinking=THINK))
    found = [event for event in found if event["type"] != "ping"]
    start, *middle, delta, stop = found
    message = start["message"]
    assert list(start) == ["type", "message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    assert message["usage"]["output_tokens"] == 0
    # Deltas of one block may be cut anywhere: what they add up to, and the frame, is promised.
    shape, texts = [], {}
    for event in middle:
        kind = event["type"]
        if kind == "content_block_delta":
            inner = event["delta"]
            (text,) = (value for key, value in inner.items() if key != "type")
            key = (event["index"], inner["type"])
            texts[key] = texts.get(key, "") + text
            if shape[-1] != key:
                shape.append(key)
        elif kind == "content_block_start":
            shape.append((event["index"], event["content_block"]["type"]))
        else:
            assert kind == "content_block_stop"
            shape.append((event["index"], "stop"))
    assert shape == [
        (0, "thinking"),
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (0, "stop"),
        (1, "text"),
        (1, "text_delta"),
        (1, "stop"),
        (2, "tool_use"),
        (2, "input_json_delta"),
        (2, "stop"),
    ]
    assert texts[0, "thinking_delta"] == "A thought"
    assert len(base64.b64decode(texts[0, "signature_delta"])) == 32
    assert texts[1, "text_delta"] == "Some text."
    assert texts[2, "input_json_delta"] == '{"city":"Oslo","days":2}'
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    used = delta["usage"]
    total = used["input_tokens"] + used["cache_read_input_tokens"]
    assert total + used["cache_creation_input_tokens"] == message["usage"]["input_tokens"]
    assert stop == {"type": "message_stop"}


def test_the_sdks_stream_adds_up_to_the_plain_message(served, replies):
    replies.say["both ways"] = "Hm.\n</think>\n\nLook:\n\n" + spelled_call("Rome")
    fields: dict[str, Any] = {
        "model": NAME,
        "max_tokens": 300,
        "thinking": THINK,
        "tools": [WEATHER],
        "messages": [user("both ways")],
    }
    plain = client(served).messages.create(**fields)
    with client(served).messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (plain, streamed):
        assert message.content[2].id.startswith("toolu_")
        message.content[2].id = "toolu_same"
    assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in plain.content]
    assert streamed.stop_reason == plain.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == plain.usage.output_tokens


def test_parallel_calls_are_answered_in_one_turn_and_the_conversation_goes_on(served, replies):
    replies.say["two cities"] = spelled_call("Oslo") + "\n" + spelled_call("Rome", "5")
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 300, "tools": [WEATHER]}
    ask = [user("two cities")]
    first = client(served).messages.create(messages=ask, **fields)
    assert [call.input for call in first.content] == [
        {"city": "Oslo", "days": 2},
        {"city": "Rome", "days": 5},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": first.content[1].id,
            "content": [{"type": "text", "text": "no such city"}],
            "is_error": True,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
        {"type": "text", "text": "go on"},
    ]
    second = client(served).messages.create(
        messages=[*ask, {"role": "assistant", "content": first.content}, user(results)], **fields
    )
    assert second.model_extra["capserve"]["prefix_action"] == "message_append"
    *_, rain, error, said = served.worker.items[-1].request.prompt.conversation.messages
    assert (rain.role, rain.content) == ("tool", "rain")
    assert (error.role, error.content) == ("tool", "Error: no such city")
    assert error.breakpoint
    assert (said.role, said.content) == ("user", "go on")


def test_disable_parallel_tool_use_ends_the_reply_after_one_call(served, replies):
    replies.say["one city"] = spelled_call("Oslo") + "\n" + spelled_call("Rome")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = post(served, body([user("one city")], tools=[WEATHER], tool_choice=choice)).json()
    assert [block["input"]["city"] for block in reply["content"]] == ["Oslo"]
    assert reply["stop_reason"] == "tool_use"


def test_numbers_of_a_call_come_out_digit_for_digit(served, replies):
    big = "123456789012345678901234567890"
    replies.say["big number"] = spelled_call("Oslo", big)
    reply = post(served, body([user("big number")], tools=[WEATHER]))
    assert f'"input":{{"city":"Oslo","days":{big}}}' in reply.text


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Alpha beta gamma"),
        ({"stop_sequences": ["delta"]}, "end_turn", None, "Alpha beta gamma"),
        ({"stop_sequences": ["gamma", "ta ga"]}, "stop_sequence", "ta ga", "Alpha be"),
        ({"stop_sequences": ["a"]}, "stop_sequence", "a", "Alph"),
        ({"stop_sequences": ["gamma"]}, "stop_sequence", "gamma", "Alpha beta "),
        ({"max_tokens": 1}, "max_tokens", None, None),
    ],
)
def test_the_stop_reason_says_what_ended_the_reply(served, replies, fields, reason, sequence, text):
    replies.say["greek"] = "Alpha beta gamma"
    reply = post(served, body([user("greek")], **fields)).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    assert text is None or reply["content"][0]["text"].rstrip() == text.rstrip()
    *_, delta, _ = events(served, body([user("greek")], **fields))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_stop_sequence_in_thinking_counts_and_one_inside_a_call_does_not(served, replies):
    replies.say["where"] = "It says Oslo here\n</think>\n\n" + spelled_call("Rome")
    asked = body([user("where")], tools=[WEATHER], thinking=THINK)
    thought = post(served, {**asked, "stop_sequences": ["Oslo"]}).json()
    assert (thought["stop_reason"], thought["stop_sequence"]) == ("stop_sequence", "Oslo")
    called = post(served, {**asked, "stop_sequences": ["Rome"]}).json()
    assert (called["stop_reason"], called["stop_sequence"]) == ("tool_use", None)


def test_counted_tokens_are_those_of_the_request(served):
    request = body(
        [user([{"type": "text", "text": "count me"}])],
        system=[{"type": "text", "text": "You are precise."}],
        tools=[WEATHER],
        thinking=THINK,
    )
    counting = {key: value for key, value in request.items() if key != "max_tokens"}
    counted = client(served).messages.count_tokens(**counting)
    used = post(served, request).json()["usage"]
    total = used["input_tokens"] + used["cache_read_input_tokens"]
    assert counted.input_tokens == total + used["cache_creation_input_tokens"]
    # And it leaves no turn behind: the next request's is the next one.
    taken = len(served.worker.items)
    post(served, counting, "/v1/messages/count_tokens")
    assert len(served.worker.items) == taken


def test_what_a_mark_adds_to_the_cache_is_counted_apart(served):
    marked = {"type": "text", "text": "a marked beginning", "cache_control": {"type": "ephemeral"}}
    asked = body([user([marked]), {"role": "assistant", "content": "Yes."}, user("more")])
    used = post(served, asked).json()["usage"]
    assert used["cache_creation_input_tokens"] > 0
    assert used["input_tokens"] > 0
    again = post(served, {**asked, "messages": [*asked["messages"][:2], user("other")]}).json()
    assert again["usage"]["cache_creation_input_tokens"] == 0
    assert again["usage"]["cache_read_input_tokens"] >= used["cache_creation_input_tokens"]


def test_both_dialects_ask_for_the_same_turn(served):
    call = {"id": "c1", "type": "function"}
    arguments = {"city": "Oslo", "days": 2}
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    tool = {"name": WEATHER["name"], "description": WEATHER["description"]}
    chat = {
        **chat_body(
            [
                {"role": "system", "content": "Be kind."},
                user("weather?"),
                {
                    "role": "assistant",
                    "content": "Looking.",
                    "reasoning_content": "I look.",
                    "tool_calls": [call | {"function": function}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                user("thanks for all that"),
            ]
        ),
        "tools": [{"type": "function", "function": tool | {"parameters": WEATHER["input_schema"]}}],
        "enable_thinking": True,
        "max_tokens": 100,
        "temperature": 0.5,
        "seed": 7,
        "stop": ["END"],
    }
    blocks = [
        {"type": "thinking", "thinking": "I look.", "signature": "anything"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "c1", "name": "get_weather", "input": arguments},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    messages = {
        "model": NAME,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        "messages": [
            user("weather?"),
            {"role": "assistant", "content": blocks},
            user([result, {"type": "text", "text": "thanks for all that"}]),
        ],
        "tools": [WEATHER],
        "thinking": THINK,
        "max_tokens": 100,
        "temperature": 0.5,
        "seed": 7,
        "stop_sequences": ["END"],
    }
    assert served.post(chat).status_code == 200
    reply = post(served, messages)
    assert reply.json()["capserve"]["cached_tokens"] > 0
    one, other = (item.request for item in served.worker.items[-2:])
    assert one.prompt.tokens.tolist() == other.prompt.tokens.tolist()
    assert one.prompt.chain == other.prompt.chain
    assert (one.namespace, one.sampling) == (other.namespace, other.sampling)
    assert (one.output, one.max_output_tokens) == (other.output, other.max_output_tokens)


def test_a_conversation_begun_in_chat_goes_on_here_from_its_state(served):
    ask = user("begun in chat")
    first = served.post({**chat_body([ask]), "enable_thinking": False}).json()
    said = first["choices"][0]["message"]["content"]
    history = [ask, {"role": "assistant", "content": said}, user("gone on here")]
    second = post(served, body(history)).json()
    assert second["capserve"]["prefix_action"] == "message_append"
    assert second["usage"]["cache_read_input_tokens"] >= first["usage"]["total_tokens"] - 1


def test_the_billing_line_of_one_agent_is_left_out(served):
    nonces = ("a1b", "c2d")
    prompts = []
    for nonce in nonces:
        line = f"x-anthropic-billing-header: cc_version=2.1.332.{nonce}; cc_entrypoint=cli;"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You write code."}]
        reply = post(served, body([user("hi")], system=system)).json()
        assert "billing" in reply["capserve"]["notes"][0]
        prompts.append(served.worker.items[-1].request.prompt.tokens.tolist())
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_tool_runner_runs_its_loop(served, replies, stream):
    replies.say["<tool_response>\nrain in"] = "It rains."
    replies.say["run the loop"] = spelled_call("Oslo")
    asked = []

    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return f"rain in {city}"

    runner = client(served).beta.messages.tool_runner(
        model=NAME,
        max_tokens=200,
        tools=[anthropic.beta_tool(get_weather)],
        messages=[user(f"run the loop {stream}")],
        stream=stream,
    )
    final = runner.until_done()
    # It would have the server hold the conversation, is told that it can't, and sends it whole.
    assert asked == [("Oslo", 2)]
    assert final.content[0].text == "It rains."
    served.worker.wait_idle()
    assert served.worker.ends[-1].metrics.prefix_action == "message_append"


def test_a_coding_agents_requests_extend_each_other_although_their_marks_move(served, replies):
    replies.say["look around"] = "I look.\n</think>\n\n" + spelled_call("Oslo")
    mark = {"cache_control": {"type": "ephemeral"}}
    fixed = {
        "model": NAME,
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=9.9.9.abc;"},
            {"type": "text", "text": "You write code.", **mark},
        ],
        "tools": [{**WEATHER, "eager_input_streaming": True, "defer_loading": False}],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "{}"},
        "service_tier": "auto",
    }
    # The mark turns the string of the last message into a block, and back once it has moved on.
    late = {"role": "system", "content": "More tools may follow."}
    ask = [user([{"type": "text", "text": "look around"}]), late]
    marked = {"role": "system", "content": [{"type": "text", "text": late["content"], **mark}]}
    *_, delta, _ = events(served, {**fixed, "messages": [ask[0], marked]})
    assert delta["delta"]["stop_reason"] == "tool_use"
    call = served.worker.ends[-1].message.tool_calls[0]
    said: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "I look.", "signature": "s"},
        # The same input, written in another order.
        {
            "type": "tool_use",
            "id": "toolu_7",
            "name": call.name,
            "input": {"days": 2, "city": "Oslo"},
        },
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_7", "content": "snow", **mark}
    history = [*ask, {"role": "assistant", "content": said}, user([result])]
    *_, delta, _ = events(served, {**fixed, "messages": history})
    assert delta["capserve"]["prefix_action"] == "message_append"
    assert delta["usage"]["input_tokens"] < 10


def test_a_client_that_leaves_cancels_its_turn(served, replies):
    replies.say["endless"] = "word " * 3000
    with client(served).messages.stream(
        model=NAME, max_tokens=3000, messages=[user("endless")]
    ) as stream:
        for event in stream:
            if event.type == "text":
                break
    item = served.worker.items[-1]
    served.worker.wait_cancelled(item)
    served.worker.wait_idle()
    assert post(served, body([user("after that")])).status_code == 200


def test_a_reply_may_be_begun_by_the_client(served):
    history = [user("continue this"), {"role": "assistant", "content": "It begins"}]
    assert post(served, body(history)).status_code == 200
    assert served.worker.items[-1].request.prompt.continues_reply


def test_a_last_message_can_be_marked_by_the_request_itself(served):
    post(served, body([user("marked whole")], cache_control={"type": "ephemeral"}))
    assert served.worker.items[-1].request.prompt.conversation.messages[-1].breakpoint
