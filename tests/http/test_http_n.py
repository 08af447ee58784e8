"""Several choices of one prompt, and boundaries where the client wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, WAIT_S, Served, chat_body, fake_engine, serving, tokenizer, user

from capserve.testing.fake_engine import FakeEngine, fake_limits

LONG = {"role": "system", "content": "Count the sheep in the field, and tell who jumped. " * 40}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def hashed() -> Iterator[Served]:
    """A server whose replies are the fake's own: they depend on the seed and on every token."""
    engine = FakeEngine(fake_limits(vocab_size=tokenizer().vocab_size, max_positions=4096))
    with serving(engine) as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    return {**chat_body([LONG, user("four ways")]), "max_tokens": 12, **fields}


@pytest.mark.parametrize("temperature", [0, 1])
def test_choice_i_is_what_a_request_with_seed_plus_i_would_get(
    hashed: Served, temperature: float
) -> None:
    body = hashed.post(asked(n=4, seed=7, temperature=temperature)).json()
    texts = []
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index
        alone = hashed.post(asked(seed=7 + index, temperature=temperature)).json()
        assert choice["message"] == alone["choices"][0]["message"]
        assert body["capserve"]["choices"][index]["seed"] == 7 + index
        texts.append(str(choice["message"]))
    assert len(set(texts)) == (1 if temperature == 0 else 4)


def test_the_prompt_is_read_once_and_counts_once(hashed: Served) -> None:
    body = hashed.post({**asked(n=5), "messages": [LONG, user("a prompt of its own")]}).json()
    first, *others = body["capserve"]["choices"]
    assert first["new_prefill_tokens"] > 8
    for other in others:
        # The generation prompt alone.
        assert other["new_prefill_tokens"] <= 8
        assert other["prompt_tokens"] == first["prompt_tokens"]
    usage = body["usage"]
    assert usage["prompt_tokens"] == first["prompt_tokens"]
    assert usage["completion_tokens"] == sum(
        c["output_tokens"] for c in body["capserve"]["choices"]
    )
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["cached_tokens"]


def test_a_stream_carries_each_choice_under_its_index(served: Served) -> None:
    fields = {"n": 3, "stream_options": {"include_usage": True}}
    lines, chunks = served.events(asked(**fields))
    assert lines[-1] == "data: [DONE]"
    assert sum(line == "data: [DONE]" for line in lines) == 1
    texts = {0: "", 1: "", 2: ""}
    finished = []
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
    plain = served.post(asked(n=3)).json()
    assert texts == {c["index"]: c["message"]["content"] for c in plain["choices"]}
    assert sorted(finished) == [0, 1, 2]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_an_openai_client_gets_its_choices(served: Served) -> None:
    with served.openai() as client:
        reply = client.chat.completions.create(model=NAME, messages=[user("say it")], n=2)
    assert [choice.message.content for choice in reply.choices] == ["I heard: say it"] * 2


@pytest.mark.parametrize(("n", "limit"), [(0, "1"), (17, "16"), (-1, "1")])
def test_a_number_out_of_range_is_named_with_both(served: Served, n: int, limit: str) -> None:
    error = served.post(asked(n=n)).json()["error"]
    assert error["param"] == "n"
    assert limit in error["message"]
    assert str(n) in error["message"]


@pytest.mark.parametrize("n", [True, 1.0, "2"])
def test_a_number_of_a_wrong_type_is_refused(served: Served, n: object) -> None:
    response = served.post(asked(n=n))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_several_choices_of_a_named_session_are_refused(served: Served) -> None:
    session_id = served.post(asked()).json()["capserve"]["session_id"]
    error = served.post(asked(n=2, session_id=session_id)).json()["error"]
    assert error["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_choice_finds_no_place_all_are_refused_and_cancelled(stream: bool) -> None:
    with serving(fake_engine(), max_queue_depth=2) as served:
        response = served.post(asked(n=8, stream=stream))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        served.worker.wait_idle()
        assert all(item.cancel.cancelled for item in served.worker.items)
        assert served.post(asked()).status_code == 200


def test_when_one_choice_fails_the_reply_is_that_error() -> None:
    engine = fake_engine()
    with serving(engine) as served:
        served.post(asked())
        engine.fail("begin")
        response = served.post(asked(n=3))
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        served.wait_ready()
        engine.fail("begin")
        _, chunks = served.events(asked(n=3))
        assert chunks[-1]["error"]["code"] == "engine_error"
        served.wait_ready()
        assert len(served.post(asked(n=3)).json()["choices"]) == 3


def test_a_client_that_leaves_cancels_every_choice() -> None:
    engine = fake_engine()
    gate = engine.hold("step")
    with serving(engine) as served:
        with served.raw({**asked(n=3), "stream": True}):
            gate.wait_arrived(WAIT_S)
            served.worker.wait_taken(3)
        for item in list(served.worker.items):
            served.worker.wait_cancelled(item)
        gate.open()
        served.worker.wait_idle()
    assert len(served.worker.ends) == 3


def test_a_stream_of_several_choices_is_never_silent() -> None:
    engine = fake_engine()
    gate = engine.hold("step")
    with serving(engine, heartbeat_s=0.05) as served:
        with served.raw({**asked(n=3), "stream": True}) as sock:
            gate.wait_arrived(WAIT_S)
            received = b""
            while received.count(b": keep-alive") < 2:
                received += sock.recv(4096)
            gate.open()
            while b"data: [DONE]" not in received:
                received += sock.recv(65536)
        served.worker.wait_idle()
    assert received.count(b'"finish_reason":"length"') == 3


# -- cache breakpoints -------------------------------------------------------------------------

MARK = {"type": "ephemeral"}


def test_a_marked_message_ends_at_a_boundary_of_its_own(served: Served) -> None:
    documents = [user(f"document {i}: " + "a line of it. " * 30) for i in range(3)]
    marked = {
        "role": "user",
        "content": [{"type": "text", "text": documents[1]["content"], "cache_control": MARK}],
    }
    between = [{"role": "assistant", "content": "I see."}] * 3
    history = [
        m for pair in zip([documents[0], marked, documents[2]], between, strict=True) for m in pair
    ]
    space = {"prompt_cache_key": "breakpoints"}
    served.post({**chat_body([*history, user("one question")]), **space})
    # Another history that parts from the first right behind the marked message.
    parted = [*history[:3], {"role": "assistant", "content": "Quite another view."}, user("and?")]
    again = served.post({**chat_body(parted), **space}).json()["capserve"]
    unmarked = {**space, "prompt_cache_key": "no breakpoints"}
    plain = [documents[0], between[0], documents[1], between[1], documents[2], between[2]]
    served.post({**chat_body([*plain, user("one question")]), **unmarked})
    without = served.post({**chat_body(parted), **unmarked}).json()["capserve"]
    assert again["new_prefill_tokens"] < 40 < without["new_prefill_tokens"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({**user("x"), "cache_control": "ephemeral"}, "messages[0].cache_control"),
        ({**user("x"), "cache_control": {"type": "forever"}}, "messages[0].cache_control.type"),
        (
            user([{"type": "text", "text": "x", "cache_control": 1}]),
            "messages[0].content[0].cache_control",
        ),
    ],
)
def test_a_mark_of_a_wrong_form_is_named(
    served: Served, message: dict[str, Any], param: str
) -> None:
    response = served.post(chat_body([message]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
