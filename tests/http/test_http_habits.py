"""Habits of agent clients that no standard has: headers, retries, compactions, spare fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from grammar_asks import call, thought, tools
from harness import (
    NAME,
    Replies,
    Served,
    chat_body,
    fake_engine,
    serving,
    spelled,
    tokenizer,
    user,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
DIALECTS = pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
SYSTEM = {"role": "system", "content": "You look after a garden. " * 20}


def asking(path: str, word: str, **fields: Any) -> dict[str, Any]:
    """The same request in each dialect."""
    match path:
        case "/v1/messages":
            body: dict[str, Any] = {"model": NAME, "max_tokens": 60, "messages": [user(word)]}
        case "/v1/responses":
            body = {"model": NAME, "input": word}
        case _:
            body = chat_body([user(word)])
    return {**body, **fields}


def words_of(path: str, reply: dict[str, Any]) -> str:
    """What the reply says, thoughts apart."""
    match path:
        case "/v1/messages":
            return "".join(b["text"] for b in reply["content"] if b["type"] == "text")
        case "/v1/responses":
            items = [item for item in reply["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in items for part in item["content"])
        case _:
            text: str = reply["choices"][0]["message"]["content"]
            return text


def refusal(path: str, reply: httpx.Response) -> dict[str, Any]:
    """The error of a reply, which must have its dialect's own form."""
    body: dict[str, Any] = reply.json()
    if path == MESSAGES:
        assert body["type"] == "error"
        assert body["request_id"] == reply.headers["request-id"]
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


# -- headers and spare fields --------------------------------------------------------------------

HEADERS = {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "conversation_id": "0199b",
    "openai-beta": "responses=experimental",
    "originator": "codex_cli_rs",
    "session_id": "0199b-cafe",
    "x-app": "cli",
    "x-claude-code-session-id": "b1946ac9",
    "x-codex-turn-metadata": '{"turn_id": "7"}',
    "x-session-affinity": "opencode-7",
    "x-stainless-retry-count": "2",
}


@DIALECTS
def test_session_headers_of_clients_change_nothing(served: Served, path: str) -> None:
    body = asking(path, f"headers at {path}")
    plain = served.http.post(path, json=body)
    with_headers = served.http.post(path, json=body, headers=HEADERS)
    assert (plain.status_code, with_headers.status_code) == (200, 200)
    assert words_of(path, plain.json()) == words_of(path, with_headers.json())
    # Neither is it a session's name, nor does it keep states apart.
    assert with_headers.json()["capserve"]["miss_reason"] is None
    assert served.worker.items[-1].request.session_id is None


SPARE: dict[str, Any] = {
    "service_tier": "flex",
    "client_metadata": {"x-codex-installation-id": "1", "turn": {"id": 7}},
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "auto"},
    "verbosity": "low",
    "container": None,
    "mcp_servers": [],
    "betas": ["context-1m"],
}


@DIALECTS
def test_fields_for_other_services_change_nothing(served: Served, path: str) -> None:
    word = f"spare fields at {path}"
    replies = [served.http.post(path, json=asking(path, word, **fields)) for fields in ({}, SPARE)]
    assert [reply.status_code for reply in replies] == [200, 200]
    told = [words_of(path, reply.json()) for reply in replies]
    assert told[0] == told[1]


def test_a_coding_agents_responses_fields_are_taken_and_its_reasoning_comes_back_empty(
    served: Served, replies: Replies
) -> None:
    """Sealed reasoning is asked for, and what comes back has neither content nor seal."""
    replies.say["look at it"] = thought(call("paint", name="blue"))
    body = {
        "model": NAME,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "look at it"}]}],
        "tools": [{"type": "function", **tool["function"]} for tool in tools()],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "client_metadata": {"x-codex-installation-id": "1"},
        "text": {"verbosity": "low"},
        "parallel_tool_calls": False,
        "store": False,
        "stream": False,
    }
    first = served.http.post(RESPONSES, json=body).json()
    reasoning, made = first["output"]
    assert (reasoning["type"], made["type"]) == ("reasoning", "function_call")
    assert first["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert first["parallel_tool_calls"] is False
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": None, "id": reasoning["id"]}
    answer = {"type": "function_call_output", "call_id": made["call_id"], "output": "done"}
    history = [*body["input"], sealed, made, answer]
    second = served.http.post(RESPONSES, json={**body, "input": history}).json()
    assert second["capserve"]["prefix_action"] == "message_append"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning_content": "one", "reasoning": "two"}, "one"),
        ({"reasoning": "two"}, "two"),
        ({"reasoning_content": None, "reasoning": "two"}, "two"),
        ({"reasoning_content": "one", "reasoning": None}, "one"),
        ({"reasoning_content": "", "reasoning": "two"}, ""),
    ],
)
def test_reasoning_content_wins_over_reasoning(
    served: Served, fields: dict[str, Any], told: str
) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "Yes.", "tool_calls": [made], **fields}
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    body = chat_body([user("hm"), turn, result])
    reply = served.post({**body, "max_tokens": 1, "return_token_ids": True}).json()
    prompt = spelled(reply["prompt_token_ids"])
    assert ("one" in prompt, "two" in prompt) == (told == "one", told == "two")


# -- refusals in each dialect --------------------------------------------------------------------


@DIALECTS
def test_a_full_queue_a_large_body_and_a_broken_engine_are_told_in_each_dialects_own_words(
    path: str,
) -> None:
    engine = fake_engine()
    with serving(engine, max_queue_depth=1, max_body_bytes=20_000, max_prompt_tokens=90) as served:

        def ask(word: str) -> httpx.Response:
            return served.http.post(path, json=asking(path, word))

        large, long = ask("x" * 30_000), ask("so many words " * 60)
        for refused in (large, long):
            assert refused.status_code == 413, refused.text
            error = refusal(path, refused)
            kind = "request_too_large" if path == MESSAGES else "invalid_request_error"
            assert error["type"] == kind
        gate = engine.hold("extend")
        waiting = {**chat_body([user("before")]), "stream": True}
        with served.raw(waiting):
            gate.wait_arrived()
            with served.raw(waiting):
                served.worker.wait_taken(2)
                refused = ask("hello")
                gate.open()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refusal(path, refused)
        assert error["type"] == ("rate_limit_error" if path == MESSAGES else error["type"])
        served.worker.wait_idle()
    engine = fake_engine()
    with serving(engine) as served:
        engine.fail("step")
        engine.fail("reset", at=2)  # the first clears the state for the new conversation
        assert ask("break").status_code == 500
        refused = ask("hello")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        error = refusal(path, refused)
        assert error["type"] == ("overloaded_error" if path == MESSAGES else error["type"])


@pytest.mark.parametrize("key", ["key-a", "key-b"])
def test_a_previous_response_of_nobody_or_of_another_key_is_not_there(key: str) -> None:
    with serving(fake_engine(), api_keys=("key-a", "key-b")) as served:

        def ask(bearer: str, **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {bearer}"}
            body = asking(RESPONSES, "hello", **fields)
            return served.http.post(RESPONSES, json=body, headers=headers)

        stored, unstored = ask("key-a").json()["id"], ask(key, store=False).json()["id"]
        for name in ("resp_of_nobody", unstored, *([stored] if key == "key-b" else [])):
            refused = ask(key, previous_response_id=name)
            assert refused.status_code == 404
            error = refusal(RESPONSES, refused)
            assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
        assert ask("key-a", previous_response_id=stored).status_code == 200


# -- what a conversation goes through ------------------------------------------------------------


def test_requests_of_all_dialects_at_once_each_get_their_own_reply(served: Served) -> None:
    asked = [(path, f"number {i}") for i in range(8) for path in (CHAT, MESSAGES, RESPONSES)]

    def ask(one: tuple[str, str]) -> str:
        path, word = one
        body = asking(
            path, word, **({"thinking": {"type": "disabled"}} if path == MESSAGES else {})
        )
        reply = served.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return words_of(path, reply.json())

    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(ask, asked))
    assert told == [f"I heard: {word}" for _, word in asked]


def conversation(served: Served, turns: int) -> list[dict[str, Any]]:
    history = [SYSTEM]
    for i in range(turns):
        history.append(user(f"question {i}, and some more words to make it longer"))
        reply = served.post(chat_body(history)).json()
        history.append(reply["choices"][0]["message"])
    return history


def test_a_compacted_conversation_starts_behind_its_system_prompt(served: Served) -> None:
    """The summary comes as a message of the user, and the conversation goes on from there."""
    history = conversation(served, 4)
    summary = user("This session continues an earlier one. Summary: four questions were asked.")
    asks = chat_body([SYSTEM, summary, user("and the fifth?")])
    reply = served.post({**asks, "return_token_ids": True}).json()
    system_tokens = len(tokenizer().encode(SYSTEM["content"]))
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= system_tokens
    again = [*asks["messages"], reply["choices"][0]["message"], user("and the sixth?")]
    more = served.post(chat_body(again)).json()
    assert more["capserve"]["miss_reason"] is None or "diverged" in more["capserve"]["miss_reason"]
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] > system_tokens
    # The old one is still there, for who goes back to it.
    back = served.post(chat_body([*history, user("as before")])).json()
    assert back["capserve"]["cached_tokens"] > back["capserve"]["new_prefill_tokens"]


def test_cleared_tool_results_cost_what_stands_behind_the_first_of_them(
    served: Served, replies: Replies
) -> None:
    """As agents do it that clear old results in place, `/v1/messages` and all."""
    replies.say["use the tool"] = replies.say["result "] = call("paint", name="blue")
    body = asking(MESSAGES, "use the tool", system=SYSTEM["content"])
    body["tools"] = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in tools()
    ]
    for i in range(3):
        reply = served.http.post(MESSAGES, json=body).json()
        [used] = [block for block in reply["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": f"result {i} " * 40}
        body["messages"] += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
    before = served.http.post(MESSAGES, json=body).json()["capserve"]
    body["messages"][4]["content"][0]["content"] = "[Old tool result content cleared]"
    cleared = served.http.post(MESSAGES, json=body).json()["capserve"]
    assert "diverged(message 5" in cleared["miss_reason"]
    assert cleared["cached_tokens"] > before["prompt_tokens"] / 3
    assert cleared["prompt_tokens"] < before["prompt_tokens"]


def test_a_reply_that_was_cut_by_its_limit_goes_on_where_it_stopped(
    served: Served, replies: Replies
) -> None:
    whole = "One two three four five six seven eight nine ten, and that is all of it."
    replies.say["count for me"] = whole
    body = {**chat_body([user("count for me")]), "enable_thinking": False}
    first = served.post({**body, "max_tokens": 7}).json()
    assert first["choices"][0]["finish_reason"] == "length"
    begun = first["choices"][0]["message"]["content"]
    assert whole.startswith(begun)
    # As most clients do it: the part as it came, and a word to go on.
    asks = [*body["messages"], {"role": "assistant", "content": begun}, user("Continue.")]
    told = served.post({**body, "messages": asks}).json()
    # The template shows an answered turn without its empty thought: what lies before is known.
    assert told["capserve"]["cached_tokens"] >= served.worker.items[-2].request.prompt.prompt_end
    # Or as a message to be continued: nothing that was read or said is read again.
    asks = [*body["messages"], {"role": "assistant", "content": begun}]
    told = served.post({**body, "messages": asks}).json()
    assert told["capserve"]["cached_tokens"] >= first["usage"]["total_tokens"] - 2
    assert told["choices"][0]["finish_reason"] == "stop"


@DIALECTS
def test_a_retry_without_streaming_gets_the_reply_that_the_stream_had(
    served: Served, path: str
) -> None:
    """Some clients fall back to it when a stream fails them."""
    body = asking(path, f"fall back at {path}", temperature=0.7, seed=3)
    with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        data = response.read().decode()
    told = words_told(path, data)
    retried = served.http.post(path, json={**body, "stream": False}).json()
    assert words_of(path, retried) == told
    record = retried["capserve"]
    # The end of the prompt was kept; the generation prompt, a few tokens, is read again.
    assert record["new_prefill_tokens"] <= 8
    assert record["miss_reason"] is None


def words_told(path: str, data: str) -> str:
    lines = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == MESSAGES:
        return "".join(event.get("delta", {}).get("text", "") for event in events)
    if path == RESPONSES:
        return words_of(path, events[-1]["response"])
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )


# -- messages ------------------------------------------------------------------------------------


def result_of(content: Any, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}
    used = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    talk = [user("hm"), {"role": "assistant", "content": [used]}, user([block])]
    return asking(MESSAGES, "", messages=talk)


def prompt_of(served: Served, body: dict[str, Any]) -> str:
    reply = served.http.post(MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    return spelled(served.worker.items[-1].request.prompt.tokens)


def test_a_system_prompt_in_marked_blocks_is_that_of_one_string(served: Served) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    blocks = [
        {"type": "text", "text": "You look after a garden. "},
        {"type": "text", "text": "Water it.", "cache_control": mark},
    ]
    told = [
        prompt_of(served, asking(MESSAGES, "hello", system=system))
        for system in (blocks, "You look after a garden. Water it.")
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_empty_tool_result_is_an_empty_one(served: Served, content: Any) -> None:
    assert prompt_of(served, result_of(content)) == prompt_of(served, result_of(""))


def test_a_tool_result_that_failed_says_so_and_one_without_content_too(served: Served) -> None:
    assert "Error: no such file" in prompt_of(served, result_of("no such file", is_error=True))
    assert "Error:" in prompt_of(served, result_of(None, is_error=True))


@pytest.mark.parametrize("kind", ["image", "document", "search_result"])
def test_an_image_in_a_tool_result_is_refused_by_its_place(served: Served, kind: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    parts = [{"type": "text", "text": "see"}, {"type": kind, "source": source}]
    refused = served.http.post(MESSAGES, json=result_of(parts))
    assert refused.status_code == 400
    error = refusal(MESSAGES, refused)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages[2].content[0].content[1].type must be one of")
    assert repr(kind) in error["message"]


# -- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stop", ["five", ["seven", "five"], ["five", "five six"]])
def test_stop_strings_end_the_reply_before_them(
    served: Served, replies: Replies, path: str, stop: Any
) -> None:
    replies.say["count to ten"] = "One two three four five six seven eight nine ten"
    body = asking(path, "count to ten", stop=stop, enable_thinking=False)
    reply = served.http.post(path, json=body).json()
    assert words_of(path, reply) == "One two three four "


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_bias_reaches_the_sampler_and_a_wrong_one_is_named(served: Served, path: str) -> None:
    body = asking(path, "hello", logit_bias={"17": -100, "18": 5.5})
    assert served.http.post(path, json=body).status_code == 200
    assert served.worker.items[-1].request.sampling.logit_bias == ((17, -100.0), (18, 5.5))
    for bias in ({"999999": 1}, {"x": 1}, {"1": 101}, {"1": None}):
        refused = served.http.post(path, json=asking(path, "hello", logit_bias=bias))
        assert refused.status_code == 400
        assert refusal(path, refused)["param"].startswith("logit_bias")


@DIALECTS
def test_one_call_at_a_time_is_one_call_in_every_dialect(
    served: Served, replies: Replies, path: str
) -> None:
    both = call("paint", name="blue") + "\n" + call("weather", city="Rome", days="3")
    replies.say["both at once"] = both if path == MESSAGES else thought(both)
    functions = [tool["function"] for tool in tools()]
    fields: dict[str, Any] = {"parallel_tool_calls": False, "tools": tools()}
    if path == MESSAGES:
        fields = {
            "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in functions],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        }
    elif path == RESPONSES:
        fields["tools"] = [{"type": "function", **function} for function in functions]
    reply = served.http.post(path, json=asking(path, "both at once", **fields)).json()
    match path:
        case "/v1/messages":
            made = [block for block in reply["content"] if block["type"] == "tool_use"]
        case "/v1/responses":
            made = [item for item in reply["output"] if item["type"] == "function_call"]
        case _:
            made = reply["choices"][0]["message"]["tool_calls"]
    assert len(made) == 1
