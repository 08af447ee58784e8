"""Bad input: always the error body, never a 500, the field and the numbers named, and the next
request works."""

from __future__ import annotations

import json

import httpx
import pytest
from harness import NAME, Served, chat_body, fake_engine, serving
from pydantic import ValidationError

from capserve.api.schemas import MAX_BIASES, MAX_MESSAGES, MAX_TOOLS, ChatRequest
from capserve.api.strict_json import MAX_SECOND_LOOK_BYTES, parse_object
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served():
    with serving(fake_engine(), max_body_bytes=4 << 20) as running:
        yield running


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def assistant(**fields):
    return {"messages": [*HELLO, {"role": "assistant", **fields}, *HELLO]}


def tool(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def named(name):
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def json_schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": value}}


GO = {"tools": [{"type": "function", "function": {"name": "go"}}]}

# (what is sent, status, param, words that the message must have)
FIELDS = [
    ({"temperature": 3}, "temperature", ["2", "3"]),
    ({"temperature": -0.1}, "temperature", ["0", "-0.1"]),
    ({"temperature": True}, "temperature", ["number", "true"]),
    ({"temperature": "hot"}, "temperature", ["number", "'hot'"]),
    ({"top_p": 0}, "top_p", ["0"]),
    ({"top_p": 1.5}, "top_p", ["1", "1.5"]),
    ({"top_k": -2}, "top_k", ["-1", "-2"]),
    ({"top_k": 2.5}, "top_k", ["integer", "2.5"]),
    ({"min_p": 2}, "min_p", ["1", "2"]),
    ({"repetition_penalty": 0.009}, "repetition_penalty", ["0.01", "0.009"]),
    ({"repetition_penalty": 101}, "repetition_penalty", ["100", "101"]),
    ({"presence_penalty": 2.1}, "presence_penalty", ["2", "2.1"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["-2", "-3"]),
    ({"max_tokens": 0}, "max_tokens", ["1", "0"]),
    ({"max_tokens": -1}, "max_tokens", ["1", "-1"]),
    ({"max_tokens": 1.5}, "max_tokens", ["integer", "1.5"]),
    ({"max_tokens": 10**30}, "max_tokens", ["integer"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["1", "0"]),
    ({"max_completion_tokens": True}, "max_completion_tokens", ["integer", "true"]),
    ({"seed": 2**64 * 2}, "seed", ["integer"]),
    ({"seed": -(2**63) - 1}, "seed", ["integer"]),
    ({"seed": "7"}, "seed", ["integer", "'7'"]),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", ["100", "101"]),
    ({"logit_bias": {"8192": 1}}, "logit_bias", ["'8192'", "8191"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["'-1'", "8191"]),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ["8191"]),
    (
        {"logit_bias": dict.fromkeys(map(str, range(MAX_BIASES + 1)))},
        "logit_bias",
        [str(MAX_BIASES), str(MAX_BIASES + 1)],
    ),
    ({"messages": [0] * (MAX_MESSAGES + 1)}, "messages", [str(MAX_MESSAGES), "100001"]),
    ({"tools": [0] * (MAX_TOOLS + 1)}, "tools", [str(MAX_TOOLS), "10001"]),
    (assistant(tool_calls=[0] * 10_001), "messages[1].tool_calls", ["10000", "10001"]),
    ({"logit_bias": [1]}, "logit_bias", ["object", "array"]),
    ({"logprobs": 5}, "logprobs", ["boolean", "5"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["20", "21"]),
    ({"top_logprobs": 3}, "top_logprobs", ["logprobs"]),
    ({"n": 17}, "n", ["16", "17"]),
    ({"n": True}, "n", ["true"]),
    ({"stop": ["x"] * 17}, "stop", ["16", "17"]),
    ({"stop": ""}, "stop", ["1", "0"]),
    ({"stop": ["a", ""]}, "stop[1]", ["1", "0"]),
    ({"stop": "x" * 1025}, "stop", ["1024", "1025"]),
    ({"stop": 5}, "stop", ["integer"]),
    ({"stop": [5]}, "stop[0]", ["integer"]),
    ({"stream": "yes"}, "stream", ["boolean", "'yes'"]),
    ({"stream_options": True}, "stream_options", ["object"]),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["boolean", "1"]),
    ({"tool_choice": "required"}, "tool_choice", ["0 tools"]),
    (named("f"), "tool_choice.function.name", ["0 tools", "'f'"]),
    ({**named("f"), **GO}, "tool_choice.function.name", ["1 tools", "'f'"]),
    ({**named(3), **GO}, "tool_choice.function.name", ["string", "integer"]),
    ({**named("f"), "tools": []}, "tool_choice.function.name", ["0 tools"]),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", ["object", "null"]),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type", ["'custom'", "'allowed_tools'"]),
    ({"tool_choice": {"type": 3}}, "tool_choice.type", ["'function'", "3"]),
    ({"tool_choice": {}}, "tool_choice.type", ["'function'", "null"]),
    ({"tool_choice": "always"}, "tool_choice", ["'always'", "'required'"]),
    ({"tool_choice": 1}, "tool_choice", ["1"]),
    ({"tool_choice": ["auto"]}, "tool_choice", ["array"]),
    ({"response_format": {"type": 7}}, "response_format.type", ["7"]),
    ({"response_format": {}}, "response_format.type", ["json_object", "null"]),
    ({"response_format": "text"}, "response_format", ["object"]),
    (json_schema(None), "response_format.json_schema", ["required"]),
    (json_schema("s"), "response_format.json_schema", ["object", "string"]),
    (json_schema({"name": 1, "schema": {}}), "response_format.json_schema.name", ["string"]),
    (json_schema({"name": "n"}), "response_format.json_schema.schema", ["required"]),
    (json_schema({"schema": True}), "response_format.json_schema.schema", ["object", "boolean"]),
    (
        json_schema({"schema": {}, "strict": "yes"}),
        "response_format.json_schema.strict",
        ["boolean", "'yes'"],
    ),
    (json_schema({"schema": {"type": "cat"}}), "response_format", ["cat"]),
    ({"ignore_eos": 1}, "ignore_eos", ["boolean", "1"]),
    ({"flashrt_K": 5}, "flashrt_K", ["4", "5"]),
    ({"flashrt_K": -1}, "flashrt_K", ["0", "-1"]),
    ({"flashrt_K": True}, "flashrt_K", ["integer", "true"]),
    ({"flashrt_pin_prefix": 0}, "flashrt_pin_prefix", ["1", "0"]),
    ({"flashrt_pin_prefix": -5}, "flashrt_pin_prefix", ["1", "-5"]),
    ({"flashrt_pin_prefix": "yes"}, "flashrt_pin_prefix", ["boolean", "'yes'"]),
    ({"flashrt_pin_prefix": 2.5}, "flashrt_pin_prefix", ["2.5"]),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", ["object", "array"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["messages"]),
    ({"enable_thinking": "no"}, "enable_thinking", ["boolean", "'no'"]),
    ({"reasoning_effort": 3}, "reasoning_effort", ["string", "3"]),
    ({"prompt_cache_key": 3}, "prompt_cache_key", ["string", "3"]),
    ({"cache_salt": "x" * 1025}, "cache_salt", ["1024", "1025"]),
    ({"user": []}, "user", ["string", "array"]),
    ({"store": 1}, "store", ["boolean", "1"]),
    ({"metadata": "m"}, "metadata", ["object", "'m'"]),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", ["boolean", "1"]),
    ({"return_token_ids": 1}, "return_token_ids", ["boolean", "1"]),
    ({"model": 5}, "model", ["string", "5"]),
    ({"messages": []}, "messages", ["1", "0"]),
    ({"messages": None}, "messages", ["array", "null"]),
    ({"messages": "hi"}, "messages", ["array", "'hi'"]),
    ({"messages": [5]}, "messages[0]", ["object", "5"]),
    ({"messages": [{"content": "x"}]}, "messages[0].role", ["required"]),
    ({"messages": [{"role": "wizard"}]}, "messages[0].role", ["wizard", "tool"]),
    ({"messages": [*HELLO, {"role": None}]}, "messages[1].role", ["null"]),
    (user(5), "messages[0].content", ["integer"]),
    (user({"type": "text"}), "messages[0].content", ["object"]),
    (user(["x"]), "messages[0].content[0]", ["string"]),
    (user([{"type": "text", "text": 5}]), "messages[0].content[0].text", ["integer"]),
    (user([{"text": "x"}]), "messages[0].content[0].type", ["text"]),
    (
        user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]),
        "messages[0].content[1].type",
        ["image_url", "text only"],
    ),
    (assistant(reasoning_content=5), "messages[1].reasoning_content", ["string", "5"]),
    (assistant(reasoning=[]), "messages[1].reasoning", ["string", "array"]),
    (assistant(tool_calls={}), "messages[1].tool_calls", ["array", "object"]),
    (assistant(tool_calls=[{}]), "messages[1].tool_calls[0].function", ["required"]),
    (
        assistant(tool_calls=[{"function": {"name": 5}}]),
        "messages[1].tool_calls[0].function.name",
        ["string", "5"],
    ),
    (
        assistant(tool_calls=[{"type": "custom", "function": {"name": "f"}}]),
        "messages[1].tool_calls[0].type",
        ["function", "custom"],
    ),
    ({"tools": {}}, "tools", ["array", "object"]),
    ({"tools": [5]}, "tools[0]", ["object", "5"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["function", "web_search"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
    (tool(name=""), "tools[0].function.name", ["1", "0"]),
    (tool(parameters="x"), "tools[0].function.parameters", ["object", "'x'"]),
]


def refusal(response: httpx.Response) -> dict:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"), FIELDS, ids=[json.dumps(case[0])[:60] for case in FIELDS]
)
def test_a_wrong_field_is_a_400_that_names_it(served: Served, fields, param, words):
    response = served.post({**chat_body(HELLO), **fields})
    assert response.status_code == 400, response.text
    error = refusal(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    missing = [word for word in [param.split(".")[0], *words] if word not in error["message"]]
    assert not missing, error["message"]


RAW = [
    (b"", None),
    (b"{", None),
    (b"null", None),
    (b"[1]", None),
    (b"{}", "messages"),
    (b'"text"', None),
    (b"\xff\xfe", None),
    (b"[" * 100_000 + b"]" * 100_000, None),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, None),
    (b'{"temperature": NaN}', "temperature"),
    (b'{"temperature": 1e999}', "temperature"),
    (b'{"top_p": -Infinity}', "top_p"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a", "\\udc00"]}', "stop[1]"),
    (b'{"metadata": {"\\ud800": 1}}', "metadata"),
]


@pytest.mark.parametrize(("raw", "param"), RAW, ids=[repr(case[0][:40]) for case in RAW])
def test_a_body_that_is_no_json_object_is_a_400(served: Served, raw, param):
    response = served.post_raw(raw)
    assert response.status_code == 400, response.text
    assert refusal(response)["param"] == param


def test_a_large_body_is_not_read_a_second_time_to_name_a_field():
    for filler, param in ((0, "x"), (MAX_SECOND_LOOK_BYTES, None)):
        with pytest.raises(InvalidRequestError) as refused:
            parse_object(b'{"x": NaN, "y": "' + b"a" * filler + b'"}')
        assert refused.value.param == param


def test_of_many_wrong_messages_only_the_first_becomes_an_error(monkeypatch):
    seen = []
    read = ValidationError.errors
    monkeypatch.setattr(
        "capserve.api.validation.ValidationError.errors",
        lambda *args, **kwargs: seen.append(read(*args, **kwargs)) or seen[-1],
        raising=True,
    )
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]"):
        validated(ChatRequest, {"messages": [[]] * 5000, "tools": [[]] * 5000})
    assert [len(errors) for errors in seen] == [2]


def test_a_refusal_before_the_queue_leaves_a_record_under_its_id(served: Served, caplog):
    caplog.set_level("INFO", logger="capserve.turns")
    before = served.state.metrics.health()["by_state"].get("rejected", 0)
    context = served.state.model.max_model_len
    long = chat_body([{"role": "user", "content": "word " * 2 * context}])
    assert served.post(long, headers={"x-request-id": "too-long-1"}).status_code == 400
    assert served.state.metrics.health()["by_state"]["rejected"] == before + 1
    assert any("too-long-1 rejected" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 1020])
def test_deep_json_in_any_free_form_field_is_an_answer_or_a_400(served: Served, depth):
    deep = "[" * depth + "1" + "]" * depth
    inside = {"x": "DEEP"}
    as_object = [{"function": {"name": "f", "arguments": inside}}]
    as_text = [{"function": {"name": "f", "arguments": '{"x":DEEP}'}}]
    for fields in (
        tool(parameters={"type": "object", "properties": {"x": {"enum": "DEEP"}}}),
        {"chat_template_kwargs": inside},
        {"metadata": inside},
        assistant(content=None, tool_calls=as_object),
        assistant(content=None, tool_calls=as_text),
    ):
        body = json.dumps({**chat_body(HELLO), **fields})
        response = served.post_raw(body.replace('"DEEP"', deep).replace("DEEP", deep).encode())
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            refusal(response)


def test_an_unknown_model_is_a_404_that_names_both(served: Served):
    response = served.post({**chat_body(HELLO), "model": "gpt-9"})
    error = refusal(response)
    assert response.status_code == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]
    assert NAME in error["message"]


def test_a_prompt_longer_than_the_context_is_a_400_that_names_both_numbers(served: Served):
    context = served.state.model.max_model_len
    response = served.post(chat_body([{"role": "user", "content": "word " * 2 * context}]))
    error = refusal(response)
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert f"maximum context length is {context} tokens" in error["message"]
    assert any(int(word) > context for word in error["message"].split() if word.isdigit())


def test_a_body_over_the_limit_is_a_413_with_both_numbers_declared_or_not(served: Served):
    limit = served.state.limits.max_body_bytes
    body = b'{"messages": "' + b"x" * limit + b'"}'

    def pieces():
        yield body[: limit // 2]
        yield body[limit // 2 :]

    for content in (body, pieces()):
        response = served.http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        error = refusal(response)
        assert response.status_code == 413
        assert str(limit) in error["message"]
        numbers = [
            int(word) for word in error["message"].replace(";", "").split() if word.isdigit()
        ]
        assert numbers
        assert max(numbers) > limit


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_declared_as_json_is_a_415(served: Served, content_type):
    headers = {"content-type": content_type} if content_type else {}
    response = served.http.post("/v1/chat/completions", content=b"{}", headers=headers)
    assert response.status_code == 415
    assert "application/json" in refusal(response)["message"]


def test_unknown_routes_and_methods_have_the_error_body(served: Served):
    nowhere = served.http.get("/v1/nowhere")
    assert nowhere.status_code == 404
    assert "/v1/nowhere" in refusal(nowhere)["message"]
    wrong = served.http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert refusal(wrong)["code"] == "method_not_allowed"


def test_after_all_refusals_the_next_request_is_answered(served: Served):
    response = served.post(chat_body(HELLO))
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"]


def test_a_fault_of_our_own_is_a_500_whose_id_is_in_the_log(served: Served, monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("capserve.api.translate.sampling", broken)
        response = served.post(chat_body(HELLO), headers={"x-request-id": "trace-77"})
    error = refusal(response)
    assert response.status_code == 500
    assert "trace-77" in error["message"]
    assert "planted" not in error["message"]
    assert any("trace-77" in record.getMessage() for record in caplog.records)
    assert served.post(chat_body(HELLO)).status_code == 200
