"""What a standard client sees of a turn: plain, streamed, with tools, and what was reused."""

from __future__ import annotations

import json
import threading

import pytest
from harness import NAME, Replies, Served, chat_body, fake_engine, serving, spelled, user

SHELL = {
    "type": "function",
    "function": {
        "name": "run_shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            "required": ["command"],
        },
    },
}
CALL = (
    "I look.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=run_shell>\n<parameter=command>\n"
    "  ls -la 'ü' \n</parameter>\n<parameter=timeout>\n5\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def replies():
    return Replies()


@pytest.fixture(scope="module")
def served(replies):
    with serving(fake_engine(replies)) as running:
        yield running


def test_two_clients_at_once_each_get_their_own_reply(served: Served):
    answers: dict[str, str] = {}

    def ask(word: str) -> None:
        with served.openai() as client:
            reply = client.chat.completions.create(model=NAME, messages=[user(f"say {word}")])
            answers[word] = reply.choices[0].message.content or ""

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("apple", "plum")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {"apple": "I heard: say apple", "plum": "I heard: say plum"}


def test_a_plain_reply_has_every_part_that_clients_read(served: Served):
    response = served.post(chat_body([user("parts")]), headers={"x-request-id": "my-id.1"})
    body = response.json()
    assert response.headers["x-request-id"] == "my-id.1"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == NAME
    assert body["system_fingerprint"] == served.state.model.fingerprint
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I heard: parts",
        "reasoning_content": "Thinking of parts",
    }
    usage, metrics = body["usage"], body["capserve"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == metrics["cached_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert metrics["request_id"] == "my-id.1"
    assert metrics["terminal_state"] == "done"
    assert metrics["tokenize_ms"] > 0
    assert "prompt_token_ids" not in body


def test_the_seed_that_was_used_is_shown_in_both_forms(served: Served):
    given = served.post({**chat_body([user("seed")]), "seed": 7}).json()
    assert given["capserve"]["seed"] == 7
    _, chunks = served.events(chat_body([user("seed")]))
    other = served.post(chat_body([user("seed")])).json()
    assert 0 <= chunks[-1]["capserve"]["seed"] < 2**64
    assert chunks[-1]["capserve"]["seed"] != other["capserve"]["seed"]


def test_without_parallel_calls_the_reply_ends_after_its_first_call(
    served: Served, replies: Replies
):
    call = CALL[CALL.index("<tool_call>") :]
    replies.say["one at a time"] = f"{CALL}\n{call}\nand more"
    request = {**chat_body([user("one at a time")]), "tools": [SHELL]}
    for drafts in (0, 3):
        body = served.post({**request, "parallel_tool_calls": False, "flashrt_K": drafts}).json()
        [choice] = body["choices"]
        assert choice["message"]["content"] == "Let me see."
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
    both = served.post(request).json()
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("bad", ["", "has space", "x" * 129, "(paren)"])
def test_a_request_id_that_is_no_id_is_replaced_by_ours(served: Served, bad):
    response = served.http.get("/health", headers={"x-request-id": bad})
    assert response.headers["x-request-id"].startswith("req-")


def test_a_stream_has_a_role_chunk_deltas_a_finish_chunk_and_done(served: Served):
    lines, chunks = served.events(chat_body([user("shape")]))
    assert lines[-1] == "data: [DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks), "no usage chunk unasked"
    assert all("usage" not in chunk for chunk in chunks)
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert chunks[-1]["capserve"]["terminal_state"] == "done"
    assert all("capserve" not in chunk for chunk in chunks[:-1])
    middle = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert middle
    assert all(len(choice["delta"]) == 1 for choice in middle), "one kind of thing a chunk"
    assert all(choice["finish_reason"] is None for choice in middle)


def test_include_usage_adds_one_last_chunk_without_choices(served: Served):
    body = {**chat_body([user("usage")]), "stream": True}
    body["stream_options"] = {"include_usage": True}
    _, chunks = served.events(body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_stream_can_not_be_buffered_or_cached_on_its_way(served: Served):
    with served.http.stream(
        "POST", "/v1/chat/completions", json={**chat_body([user("x")]), "stream": True}
    ) as response:
        response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]
    assert "content-length" not in response.headers


def test_the_official_client_runs_a_tool_loop_plain_and_streamed(served: Served, replies: Replies):
    replies.say["list the files"] = CALL
    replies.say["a.txt"] = "Seen.\n</think>\n\nThere is one file: a.txt"
    with served.openai() as client:
        history = [user("list the files")]
        first = client.chat.completions.create(model=NAME, messages=history, tools=[SHELL])
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.content == "Let me see."
        [call] = message.tool_calls
        assert call.function.name == "run_shell"
        assert json.loads(call.function.arguments) == {"command": "  ls -la 'ü' ", "timeout": 5}

        history.append(message.model_dump(exclude_none=True))
        history.append({"role": "tool", "tool_call_id": call.id, "content": "a.txt"})
        with client.chat.completions.stream(
            model=NAME, messages=history, tools=[SHELL], stream_options={"include_usage": True}
        ) as stream:
            second = stream.get_final_completion()
        assert second.choices[0].message.content == "There is one file: a.txt"
        assert second.choices[0].finish_reason == "stop"
        assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens


def test_a_reply_that_is_only_a_call_has_null_content(served: Served, replies: Replies):
    replies.say["only a call"] = CALL.replace("Let me see.\n\n", "")
    body = served.post({**chat_body([user("only a call")]), "tools": [SHELL]}).json()
    assert body["choices"][0]["message"]["content"] is None
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


def test_tool_choice_none_keeps_the_prompt_and_parses_no_call(served: Served, replies: Replies):
    replies.say["never call"] = CALL
    request = {**chat_body([user("never call")]), "tools": [SHELL], "return_token_ids": True}
    auto = served.post(request).json()
    none = served.post({**request, "tool_choice": "none"}).json()
    assert none["prompt_token_ids"] == auto["prompt_token_ids"]
    message = none["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "<function=run_shell>" in message["content"]
    assert none["choices"][0]["finish_reason"] == "stop"


def test_contents_that_mean_the_same_have_the_same_prompt_tokens(served: Served):
    call = {"id": "a", "type": "function", "function": {"name": "run_shell", "arguments": "{}"}}
    prompts = []
    for empty in (None, "", [], [{"type": "text", "text": ""}], "absent"):
        assistant = {"role": "assistant", "content": empty, "tool_calls": [call]}
        if empty == "absent":
            del assistant["content"]
        history = [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "go"}, {"type": "text", "text": "!"}],
            },
            assistant,
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "done"}]},
        ]
        if not prompts:  # the first history is spelled in its other way throughout
            history[0] = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
            history[1] = user("go!")
            history[3]["content"] = "done"
        request = {**chat_body(history), "tools": [SHELL], "return_token_ids": True}
        prompts.append(served.post(request).json()["prompt_token_ids"])
    assert prompts[0]
    assert all(prompt == prompts[0] for prompt in prompts)


@pytest.mark.parametrize("arguments", ["{", "", None, "null", "[1]", {"command": "ls"}, 5])
def test_broken_arguments_in_the_history_are_no_error(served: Served, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        user("go"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "bad call"},
    ]
    assert served.post({**chat_body(history), "tools": [SHELL]}).status_code == 200


def test_a_resent_conversation_reads_almost_nothing_twice(served: Served):
    history = [{"role": "system", "content": "Count. " * 200}, user("one")]
    cached = []
    for word in ("two", "three", "four"):
        body = served.post(chat_body(history)).json()
        cached.append((body["usage"]["prompt_tokens"], body["capserve"]["new_prefill_tokens"]))
        answer = body["choices"][0]["message"]
        history += [{"role": "assistant", "content": answer["content"]}, user(word)]
    prompts = [prompt for prompt, _ in cached]
    assert prompts == sorted(prompts)
    assert all(new <= 100 for _, new in cached[1:]), cached


def test_a_cache_key_isolates_and_is_found_again(served: Served):
    request = chat_body([user("isolated " * 50)])
    first = served.post({**request, "prompt_cache_key": "team-a"}).json()
    other = served.post({**request, "prompt_cache_key": "team-b"}).json()
    again = served.post({**request, "prompt_cache_key": "team-a"}).json()
    assert first["capserve"]["cached_tokens"] == 0
    assert other["capserve"]["cached_tokens"] == 0
    assert again["capserve"]["cached_tokens"] > 0


def test_logprobs_and_token_ids_add_up_to_the_reply_in_both_forms(served: Served):
    request = {
        **chat_body([user("numbers")]),
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    body = served.post(request).json()
    _, chunks = served.events(request)
    [choice] = body["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    spoken = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert choice["message"]["content"] in spoken
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
    streamed = [
        entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
    ]
    assert streamed == entries


def test_max_tokens_ends_with_length_and_one_beyond_the_context_is_lowered(served: Served):
    short = served.post({**chat_body([user("long story")]), "max_tokens": 2}).json()
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 2
    huge = served.post({**chat_body([user("long story")]), "max_completion_tokens": 128_000})
    assert huge.status_code == 200
    assert huge.json()["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_the_reply_before_it(served: Served, replies: Replies):
    replies.say["count up"] = "\n</think>\n\none two three four"
    body = served.post({**chat_body([user("count up")]), "stop": ["three"]}).json()
    assert body["choices"][0]["message"]["content"].strip() == "one two"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_fields_of_real_agent_clients_are_taken(served: Served):
    body = {
        **chat_body([{"role": "developer", "content": "x"}, user("hi")]),
        "store": False,
        "reasoning_effort": "medium",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "user": "u",
        "n": 1,
        "stop": None,
        "temperature": None,
        "tools": [],
        "logit_bias": {},
        "stream": False,
        "stream_options": None,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": True},
        "some_field_of_tomorrow": {"x": 1},
    }
    assert served.post(body).status_code == 200


@pytest.mark.parametrize(
    "switch",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "enable_thinking": False},
    ],
)
def test_every_spelling_turns_thinking_off(served: Served, switch):
    request = {**chat_body([user("quiet")]), "return_token_ids": True}
    quiet = served.post({**request, **switch}).json()
    assert spelled(served.post(request).json()["prompt_token_ids"]).endswith("<think>\n")
    assert spelled(quiet["prompt_token_ids"]).endswith("<think>\n\n</think>\n\n")
    assert "reasoning_content" not in quiet["choices"][0]["message"]


def test_models_are_listed_and_found_by_name(served: Served):
    with served.openai() as client:
        [model] = client.models.list().data
        assert model.id == NAME
        assert client.models.retrieve(NAME).id == NAME
    missing = served.http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_ready_and_metrics_tell_what_the_server_does(served: Served):
    served.post(chat_body([user("count me")]))
    health = served.http.get("/health")
    assert health.status_code == 200
    report = health.json()
    assert report["status"] == "green"
    assert report["model"]["served_names"] == [NAME]
    assert report["queue_depth"] == 0
    assert report["uptime_s"] > 0
    assert served.http.get("/ready").json() == {"ready": True}
    metrics = served.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "capserve_" in metrics.text


def test_keys_are_asked_for_everywhere_but_at_probes():
    with serving(fake_engine(), api_keys=("alpha", "beta")) as locked:
        body = chat_body([user("hi " * 80)])
        for headers in ({}, {"authorization": "Bearer gamma"}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                response = locked.http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            assert locked.post(body, headers=headers).status_code == 401
        for path in ("/health", "/ready"):
            assert locked.http.get(path).status_code == 200
        assert locked.http.options("/v1/models").status_code == 405
        cached = [
            locked.post(body, headers={"authorization": f"Bearer {key}"}).json()["capserve"][
                "cached_tokens"
            ]
            for key in ("alpha", "beta", "alpha")
        ]
        assert cached[0] == cached[1] == 0, "one key never reuses what another key sent"
        assert cached[2] > 0
