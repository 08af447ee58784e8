"""Stored replies: found again, gone on from, deleted, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness import NAME, Replies, Served, fake_engine, serving

from capserve.api.responses_store import ResponseNotFoundError, ResponseStore, Stored, stored

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = Replies()
    replies.say["look around"] = (
        "I should.\n</think>\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>"
    )
    with serving(fake_engine(replies)) as running:
        yield running


def ask(served: Served, sent: Any, **fields: Any) -> dict[str, Any]:
    response = served.http.post(PATH, json={"input": sent, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def prompt_of(served: Served) -> list[int]:
    tokens: list[int] = served.worker.items[-1].request.prompt.tokens.tolist()
    return tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_reply_is_found_again_as_it_was(served: Served, stream: bool) -> None:
    with served.openai() as client:
        if stream:
            with client.responses.stream(model=NAME, input="remember me") as told:
                made = told.get_final_response()
        else:
            made = client.responses.create(model=NAME, input="remember me")
        found = client.responses.retrieve(made.id)
        assert found.output_text == made.output_text == "I heard: remember me"
        assert found.usage == made.usage
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.retrieve(made.id)
        assert gone.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(made.id)


def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    made = ask(served, "forget me", store=False)
    assert served.http.get(f"{PATH}/{made['id']}").status_code == 404


def test_a_follow_up_reads_the_tokens_that_a_client_would_resend(served: Served) -> None:
    first = ask(served, "look around", tools=[LOOK])
    [*_, call] = first["output"]
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "an owl"}
    second = ask(served, [answer], tools=[LOOK], previous_response_id=first["id"])
    by_id = prompt_of(served)
    assert second["capserve"]["prefix_action"] == "message_append"
    history = [{"role": "user", "content": "look around"}, *first["output"], answer]
    ask(served, history, tools=[LOOK], store=False)
    assert prompt_of(served) == by_id
    third = ask(served, "and now?", tools=[LOOK], previous_response_id=second["id"])
    by_id = prompt_of(served)
    history += [*second["output"], {"role": "user", "content": "and now?"}]
    ask(served, history, tools=[LOOK], store=False)
    assert prompt_of(served) == by_id
    assert third["previous_response_id"] == second["id"]


def test_a_follow_up_shares_the_namespace_that_its_reply_had(served: Served) -> None:
    text = "a namespace of its own " * 9
    first = ask(served, text, prompt_cache_key="mine")
    second = ask(served, "go on", previous_response_id=first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 20


def test_instructions_are_not_carried_over(served: Served) -> None:
    first = ask(served, "hi", instructions="Be kind.")
    ask(served, "again", previous_response_id=first["id"])
    roles = [m.role for m in served.worker.items[-1].request.prompt.conversation.messages]
    assert roles == ["user", "assistant", "user"]


def test_an_item_may_be_sent_by_reference(served: Served) -> None:
    first = ask(served, "hi")
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    history = [{"role": "user", "content": "hi"}, *references, {"role": "user", "content": "ho"}]
    ask(served, history)
    by_reference = prompt_of(served)
    ask(served, "ho", previous_response_id=first["id"])
    assert prompt_of(served) == by_reference


def test_input_items_come_in_pages(served: Served) -> None:
    first = ask(served, "one")
    made = ask(served, "two", previous_response_id=first["id"])
    with served.openai() as client:
        newest = client.responses.input_items.list(made["id"])
        texts = [item.type for item in newest]
        assert texts == ["message", "message", "reasoning", "message"]
        paged = list(client.responses.input_items.list(made["id"], order="asc", limit=1))
    assert [item.id for item in paged] == [item.id for item in newest][::-1]
    for query, param in [("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")]:
        response = served.http.get(f"{PATH}/{made['id']}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_another_caller_finds_nothing() -> None:
    with serving(fake_engine(), api_keys=("one", "two")) as served:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = served.http.post(PATH, json={"input": "hi"}, headers=mine).json()
        item = {"type": "item_reference", "id": made["output"][0]["id"]}
        follow = {"input": "go on", "previous_response_id": made["id"]}
        for headers, status in ((yours, 404), (mine, 200)):
            got = served.http.get(f"{PATH}/{made['id']}", headers=headers)
            listed = served.http.get(f"{PATH}/{made['id']}/input_items", headers=headers)
            followed = served.http.post(PATH, json=follow, headers=headers)
            refers = [item, {"role": "user", "content": "and?"}]
            referred = served.http.post(PATH, json={"input": refers}, headers=headers)
            codes = {r.status_code for r in (got, listed, followed, referred)}
            assert codes == {status}
            if status == 404:
                assert followed.json()["error"]["param"] == "previous_response_id"
                assert referred.json()["error"]["param"] == "input[0].id"
                assert served.http.delete(f"{PATH}/{made['id']}", headers=headers).is_error


def reply(number: int, nbytes: int = 0) -> Stored:
    body = {"id": f"resp_{number}", "output": [{"id": f"msg_{number}"}], "pad": "x" * nbytes}
    return stored(body, b"[]")


def test_the_least_recently_used_reply_makes_room() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(3):
        store.put("me", reply(number))
    store.get("me", "resp_0")
    store.put("me", reply(3))
    assert [n for n in range(4) if _has(store, n)] == [0, 2, 3]
    with pytest.raises(ResponseNotFoundError):
        store.item("me", "msg_1", "input[0].id")
    assert store.item("me", "msg_0", "input[0].id") == {"id": "msg_0"}


def test_bytes_are_bounded_and_counted_to_the_last_one() -> None:
    store = ResponseStore(max_bytes=1000)
    for number in range(9):
        store.put("me", reply(number, 200))
        replies, nbytes = store.footprint("me")
        assert nbytes <= 1000
        assert nbytes == sum(
            store.get("me", f"resp_{n}").nbytes for n in range(9) if _has(store, n)
        )
    assert replies == 3
    store.put("me", reply(99, 2000))
    assert not _has(store, 99)
    for number in range(9):
        if _has(store, number):
            store.delete("me", f"resp_{number}")
    assert store.footprint("me") == (0, 0)


def test_callers_do_not_push_each_other_out() -> None:
    store = ResponseStore(max_responses=2)
    store.put("me", reply(0))
    for number in range(1, 5):
        store.put("you", reply(number))
    assert _has(store, 0)


def _has(store: ResponseStore, number: int) -> bool:
    try:
        store.get("me", f"resp_{number}")
    except ResponseNotFoundError:
        return False
    return True
