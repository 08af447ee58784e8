"""Raw text in, raw text out: `/v1/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, Replies, Served, chat_body, fake_engine, serving, tokenizer, user

from capserve.testing.fake_engine import FakeEngine, fake_limits

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = Replies()
    replies.say["thinks aloud"] = "<think>\nhm\n</think>\n\n done \n"
    replies.say["an emoji"] = "see 🦉 fly"
    with serving(fake_engine(replies)) as running:
        yield running


@pytest.fixture(scope="module")
def hashed() -> Iterator[Served]:
    """A server whose replies are the fake's own: they depend on the seed and on every token."""
    engine = FakeEngine(fake_limits(vocab_size=tokenizer().vocab_size, max_positions=4096))
    with serving(engine) as running:
        yield running


def ask(served: Served, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = served.http.post(PATH, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal(served: Served, **body: Any) -> dict[str, Any]:
    response = served.http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert ask(served, "still here?")["choices"]
    return error


def streamed(served: Served, prompt: Any, **fields: Any) -> tuple[list[str], list[dict[str, Any]]]:
    body = {"prompt": prompt, "stream": True, **fields}
    with served.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return lines, [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_a_text_is_read_as_it_stands_and_continued(served: Served) -> None:
    body = ask(served, "Once upon a time")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "I heard: Once upon a time",
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    tokens = tokenizer().encode("Once upon a time").tolist()
    assert served.worker.items[-1].request.prompt.tokens.tolist() == tokens
    assert body["usage"]["prompt_tokens"] == len(tokens)


def test_token_ids_mean_what_their_text_means(hashed: Served) -> None:
    text = "def main():\n"
    ids = tokenizer().encode(text).tolist()
    by_text = ask(hashed, text, max_tokens=8, seed=3)
    by_ids = ask(hashed, ids, max_tokens=8, seed=3)
    assert by_ids["choices"] == by_text["choices"]
    assert ask(hashed, [ids], max_tokens=8, seed=3)["choices"] == by_text["choices"]


def test_the_name_of_an_added_token_is_that_token(served: Served) -> None:
    ask(served, "<|im_start|>user\nhi<|im_end|>\n")
    tokens = served.worker.items[-1].request.prompt.tokens.tolist()
    assert tokenizer().specials["<|im_start|>"] == tokens[0]
    assert tokenizer().specials["<|im_end|>"] in tokens


def test_marks_of_thinking_and_spaces_are_text_like_any_other(served: Served) -> None:
    text = ask(served, "thinks aloud")["choices"][0]["text"]
    assert text == "<think>\nhm\n</think>\n\n done \n"


def test_a_longer_text_reads_only_what_is_new(served: Served) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 12
    first = ask(served, text, max_tokens=1)["usage"]
    again = ask(served, text, max_tokens=1)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < first["prompt_tokens"] / 4
    assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"]
    longer = [*tokenizer().encode(text).tolist(), *tokenizer().encode("And then?").tolist()]
    grown = ask(served, longer, max_tokens=1)["usage"]
    assert grown["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"]


def test_the_text_with_its_reply_goes_on_from_the_hot_state(hashed: Served) -> None:
    tokens = tokenizer().encode("A list of birds: " * 10).tolist()
    for _ in range(3):
        ask(hashed, tokens, max_tokens=6, seed=1)
        request = hashed.worker.items[-1].request
        assert request.prompt.tokens.tolist() == tokens
        said = ask(hashed, tokens, max_tokens=6, seed=1, logprobs=0)["capserve"]
        assert said["new_prefill_tokens"] == 0
        tokens = [*tokens, *tokenizer().encode(" more").tolist()]


def test_a_text_never_answers_for_a_chat_that_spells_the_same(served: Served) -> None:
    """A raw turn leaves no record: a chat's messages are not those tokens."""
    said = ask(served, "raw and chat")["choices"][0]["text"]
    history = [{"role": "assistant", "content": "raw and chat" + said}, user("and now?")]
    served.post(chat_body(history))
    assert served.worker.items[-1].request.prompt.spliced_tokens == 0


def test_the_session_of_a_text_is_one_like_any_other(served: Served) -> None:
    made = ask(served, "A text with a session. " * 9)["capserve"]["session_id"]
    path = f"/v1/sessions/{made}"
    assert served.http.get(path).json()["turns"] == 1
    assert served.http.post(f"{path}/fork", json={}).status_code == 201
    body = {**chat_body([user("hi")]), "session_id": made}
    assert served.post(body).json()["capserve"]["session_id"] == made
    assert served.http.post(f"{path}/undo", json={"turns": 1}).json()["removed_turns"] == 1
    assert served.http.get(f"{path}/export").status_code == 200


def test_several_prompts_and_choices_are_in_order(hashed: Served) -> None:
    body = ask(hashed, ["first", "second"], n=2, max_tokens=6, seed=5, temperature=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for index, (prompt, seed) in enumerate(
        [("first", 5), ("first", 6), ("second", 5), ("second", 6)]
    ):
        alone = ask(hashed, prompt, max_tokens=6, seed=seed, temperature=1)
        assert body["choices"][index]["text"] == alone["choices"][0]["text"]
    assert len({choice["text"] for choice in body["choices"]}) > 1
    lengths = [len(tokenizer().encode(text)) for text in ("first", "second")]
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert body["usage"]["completion_tokens"] == 4 * 6
    assert len(body["capserve"]["choices"]) == 4


def test_echo_puts_the_prompt_before_the_reply(served: Served) -> None:
    assert ask(served, "say it", echo=True)["choices"][0]["text"] == "say itI heard: say it"
    _, chunks = streamed(served, "say it", echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "say itI heard: say it"


@pytest.mark.parametrize("prompt", ["plain words", "an emoji", "thinks aloud"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_adds_up_to_the_plain_reply(
    served: Served, prompt: str, logprobs: int | None
) -> None:
    plain = ask(served, prompt, logprobs=logprobs)
    options = {"include_usage": True}
    lines, chunks = streamed(served, prompt, logprobs=logprobs, stream_options=options)
    assert lines[-1] == "data: [DONE]"
    *told, last = chunks
    text, arrays = "", {key: [] for key in ("tokens", "token_logprobs", "text_offset")}
    for chunk in told:
        assert chunk["object"] == "text_completion"
        [choice] = chunk["choices"]
        text += choice["text"]
        for key in arrays:
            arrays[key] += (choice["logprobs"] or {}).get(key, [])
    [whole] = plain["choices"]
    assert text == whole["text"]
    assert told[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    if logprobs is None:
        assert whole["logprobs"] is None
    else:
        assert arrays == {key: whole["logprobs"][key] for key in arrays}


def test_logprobs_are_parallel_arrays_whose_offsets_find_each_token(served: Served) -> None:
    [choice] = ask(served, "an emoji", logprobs=1)["choices"]
    told = choice["logprobs"]
    assert len({len(told[key]) for key in told}) == 1
    assert told["text_offset"][0] == 0
    for token, offset in zip(told["tokens"][:-1], told["text_offset"], strict=False):
        if "\N{REPLACEMENT CHARACTER}" not in token:  # a part of the owl
            assert choice["text"][offset : offset + len(token)] == token
    assert all(len(top) == 1 for top in told["top_logprobs"])


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    [choice] = ask(served, "one two three", stop=[" two"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("I heard: one", "stop")


def test_an_openai_client_completes_and_streams(served: Served) -> None:
    with served.openai() as client:
        reply = client.completions.create(model=NAME, prompt="hello", max_tokens=50)
        assert reply.choices[0].text == "I heard: hello"
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        parts = client.completions.create(model=NAME, prompt="hello", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "I heard: hello"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", ["required"]),
        ({"prompt": None}, "prompt", ["null"]),
        ({"prompt": ""}, "prompt", ["at least 1 token", "got 0"]),
        ({"prompt": []}, "prompt", ["at least 1", "got 0"]),
        ({"prompt": ["a", ""]}, "prompt[1]", ["at least 1 token"]),
        ({"prompt": ["a", 5]}, "prompt[1]", ["an integer"]),
        ({"prompt": [1, True]}, "prompt[1]", ["a boolean"]),
        ({"prompt": [1, 999_999]}, "prompt[1]", ["999999", str(tokenizer().vocab_size - 1)]),
        ({"prompt": [1, -1]}, "prompt[1]", ["-1"]),
        ({"prompt": ["a"] * 17}, "prompt", ["16", "17"]),
        ({"prompt": ["a"] * 9, "n": 2}, "n", ["16", "18"]),
        ({"prompt": "a", "suffix": "b"}, "suffix", ["gap"]),
        ({"prompt": "a", "best_of": 3}, "best_of", ["1", "3"]),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", ["logprobs"]),
        ({"prompt": "a", "logprobs": 21}, "logprobs", ["20", "21"]),
        ({"prompt": "a", "logprobs": True}, "logprobs", ["true"]),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", ["1", "0"]),
        ({"prompt": "a", "temperature": 3}, "temperature", ["2", "3"]),
        ({"prompt": "word " * 5000}, "prompt", ["4096"]),
        ({"prompt": [1] * 4096}, "prompt", ["4096"]),
    ],
)
def test_a_wrong_field_is_named(
    served: Served, body: dict[str, Any], param: str, words: list[str]
) -> None:
    error = refusal(served, **body)
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
