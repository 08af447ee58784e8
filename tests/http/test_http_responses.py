"""`/v1/responses`: what the openai client makes of it, and what stands on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, Replies, Served, fake_engine, serving, template, tokenizer

from capserve.api.errors import shutting_down
from capserve.api.responses_events import ResponseChunks, ResponseEvents, ResponseHead, body_of
from capserve.api.responses_schema import read_items
from capserve.api.responses_tools import offered
from capserve.api.responses_translate import conversation
from capserve.api.schemas import ChatRequest, UserMessage
from capserve.serving.lifecycle import FinishReason
from capserve.serving.metrics import TurnMetrics
from capserve.serving.sinks import Reply
from capserve.serving.turn import Delta, Finished, ToolCallDelta, merged
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.messages import Message
from capserve.text.prompt import PromptBuilder

PATH = "/v1/responses"
THOUGHT = "I should look.\n</think>\n\n"

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look at a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
    },
    "strict": False,
}


HELLO = UserMessage(role="user", content="hello")


def call(name: str, **parameters: str) -> str:
    return spell_call(name, "".join(spell_parameter(k, v) for k, v in parameters.items()))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = Replies()
    replies.say["read the file"] = (
        THOUGHT + "Let me see.\n\n" + call("look", path="a.py", lines="3")
    )
    replies.say["read both"] = (
        THOUGHT + call("look", path="a.py") + "\n" + call("look", path="b.py")
    )
    replies.say["content of a.py"] = "All clear.\n</think>\n\nIt holds an owl 🦉."
    replies.say["patch it"] = THOUGHT + call("patch", input="*** Begin\n+ owl\n")
    replies.say["wait for them"] = THOUGHT + call("wait", target="7")
    replies.say["ramble"] = "Well. " * 300
    with serving(fake_engine(replies)) as running:
        yield running


def ask(served: Served, sent: Any, **fields: Any) -> dict[str, Any]:
    response = served.http.post(PATH, json={"input": sent, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def events(served: Served, sent: Any, **fields: Any) -> list[dict[str, Any]]:
    """Every event of a stream, whose name is told twice alike."""
    body = {"input": sent, "stream": True, **fields}
    with served.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, response.read()
        raw = response.read().decode()
    found = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt_of(served: Served) -> list[int]:
    """Tokens of the newest turn's prompt."""
    tokens: list[int] = served.worker.items[-1].request.prompt.tokens.tolist()
    return tokens


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what differs from one reply to the next."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_reply_has_its_thoughts_and_its_words_as_items(served: Served) -> None:
    body = ask(served, "hello", instructions="Be kind.", metadata={"run": "7"})
    thoughts, message = body["output"]
    assert thoughts["type"] == "reasoning"
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Thinking of hello"}]
    assert thoughts["summary"] == []
    assert message["role"] == "assistant"
    [part] = message["content"]
    assert part == {
        "type": "output_text",
        "text": "I heard: hello",
        "annotations": [],
        "logprobs": [],
    }
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert body["metadata"] == {"run": "7"}
    assert body["instructions"] == "Be kind."
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == body["capserve"]["cached_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


def test_the_prompt_is_that_of_the_same_chat_request(served: Served) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "read "}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Looking."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "x"}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"path": "y"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "ex"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "why"}],
        },
        {"role": "user", "content": "and?"},
    ]
    ask(served, items, tools=[LOOK], store=False)
    by_responses = prompt_of(served)
    function = {key: LOOK[key] for key in LOOK if key != "type"}

    def chat_call(name: str, path: str) -> dict[str, Any]:
        arguments = json.dumps({"path": path})
        return {
            "id": name,
            "type": "function",
            "function": {"name": "look", "arguments": arguments},
        }

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "read "},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Looking.",
            "tool_calls": [chat_call("c1", "x"), chat_call("c2", "y")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ex"},
        {"role": "tool", "tool_call_id": "c2", "content": "why"},
        {"role": "user", "content": "and?"},
    ]
    tools = [{"type": "function", "function": function}]
    assert served.post({"messages": messages, "tools": tools}).status_code == 200
    assert prompt_of(served) == by_responses


@pytest.mark.parametrize("asked", ["hello", "read the file", "read both", "patch it"])
def test_the_plain_reply_is_the_last_event_of_the_stream(served: Served, asked: str) -> None:
    fields = {"tools": [LOOK, {"type": "custom", "name": "patch"}], "store": False}
    plain = ask(served, asked, **fields)
    told = events(served, asked, **fields)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[0]["response"]["status"] == "in_progress"
    last = told[-1]
    assert last["type"] == "response.completed"
    assert list(map(bare, last["response"]["output"])) == list(map(bare, plain["output"]))
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    same = ("input_tokens", "output_tokens")
    assert [last["response"]["usage"][k] for k in same] == [plain["usage"][k] for k in same]


def test_the_deltas_of_an_item_add_up_to_it(served: Served) -> None:
    told = events(served, "read the file", tools=[LOOK])
    texts: dict[tuple[str, int], str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            key = (event["type"].removesuffix(".delta"), event["output_index"])
            texts[key] = texts.get(key, "") + event["delta"]
    arguments = texts.pop(("response.function_call_arguments", 2))
    assert json.loads(arguments) == {"path": "a.py", "lines": 3}
    assert texts == {
        ("response.reasoning_text", 0): "I should look.",
        ("response.output_text", 1): "Let me see.",
    }
    for event in told:
        if event["type"].endswith("_text.done"):
            head = event["type"].removesuffix(".done")
            assert texts[head, event["output_index"]] == event["text"]


def test_an_openai_client_runs_a_loop_of_calls_that_only_appends(served: Served) -> None:
    with served.openai() as client:
        history: list[Any] = [user("read the file")]
        first = client.responses.create(model=NAME, input=history, tools=[LOOK])
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(c.arguments) for c in calls] == [{"path": "a.py", "lines": 3}]
        assert first.output_text == "Let me see."
        history += [item.model_dump(exclude_none=True) for item in first.output]
        answer = {
            "type": "function_call_output",
            "call_id": calls[0].call_id,
            "output": "content of a.py",
        }
        history.append(answer)
        second = client.responses.create(model=NAME, input=history, tools=[LOOK])
    assert second.output_text == "It holds an owl 🦉."
    assert second.model_extra is not None
    assert second.model_extra["capserve"]["prefix_action"] == "message_append"
    assert second.usage is not None
    assert first.usage is not None
    # All but the end token, which no state absorbed.
    read = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= read - 1


def test_an_openai_client_streams_and_its_helper_agrees(served: Served) -> None:
    with (
        served.openai() as client,
        client.responses.stream(model=NAME, input="read both", tools=[LOOK]) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    paths = [json.loads(i.arguments)["path"] for i in final.output if i.type == "function_call"]
    assert paths == ["a.py", "b.py"]


def test_a_call_in_a_namespace_comes_back_in_it(served: Served) -> None:
    wait = {**LOOK, "name": "wait", "parameters": {"type": "object", "properties": {}}}
    tools = [LOOK, {"type": "namespace", "name": "agents", "tools": [wait]}]
    body = ask(served, "wait for them", tools=tools)
    made = body["output"][-1]
    assert (made["name"], made["namespace"]) == ("wait", "agents")
    answer = {"type": "function_call_output", "call_id": made["call_id"], "output": "done"}
    history = [user("wait for them"), *body["output"], answer]
    again = ask(served, history, tools=tools)
    assert again["capserve"]["prefix_action"] == "message_append"


def test_two_tools_of_one_name_are_told_apart_by_their_namespace(served: Served) -> None:
    inner = {**LOOK, "description": "Look elsewhere."}
    tools = [{"type": "namespace", "name": "far", "tools": [inner]}, LOOK]
    body = ask(served, "read the file", tools=tools)
    assert "namespace" not in body["output"][-1]
    history = [
        user("hm"),
        {
            "type": "function_call",
            "call_id": "c",
            "name": "look",
            "namespace": "far",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]
    ask(served, history, tools=tools)
    [asked] = served.worker.items[-1].request.prompt.conversation.messages[1].tool_calls
    assert asked.name == "far__look"


def test_a_call_of_free_text_comes_and_goes_as_text(served: Served) -> None:
    tools = [{"type": "custom", "name": "patch", "description": "Apply a patch."}]
    body = ask(served, "patch it", tools=tools)
    made = body["output"][-1]
    assert (made["type"], made["input"]) == ("custom_tool_call", "*** Begin\n+ owl\n")
    answer = {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "ok"}
    again = ask(served, [user("patch it"), *body["output"], answer], tools=tools)
    assert again["capserve"]["prefix_action"] == "message_append"


def test_a_tool_that_nobody_runs_is_left_out_and_said_to_be(served: Served) -> None:
    without = ask(served, "hello", tools=[LOOK])
    body = ask(served, "hello", tools=[LOOK, {"type": "web_search"}])
    assert any("tools[1]" in note and "web_search" in note for note in body["capserve"]["notes"])
    assert body["usage"]["input_tokens"] == without["usage"]["input_tokens"]


def test_a_reply_that_was_cut_is_incomplete(served: Served) -> None:
    body = ask(served, "ramble", max_output_tokens=5)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"
    last = events(served, "ramble", max_output_tokens=5)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["usage"]["output_tokens"] == 5


def test_effort_none_turns_thinking_off(served: Served) -> None:
    body = ask(served, "hello", reasoning={"effort": "none"})
    assert [item["type"] for item in body["output"]] == ["message"]


def test_the_events_of_a_reply_come_in_the_order_of_the_protocol(served: Served) -> None:
    told = events(served, "read the file", tools=[LOOK])
    kinds = [event["type"].removeprefix("response.") for event in told]
    steps = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]  # deltas as one

    def said(part: str) -> list[str]:
        opened = ["output_item.added", "content_part.added"]
        return [*opened, f"{part}.delta", f"{part}.done", "content_part.done", "output_item.done"]

    called = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    assert steps == [
        "created",
        "in_progress",
        *said("reasoning_text"),
        *said("output_text"),
        "output_item.added",
        *called,
        "output_item.done",
        "completed",
    ]


def test_a_client_that_leaves_a_stream_cancels_its_turn() -> None:
    engine = fake_engine()
    with serving(engine) as served:
        gate = engine.hold("step", at=2)
        body = {"input": "a long good bye " * 9, "stream": True}
        with served.http.stream("POST", PATH, json=body):
            gate.wait_arrived()
            [item] = served.worker.items
            assert not item.cancel.cancelled
        served.worker.wait_cancelled(item)
        gate.open()
        served.worker.wait_idle()
        assert served.worker.ends[0].metrics.terminal_state == "cancelled"
        assert ask(served, "still here?")["status"] == "completed"


def test_an_engine_that_fails_is_told_in_the_stream_and_by_status() -> None:
    engine = fake_engine()
    with serving(engine) as served:
        engine.fail("step", at=3)
        last = events(served, "hello")[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        served.wait_ready()
        engine.fail("step", at=engine.calls("step") + 1)
        response = served.http.post(PATH, json={"input": "hello"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        served.wait_ready()
        assert ask(served, "still here?")["status"] == "completed"


def chunks() -> ResponseChunks:
    return ResponseChunks(ResponseEvents(ResponseHead("resp_1", {}, offered([LOOK]))))


def sent(data: bytes) -> list[dict[str, Any]]:
    blocks = data.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks]


def test_a_shutdown_ends_a_stream_with_what_was_said_until_then() -> None:
    stream = chunks()
    stream.written((0, Delta.of(content="half a")))
    *_, last = sent(stream.cut(shutting_down()))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    [item] = last["response"]["output"]
    assert (item["content"][0]["text"], item["status"]) == ("half a", "incomplete")
    first, *_ = sent(chunks().cut(shutting_down()))
    assert first["type"] == "response.created"


def test_words_behind_a_call_keep_their_place_and_are_the_same_message() -> None:
    """In items of their own, or as a client may send them back: in one with those before."""
    stream = chunks()
    call = ToolCallDelta(0, "c", "look", "{}")
    told = [Delta.of(content="Before."), Delta.of(tool_calls=(call,)), Delta.of(content=" Behind.")]
    data = b"".join(stream.written((0, delta))[0] for delta in told)
    done = [e["item"] for e in sent(data) if e["type"] == "response.output_item.done"]
    done += sent(stream.cut(shutting_down()))[-1]["response"]["output"][2:]
    assert [item["type"] for item in done] == ["message", "function_call", "message"]
    before, called, _ = done
    whole = {**before, "content": [{"type": "output_text", "text": "Before. Behind."}]}
    end = Finished(FinishReason.STOP, Message("assistant"), 3, 4, 0, TurnMetrics("r", "done"))
    head = ResponseHead("resp_1", {}, offered([LOOK]))
    plain = body_of(ResponseEvents(head), [Reply(merged(told), end)])["output"]
    assert [item["type"] for item in plain] == ["message", "function_call", "message"]
    texts = [item["content"][0]["text"] for item in plain[::2]]
    assert texts == ["Before.", " Behind."]
    prompts = PromptBuilder(tokenizer(), template())
    meant = [
        conversation(
            None, read_items(items), offered([LOOK]), ChatRequest(messages=[HELLO]), prompts
        )
        for items in (done, [whole, called])
    ]
    assert meant[0].messages == meant[1].messages
    assert len(meant[0].messages) == 1
