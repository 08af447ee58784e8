"""Sessions over HTTP: named, listed, forked, cut back, pinned, dropped, carried, revived."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import (
    NAME,
    WAIT_S,
    Replies,
    Served,
    chat_body,
    fake_engine,
    serving,
    spelled,
    tokenizer,
    user,
)

from capserve.api import file_stream
from capserve.api.auth import KeyRing
from capserve.errors import ConflictError
from capserve.serving.sessions.orders import DeleteSession, Exported, ExportSession, UndoSession
from capserve.text.markup import EMPTY_THINK

SYSTEM = {"role": "system", "content": "You count sheep, one by one, and say so. " * 8}
QUIET = {"enable_thinking": False}
TAR = {"content-type": "application/x-tar"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


def begin(served: Served, word: str, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """A session of one turn: its id and its messages. Without thinking, which the template would
    drop from the history."""
    messages = [SYSTEM, user(word)]
    body = served.post({**chat_body(messages), **QUIET, **fields}).json()
    return body["capserve"]["session_id"], [*messages, body["choices"][0]["message"]]


def goes_on(served: Served, session_id: str, word: str, **fields: Any) -> dict[str, Any]:
    response = served.post({**chat_body([user(word)]), "session_id": session_id, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def at(served: Served, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    url = f"/v1/sessions{path}"
    return served.http.get(url) if body is None else served.http.post(url, json=body)


def shown(served: Served, session_id: str) -> dict[str, Any]:
    response = at(served, f"/{session_id}")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def ids_of(served: Served) -> list[str]:
    return [session["id"] for session in at(served, "").json()["data"]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def prompt_of(body: dict[str, Any]) -> list[int]:
    ids: list[int] = body["choices"][0].get("prompt_token_ids") or body["prompt_token_ids"]
    return ids


# -- a chat that names its session -------------------------------------------------------------


def test_new_messages_alone_go_on_where_the_session_stands(served: Served) -> None:
    session_id, messages = begin(served, "first")
    body = goes_on(served, session_id, "second")
    assert body["choices"][0]["message"]["content"] == "I heard: second"
    assert body["capserve"]["session_id"] == session_id
    assert body["capserve"]["prefix_action"] in ("append", "message_append")
    assert shown(served, session_id)["messages"] == len(messages) + 2
    # The same prompt as a client sends it that keeps the history.
    whole = served.post({**chat_body([*messages, user("second")]), **QUIET}).json()
    assert whole["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]


def test_a_whole_history_with_the_sessions_id_is_not_put_behind_itself(served: Served) -> None:
    session_id, messages = begin(served, "whole history")
    sent = {**chat_body([*messages, user("and now")]), "session_id": session_id}
    body = served.post(sent).json()
    assert body["capserve"]["session_id"] == session_id
    assert shown(served, session_id)["messages"] == len(messages) + 2


@pytest.mark.parametrize(
    ("turns", "edited"),
    [
        (2, [user("EDITED")]),
        (2, [user("EDITED"), {"role": "assistant", "content": "edited, too"}, user("go on")]),
        (1, [user("EDITED"), {"role": "assistant", "content": "edited, too"}, user("go on")]),
    ],
)
def test_an_edited_history_is_what_it_says_whatever_the_session_had(
    served: Served, turns: int, edited: list[dict[str, Any]]
) -> None:
    session_id, _ = begin(served, "to be edited")
    for _ in range(turns - 1):
        goes_on(served, session_id, "another turn")
    sent = {**chat_body([SYSTEM, *edited]), **QUIET, "return_token_ids": True}
    named = served.post(sent | {"session_id": session_id})
    assert named.status_code == 200, named.text
    assert named.json()["capserve"]["session_id"] == session_id
    cold = served.post(sent | {"prompt_cache_key": "cold"}).json()
    assert prompt_of(named.json()) == prompt_of(cold)


def test_a_cancelled_edit_leaves_the_session_as_its_client_knows_it() -> None:
    replies = Replies()
    replies.say = {"more": "long words " * 60}
    engine = fake_engine(replies)
    with serving(engine) as served:
        session_id, messages = begin(served, "one")
        _, others = begin(served, "OTHER")
        gate = engine.hold("step", 2)
        before = len(served.worker.items)
        sent = {**chat_body([*others, user("more")]), **QUIET, "session_id": session_id}
        with served.raw({**sent, "stream": True}):
            gate.wait_arrived()
        served.worker.wait_cancelled(served.worker.wait_taken(before + 1))
        gate.open()
        served.worker.wait_idle()
        ends = {b["messages"] for b in shown(served, session_id)["boundaries"]}
        assert ends <= {None}, "places where messages of another conversation end"
        fork = at(served, f"/{session_id}/fork", {"turns": 0}).json()["data"][0]["id"]
        assert shown(served, fork)["messages"] == len(messages)
        body = goes_on(served, fork, "go on", return_token_ids=True)
        whole = {**chat_body([*messages, user("go on")]), **QUIET, "return_token_ids": True}
        assert prompt_of(body) == prompt_of(served.post(whole).json())
        assert spelled(prompt_of(body)).count("OTHER") == 0


def test_an_openai_client_continues_a_session_with_an_extra_field(served: Served) -> None:
    with served.openai() as client:
        first = client.chat.completions.create(model=NAME, messages=[user("hello sdk")])
        session_id = first.model_dump()["capserve"]["session_id"]
        reply = client.chat.completions.create(
            model=NAME, messages=[user("once more")], extra_body={"session_id": session_id}
        )
    assert reply.choices[0].message.content == "I heard: once more"
    assert reply.model_dump()["capserve"]["session_id"] == session_id


def test_tools_and_switches_stay_as_the_session_had_them(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    session_id, _ = begin(served, "with tools", tools=[tool], enable_thinking=False)
    body = goes_on(served, session_id, "again")
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["capserve"]["new_prefill_tokens"] < 40


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_session_is_a_404_that_names_the_field(served: Served, stream: bool) -> None:
    body = {**chat_body([user("x")]), "session_id": "nobody", "stream": stream}
    error = error_of(served.post(body), 404)
    assert (error["code"], error["param"]) == ("session_not_found", "session_id")
    assert served.post(chat_body([user("next")])).status_code == 200


def test_another_cache_key_than_the_sessions_is_refused(served: Served) -> None:
    session_id, _ = begin(served, "keyed", prompt_cache_key="mine")
    assert goes_on(served, session_id, "more", prompt_cache_key="mine")
    refused = served.post(
        {**chat_body([user("x")]), "session_id": session_id, "prompt_cache_key": "yours"}
    )
    assert error_of(refused, 400)["param"] == "prompt_cache_key"


@pytest.mark.parametrize("value", [7, "", "x" * 129, True])
def test_a_session_id_of_a_wrong_form_is_a_400(served: Served, value: object) -> None:
    error = error_of(served.post({**chat_body([user("x")]), "session_id": value}), 400)
    assert error["param"] == "session_id"


# -- what can be asked of sessions -------------------------------------------------------------


def test_a_session_shows_its_boundaries_and_a_list_does_not(served: Served) -> None:
    session_id, messages = begin(served, "show me")
    session = shown(served, session_id)
    assert session["object"] == "session"
    assert (session["turns"], session["messages"]) == (1, len(messages))
    kinds = [boundary["kind"] for boundary in session["boundaries"]]
    assert kinds[-2:] == ["prompt_end", "turn_end"]
    newest = session["boundaries"][-1]
    assert newest["tier"] == "host"
    assert 0 < newest["exclusive_bytes"] <= newest["bytes"]
    page = at(served, "?limit=1").json()
    assert page["data"][0]["id"] == session_id
    assert "boundaries" not in page["data"][0]
    after = at(served, f"?limit=1&after={session_id}").json()
    assert after["data"][0]["id"] != session_id


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "9" * 5000])
def test_a_bad_page_size_is_a_400_that_names_it(served: Served, limit: str) -> None:
    assert error_of(at(served, f"?limit={limit}"), 400)["param"] == "limit"


def test_forks_go_their_own_ways_from_one_boundary(served: Served) -> None:
    session_id, messages = begin(served, "branch point")
    done = at(served, f"/{session_id}/fork", {"n": 3})
    assert done.status_code == 201
    forks = [session["id"] for session in done.json()["data"]]
    assert len({*forks, session_id}) == 4
    for fork in forks:
        body = goes_on(served, fork, f"way {fork[:4]}")
        assert body["capserve"]["session_id"] == fork
        assert body["capserve"]["new_prefill_tokens"] < 30
        assert shown(served, fork)["parent_id"] == session_id
        assert shown(served, fork)["messages"] == len(messages) + 2
    assert shown(served, session_id)["messages"] == len(messages)


@pytest.mark.parametrize("thinking", [False, True])
def test_an_undone_turn_is_as_if_it_had_never_been(served: Served, thinking: bool) -> None:
    session_id, messages = begin(served, f"keep this {thinking}", enable_thinking=thinking)
    goes_on(served, session_id, "forget this")
    done = at(served, f"/{session_id}/undo", {}).json()
    assert (done["removed_turns"], done["messages"]) == (1, len(messages))
    body = goes_on(served, session_id, "something else")
    fresh = served.post(
        {
            **chat_body([*messages, user("something else")]),
            "prompt_cache_key": "cold",
            "enable_thinking": thinking,
        }
    ).json()
    # A journal keeps the empty think block that the template shows no longer.
    hidden = 0 if thinking else len(tokenizer().encode(EMPTY_THINK))
    assert body["usage"]["prompt_tokens"] == fresh["usage"]["prompt_tokens"] + hidden
    assert body["capserve"]["new_prefill_tokens"] < 30


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("undo", {"turns": 9}, "turns"),
        ("undo", {"turns": 0}, "turns"),
        ("undo", {"turns": 1, "boundary": 5}, "boundary"),
        ("undo", {"boundary": 3}, "boundary"),
        ("undo", {"boundary": "3"}, "boundary"),
        ("fork", {"n": 0}, "n"),
        ("fork", {"n": 65}, "n"),
        ("fork", {"n": 2.0}, "n"),
        ("fork", {"boundary": 3}, "boundary"),
        ("pin", {"boundary": 3}, "boundary"),
        ("pin", {"pinned": "yes"}, "pinned"),
    ],
)
def test_a_bad_field_is_named_and_the_session_stays(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    session_id, messages = begin(served, "stays as it is")
    assert error_of(at(served, f"/{session_id}/{path}", body), 400)["param"] == param
    assert shown(served, session_id)["messages"] == len(messages)


def test_a_body_that_is_no_json_is_refused_as_everywhere(served: Served) -> None:
    session_id, _ = begin(served, "json only")
    url = f"/v1/sessions/{session_id}/undo"
    assert served.http.post(url).status_code == 415
    headers = {"content-type": "application/json"}
    assert served.http.post(url, content=b"{", headers=headers).status_code == 400


def test_a_pin_shows_and_is_released(served: Served) -> None:
    session_id, _ = begin(served, "pin me")
    done = at(served, f"/{session_id}/pin", {}).json()
    assert done == {"id": session_id, "position": done["position"], "pinned": True}
    assert shown(served, session_id)["boundaries"][-1]["pinned"]
    at(served, f"/{session_id}/pin", {"boundary": done["position"], "pinned": False})
    assert not shown(served, session_id)["boundaries"][-1]["pinned"]


def test_a_deleted_session_is_gone_for_every_route(served: Served) -> None:
    session_id, _ = begin(served, "delete me")
    done = served.http.delete(f"/v1/sessions/{session_id}").json()
    assert done["deleted"] is True
    for response in (
        at(served, f"/{session_id}"),
        at(served, f"/{session_id}/fork", {}),
        at(served, f"/{session_id}/export"),
        served.http.delete(f"/v1/sessions/{session_id}"),
        served.post({**chat_body([user("x")]), "session_id": session_id}),
    ):
        assert error_of(response, 404)["code"] == "session_not_found"


def test_one_key_never_sees_anothers_sessions() -> None:
    with serving(fake_engine(), api_keys=("alpha", "beta")) as served:
        alpha, beta = ({"authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
        body = served.post(chat_body([user("secret")]), headers=alpha).json()
        session_id = body["capserve"]["session_id"]
        url = f"/v1/sessions/{session_id}"
        assert served.http.get(url, headers=alpha).status_code == 200
        http = served.http
        for response in (
            http.get(url, headers=beta),
            http.delete(url, headers=beta),
            http.get(f"{url}/export", headers=beta),
            http.post(f"{url}/fork", headers=beta, json={}),
            http.post(f"{url}/undo", headers=beta, json={}),
            http.post(f"{url}/pin", headers=beta, json={}),
            served.post({**chat_body([user("x")]), "session_id": session_id}, headers=beta),
        ):
            assert error_of(response, 404)["code"] == "session_not_found"
        assert http.get("/v1/sessions", headers=beta).json()["data"] == []
        assert http.get("/v1/sessions").status_code == 401
        salted = {**chat_body([user("behind a wall")]), "cache_salt": "pepper"}
        hidden = served.post(salted, headers=alpha).json()["capserve"]["session_id"]
        listed = http.get("/v1/sessions", headers=alpha).json()["data"]
        assert [session["id"] for session in listed] == [session_id]
        behind = http.get("/v1/sessions?cache_salt=pepper", headers=alpha).json()["data"]
        assert [session["id"] for session in behind] == [hidden]


@pytest.mark.parametrize("order", [UndoSession, DeleteSession, ExportSession])
def test_a_session_with_a_running_turn_can_not_be_cut(order: type[Any]) -> None:
    engine = fake_engine()
    with serving(engine) as served:
        session_id, _ = begin(served, "busy soon")
        gate = engine.hold("extend")
        body = {**chat_body([user("long")]), "session_id": session_id, "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            gate.wait_arrived(WAIT_S)
            future = served.worker.order(order(KeyRing(()).caller(None), session_id))
            gate.open()
            assert isinstance(future.exception(WAIT_S), ConflictError)
            response.read()
        assert shown(served, session_id)["turns"] == 2


def test_an_export_of_what_lies_on_disk_leaves_it_there(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(fake_engine(), capsule_dir=store) as served:
        session_id, _ = begin(served, "on disk")
        assert served.disk is not None
        assert served.disk.flush(WAIT_S)
        here = exported(served, session_id, "?include=all")
    with serving(fake_engine(), capsule_dir=store) as served:
        before = shown(served, session_id)["boundaries"]
        assert {boundary["tier"] for boundary in before} == {"disk"}
        assert len(exported(served, session_id, "?include=all")) == len(here)
        assert shown(served, session_id)["boundaries"] == before


def test_one_file_goes_out_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, _ = begin(served, "two readers")
    begun, go_on = threading.Event(), threading.Event()
    real = file_stream.pieces

    def waits(found: Exported) -> Iterator[bytes | memoryview]:
        begun.set()
        assert go_on.wait(WAIT_S)
        yield from real(found)

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(file_stream, "pieces", waits)
        first = pool.submit(exported, served, session_id)
        assert begun.wait(WAIT_S)
        try:
            error = error_of(at(served, f"/{session_id}/export"), 429)
        finally:
            go_on.set()
        assert error["code"] == "queue_full"
        assert len(first.result(WAIT_S)) > 1024
    assert exported(served, session_id)
    assert error_of(at(served, "/nobody/export"), 404)
    assert exported(served, session_id), "a refused export keeps nobody waiting"


# -- from one server to another ----------------------------------------------------------------


def exported(served: Served, session_id: str, query: str = "") -> bytes:
    response = at(served, f"/{session_id}/export{query}")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-tar"
    return response.content


def imported(served: Served, file: bytes, query: str = "") -> httpx.Response:
    return served.http.post(f"/v1/sessions/import{query}", content=file, headers=TAR)


@pytest.mark.parametrize("query", ["", "?include=all"])
def test_a_session_goes_on_in_another_server_without_reading_it_again(
    served: Served, query: str
) -> None:
    session_id, _ = begin(served, "carry me")
    goes_on(served, session_id, "over there")
    file = exported(served, session_id, query)
    with serving(fake_engine()) as other:
        done = imported(other, file)
        assert done.status_code == 201, done.text
        body = done.json()
        assert body["refused"] is None
        assert body["capsules"] == (
            1 if not query else len(shown(served, session_id)["boundaries"])
        )
        assert (body["id"] == session_id, body["turns"]) == (False, 2)
        there = goes_on(other, body["id"], "are you the same")
        assert there["capserve"]["new_prefill_tokens"] < 30
        here = goes_on(served, session_id, "are you the same")
        assert there["choices"][0]["message"] == here["choices"][0]["message"]
        assert there["usage"]["prompt_tokens"] == here["usage"]["prompt_tokens"]


def test_a_torn_or_foreign_file_is_one_clear_400_and_leaves_nothing(served: Served) -> None:
    session_id, _ = begin(served, "torn")
    file = exported(served, session_id)
    before = ids_of(served)
    flipped = bytearray(file)
    flipped[file.index(b"parts/") + 700] ^= 1
    for bad in (b"", b"not a tar", file[: len(file) // 2], bytes(flipped)):
        assert error_of(imported(served, bad), 400)["code"] == "bad_capsule"
    assert ids_of(served) == before
    assert served.http.post("/v1/sessions/import", content=file).status_code == 415
    served.store.check()
    assert imported(served, file).status_code == 201


def with_session(file: bytes, **change: Any) -> bytes:
    """The file with other values in session.json, and right checksums."""
    with tarfile.open(fileobj=io.BytesIO(file), mode="r:") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    files["session.json"] = json.dumps(json.loads(files["session.json"]) | change).encode()
    del files["checksums.json"]
    sums = {name: sha256(content).hexdigest() for name, content in files.items()}
    files["checksums.json"] = json.dumps(sums).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("talk", "param"),
    [
        ({"messages": []}, "messages"),
        ({"tools": [{"a": 1}]}, "tools[0].type"),
        ({"template_kwargs": {"messages": [1]}}, "chat_template_kwargs"),
        ({"template_kwargs": {"tools": 3}}, "chat_template_kwargs"),
    ],
)
def test_a_file_that_no_request_could_have_led_to_is_a_400_that_names_why(
    served: Served, talk: dict[str, Any], param: str
) -> None:
    session_id, _ = begin(served, "odd file")
    before = ids_of(served)
    whole = {"messages": TALK, "tools": [], "template_kwargs": None} | talk
    file = with_session(
        exported(served, session_id), turns=[], marks=[], conversation=json.dumps(whole)
    )
    assert error_of(imported(served, file), 400)["param"] == param
    assert ids_of(served) == before


def test_a_turn_without_messages_is_a_400(served: Served) -> None:
    session_id, _ = begin(served, "no turn")
    file = with_session(exported(served, session_id), turns=[[2, 0]])
    assert error_of(imported(served, file), 400)["code"] == "bad_capsule"


def test_parts_under_each_others_names_are_refused_by_the_engine(served: Served) -> None:
    session_id, _ = begin(served, "swapped")
    with tarfile.open(fileobj=io.BytesIO(exported(served, session_id))) as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    one, other = [name for name in files if name.startswith("parts/")][:2]
    files[one], files[other] = files[other], files[one]
    del files["checksums.json"]
    sums = {name: sha256(content).hexdigest() for name, content in files.items()}
    files["checksums.json"] = json.dumps(sums).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    before = ids_of(served)
    # In another namespace, where no state of these tokens is there already.
    refused = imported(served, out.getvalue(), "?prompt_cache_key=elsewhere")
    assert error_of(refused, 400)["code"] == "bad_capsule"
    assert ids_of(served) == before
    assert served.http.get("/health").json()["faults"] == 0
    served.store.check()


def test_a_file_over_the_limit_is_a_413_before_it_is_read() -> None:
    with serving(fake_engine(), max_import_bytes=10_000) as served:
        message = error_of(imported(served, b"x" * 20_000), 413)["message"]
        assert "20000" in message
        assert "10000" in message
        # Without a declared length, too.
        pieces = iter([b"x" * 6_000, b"x" * 6_000])
        response = served.http.post("/v1/sessions/import", content=pieces, headers=TAR)
        assert error_of(response, 413)["code"] == "request_too_large"


# -- a restart ---------------------------------------------------------------------------------


def test_after_a_restart_a_session_goes_on_from_disk(tmp_path: Path) -> None:
    with serving(fake_engine(), capsule_dir=tmp_path) as before:
        session_id, messages = begin(before, "remember")
        body = goes_on(before, session_id, "me")
        messages += [user("me"), body["choices"][0]["message"]]
        assert before.disk is not None
        assert before.disk.flush(WAIT_S)
        old = shown(before, session_id)
        assert all(boundary["durable"] for boundary in old["boundaries"])
    with serving(fake_engine(), capsule_dir=tmp_path) as after:
        back = shown(after, session_id)
        assert (back["tokens"], back["turns"]) == (old["tokens"], 2)
        assert {boundary["tier"] for boundary in back["boundaries"]} == {"disk"}
        body = goes_on(after, session_id, "still there")
        assert body["capserve"]["restored_from"] == "disk"
        assert body["capserve"]["new_prefill_tokens"] < 30
        assert body["capserve"]["session_id"] == session_id


def test_after_a_restart_a_resent_history_takes_over_its_own_tokens(tmp_path: Path) -> None:
    replies = Replies()
    replies.say["odd"] = "A  reply that  no tokenizer would spell like this"
    with serving(fake_engine(replies), capsule_dir=tmp_path) as before:
        _, messages = begin(before, "odd")
    with serving(fake_engine(replies), capsule_dir=tmp_path) as after:
        body = after.post({**chat_body([*messages, user("next")]), **QUIET}).json()
        assert body["capserve"]["prefix_action"] == "restore"
        assert body["capserve"]["restored_from"] == "disk"
        assert body["capserve"]["new_prefill_tokens"] < 30
        assert body["capserve"]["miss_reason"] is None


def test_a_deleted_session_does_not_come_back(tmp_path: Path) -> None:
    with serving(fake_engine(), capsule_dir=tmp_path) as before:
        session_id, _ = begin(before, "delete for good")
        kept, _ = begin(before, "keep for good")
        before.http.delete(f"/v1/sessions/{session_id}")
    with serving(fake_engine(), capsule_dir=tmp_path) as after:
        assert ids_of(after) == [kept]


def test_sessions_that_were_idle_for_too_long_stay_away(tmp_path: Path) -> None:
    with serving(fake_engine(), capsule_dir=tmp_path) as before:
        begin(before, "old")
    with serving(fake_engine(), capsule_dir=tmp_path, session_idle_ttl_s=1e-9) as after:
        assert at(after, "").json()["data"] == []
