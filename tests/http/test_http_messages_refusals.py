"""What goes wrong below `/v1/messages` is told in that dialect, as its SDK knows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from harness import NAME, Served, fake_engine, serving, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capserve.api.errors import error_response
from capserve.errors import ConflictError, EngineError, UnavailableError
from capserve.serving.turn import TurnCancelledError

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 50, "messages": [user("hello")], **fields}


def client(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=served.url, **{"api_key": "any", "max_retries": 0, **options}
    )


def told(reply: Any, status: int, kind: str) -> str:
    """The message of an error body of this dialect."""
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert set(error) == {"type", "error", "request_id"}
    assert error["type"] == "error"
    assert error["error"]["type"] == kind, error
    assert error["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    message: str = error["error"]["message"]
    return message


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine(max_positions=512), max_body_bytes=200_000) as running:
        yield running


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def turns(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_tokens": None}, ("max_tokens", "integer")),
        ({"max_tokens": 0}, ("max_tokens", "1", "0")),
        ({"max_tokens": True}, ("max_tokens", "integer", "true")),
        ({"messages": []}, ("messages", "1", "0")),
        ({"messages": "hi"}, ("messages", "array", "'hi'")),
        ({"messages": [{"role": "tool", "content": "x"}]}, ("messages[0].role", "'tool'")),
        ({"messages": [{"role": "user"}]}, ("messages[0].content", "required")),
        ({"messages": [user(7)]}, ("messages[0].content", "string", "integer")),
        (turns("user", "x"), ("messages[0].content[0]", "block", "string")),
        (turns("user", IMAGE), ("messages[0].content[0].type", "text only", "'image'")),
        (turns("user", CALL), ("messages[0].content[0].type", "'tool_use'")),
        (turns("assistant", RESULT), ("messages[0].content[0].type", "'tool_result'")),
        (turns("user", {"type": "text"}), ("messages[0].content[0].text", "string", "null")),
        (turns("assistant", CALL | {"input": "x"}), ("messages[0].content[0].input", "object")),
        (turns("user", RESULT), ("messages[0].content[0].tool_use_id", "'toolu_1'")),
        (
            turns("user", RESULT | {"content": [IMAGE]}),
            ("messages[0].content[0].content[0].type", "'image'"),
        ),
        (turns("user", RESULT | {"is_error": 1}), ("messages[0].content[0].is_error", "boolean")),
        (
            turns("user", {"type": "text", "text": "x", "cache_control": 1}),
            ("messages[0].content[0].cache_control", "object"),
        ),
        ({"system": [IMAGE]}, ("system[0].type", "'image'")),
        ({"system": 1}, ("system", "string")),
        ({"temperature": 3}, ("temperature", "2", "3")),
        ({"top_p": 0}, ("top_p", "0")),
        ({"stop_sequences": [""]}, ("stop_sequences[0]", "1", "0")),
        ({"stop_sequences": ["a"] * 17}, ("stop_sequences", "16", "17")),
        ({"tools": [{"name": "f"}]}, ("tools[0].input_schema", "required")),
        ({"tools": [TOOL | {"type": "bash_20250124"}]}, ("tools[0].type", "bash_20250124")),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, ("tool_choice.type", "'all'")),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            ("tool_choice.name", "'g'", "1"),
        ),
        ({"thinking": {"type": "much"}}, ("thinking.type", "'much'")),
        ({"output_config": {"format": {"type": "xml"}}}, ("output_config.format.type", "'xml'")),
        ({"stream": "yes"}, ("stream", "boolean", "'yes'")),
        ({"metadata": {"user_id": 5}}, ("metadata.user_id", "string", "5")),
    ],
)
def test_a_wrong_field_is_named_with_both_values(served, fields, names):
    message = told(served.http.post(PATH, json=body(**fields)), 400, "invalid_request_error")
    assert all(name in message for name in names), message


def test_a_missing_field_is_named_and_counting_needs_no_max_tokens(served):
    for key in ("max_tokens", "messages", "model"):
        sent = {name: value for name, value in body().items() if name != key}
        message = told(served.http.post(PATH, json=sent), 400, "invalid_request_error")
        assert message == f"{key} is required."
        assert served.http.post(COUNT, json=sent).is_success == (key == "max_tokens")


def test_every_refusal_below_the_path_has_this_dialects_body(served):
    http = served.http
    told(http.post(PATH, json=body(model="gpt")), 404, "not_found_error")
    told(http.get(f"{PATH}/batches"), 404, "not_found_error")
    told(http.get(PATH), 405, "invalid_request_error")
    told(http.post(PATH, content=b"{"), 415, "invalid_request_error")
    as_json = {"content-type": "application/json"}
    told(http.post(PATH, content=b"{", headers=as_json), 400, "invalid_request_error")
    told(http.post(PATH, content=b"[]", headers=as_json), 400, "invalid_request_error")
    long = told(http.post(PATH, json=body(system="x" * 200_001)), 413, "request_too_large")
    assert "200000" in long
    # Its neighbours keep theirs.
    assert set(http.get("/v1/messagesx").json()) == {"error"}


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_prompt_that_does_not_fit_says_so_in_the_words_that_clients_know(served, path):
    for words in (600, 20_000):
        reply = served.http.post(path, json=body(messages=[user("word " * words)]))
        message = told(reply, 400, "invalid_request_error")
        assert message.startswith("prompt is too long: ")
        assert "512" in message


def test_a_conversation_that_the_server_is_to_hold_is_refused_in_the_words_of_the_sdk(served):
    for path in (PATH, COUNT):
        reply = served.http.post(path, json=body(thread={"type": "create"}))
        told(reply, 400, "invalid_request_error")
        details = reply.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert served.http.post(PATH, json=body(thread=None)).is_success


def test_deep_json_is_refused_wherever_it_stands(served):
    for depth in (200, 300, 900, 5000):
        deep = "[" * depth + "]" * depth
        for sent in (
            body(tools=[TOOL | {"input_schema": {"x": "DEEP"}}]),
            body(**turns("assistant", CALL | {"input": {"x": "DEEP"}})),
        ):
            content = json.dumps(sent).replace('"DEEP"', deep)
            for path in (PATH, COUNT):
                headers = {"content-type": "application/json"}
                reply = served.http.post(path, content=content, headers=headers)
                if not reply.is_success:
                    told(reply, 400, "invalid_request_error")
    assert served.http.post(PATH, json=body()).is_success


def test_the_sdk_raises_its_own_error_for_each_status(served):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client(served).messages.create(**body(), extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client(served).messages.create(**(body() | {"model": "other"}))


def test_a_key_may_come_in_either_header_and_a_wrong_one_is_told():
    with serving(fake_engine(), api_keys=("good",)) as served:
        assert client(served, api_key="good").messages.create(**body()).content
        by_token = client(served, api_key=None, auth_token="good")
        assert by_token.messages.create(**body()).content
        both = {"authorization": "Bearer left-over", "x-api-key": "good"}
        assert served.http.post(PATH, json=body(), headers=both).is_success
        one, other = (item.request.namespace for item in served.worker.items[:2])
        assert one == other
        with pytest.raises(anthropic.AuthenticationError):
            client(served, api_key="bad").messages.create(**body())
        message = told(served.http.post(PATH, json=body()), 401, "authentication_error")
        assert "x-api-key" in message


def test_a_full_queue_is_a_rate_limit_and_its_streams_hear_pings():
    engine = fake_engine()
    with serving(engine, max_queue_depth=1, heartbeat_s=0.05) as served, ExitStack() as stack:
        gate = engine.hold("step")
        waiting = [
            stack.enter_context(served.http.stream("POST", PATH, json=body(stream=True)))
            for _ in range(2)
        ]
        told_of = served.http.post(PATH, json=body())
        told(told_of, 429, "rate_limit_error")
        assert int(told_of.headers["retry-after"]) >= 1
        lines = [stream.iter_lines() for stream in waiting]
        for line in lines:
            opening, _, _, *ping = [next(line) for _ in range(5)]
            assert opening == "event: message_start"
            assert ping == ["event: ping", 'data: {"type":"ping"}']
        gate.open()
        for line in lines:
            assert list(line)[-2] == 'data: {"type":"message_stop"}'


def test_a_failure_inside_a_stream_is_an_error_event_and_the_sdk_raises_it():
    engine = fake_engine()
    with serving(engine) as served:
        engine.fail("step", at=2)
        with (
            pytest.raises(anthropic.APIStatusError, match="api_error") as caught,
            client(served).messages.stream(**body()) as stream,
        ):
            list(stream)
        assert caught.value.body["type"] == "error"
        served.wait_ready()
        engine.fail("step", at=2)
        told(served.http.post(PATH, json=body()), 500, "api_error")
        served.wait_ready()
        assert served.http.post(PATH, json=body()).is_success


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnavailableError("busy"), "overloaded_error"),
        (ConflictError("running"), "conflict_error"),
        (TurnCancelledError("gone"), "api_error"),
        (EngineError("broken"), "api_error"),
    ],
)
def test_each_status_has_the_type_that_this_dialect_gives_it(error, kind):
    scope = {"path": PATH, "state": {"request_id": "r1"}}
    reply = error_response(error, scope)
    assert reply.status_code == error.status
    assert ("retry-after" in reply.headers) == (error.status == 503)
    assert json.loads(reply.body) == {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": "r1",
    }


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "x", 1]
)
BLOCK = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "text": st.text(max_size=5) | JSON,
        "thinking": st.text(max_size=5) | JSON,
        "signature": JSON,
        "id": st.sampled_from(["a", "b"]) | JSON,
        "tool_use_id": st.sampled_from(["a", "b"]) | JSON,
        "name": st.text(max_size=5) | JSON,
        "input": st.dictionaries(st.text(max_size=3), JSON, max_size=2) | JSON,
        "content": st.text(max_size=5) | JSON,
        "is_error": st.booleans() | JSON,
        "cache_control": st.just({"type": "ephemeral"}) | JSON,
    },
)
CONTENT = st.text(max_size=8) | st.lists(BLOCK, max_size=4) | JSON
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": CONTENT}
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just(NAME) | JSON,
        "max_tokens": st.integers(-1, 9) | JSON,
        "messages": st.lists(TURN, max_size=4) | JSON,
        "system": CONTENT,
        "tools": st.lists(
            st.fixed_dictionaries(
                {"name": st.text(max_size=4)},
                optional={"input_schema": st.just({}) | JSON, "type": JSON, "description": JSON},
            ),
            max_size=2,
        )
        | JSON,
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "none", "tool"])}, optional={"name": JSON}
        )
        | JSON,
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(["enabled", "disabled", "adaptive"])},
            optional={"budget_tokens": JSON},
        )
        | JSON,
        "temperature": JSON,
        "top_p": JSON,
        "top_k": JSON,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | JSON,
        "stream": st.booleans() | JSON,
        "metadata": JSON,
        "output_config": JSON,
        "output_format": JSON,
        "cache_control": JSON,
        "session_id": JSON,
        "cache_salt": JSON,
        "flashrt_pin_prefix": JSON,
        "chat_template_kwargs": JSON,
    },
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=FIELDS, path=st.sampled_from([PATH, COUNT]))
def test_whatever_stands_in_the_fields_the_answer_is_a_reply_or_a_refusal(served, fields, path):
    reply = served.http.post(path, json=body(**{"max_tokens": 5, **fields}))
    if not reply.is_success:
        assert reply.status_code < 500, (reply.text, fields)
        assert reply.json()["type"] == "error"
    elif "stream" in fields and fields["stream"] and path == PATH:
        assert "event: error" not in reply.text, reply.text
        assert reply.text.endswith('data: {"type":"message_stop"}\n\n')
