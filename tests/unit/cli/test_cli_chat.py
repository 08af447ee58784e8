"""The terminal chat keeps exactly the history that a next turn must resend."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from rich.console import Console

from capserve.cli.chat import converse
from capserve.cli.client import ChatClient, ChatError, Piece, TurnReport

Answer = Callable[[dict[str, Any]], httpx2.Response]


def stream(*chunks: dict[str, Any] | str) -> httpx2.Response:
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    body = ": keep-alive\n\n" + "".join(f"data: {line}\n\n" for line in lines)
    return httpx2.Response(200, text=body, headers={"content-type": "text/event-stream"})


def delta(finish: str | None = None, **parts: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": finish}]}


def reply(text: str, reasoning: str = "") -> httpx2.Response:
    cut = len(text) // 2
    usage = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 12}}
    metrics = {"prefix_action": "append", "first_delta_ms": 41.0, "decode_tok_per_s": 99.7}
    return stream(
        delta(role="assistant"),
        *([delta(reasoning_content=reasoning)] if reasoning else []),
        delta(content=text[:cut]),
        delta(content=text[cut:]),
        delta("stop") | {"capserve": metrics},
        {"choices": [], "usage": usage},
        "[DONE]",
    )


class Server:
    """Answers in order and keeps what was asked."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def client(self, **options: Any) -> ChatClient:
        return ChatClient("http://test/v1", transport=httpx2.MockTransport(self._answer), **options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "nano"}]})
        self.asked.append(json.loads(request.content))
        return self.answers.pop(0)


def talk(client: ChatClient, *lines: str) -> tuple[int, str]:
    out = io.StringIO()
    code = converse(client, "nano", Console(file=out, width=200, highlight=False), iter(lines))
    return code, out.getvalue()


def test_a_finished_turn_is_resent_with_its_reasoning() -> None:
    server = Server(reply("Hello!", "A greeting."), reply("Fine."))
    code, out = talk(server.client(system="Be brief."), "Hi", "How are you?")
    assert code == 0
    assert server.asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
        {"role": "user", "content": "How are you?"},
    ]
    assert "Hello!" in out
    assert "reused 12 of 20 prompt tokens (append), first token 41 ms, 100 tok/s" in out


def test_undo_takes_one_turn_back_and_reset_all_of_them() -> None:
    server = Server(reply("one"), reply("two"), reply("three"), reply("four"))
    client = server.client(system="S")
    talk(client, "1", "2", "/undo", "3")
    assert [m["content"] for m in server.asked[2]["messages"]] == ["S", "1", "one", "3"]
    talk(client, "/reset", "4")
    assert [m["content"] for m in server.asked[3]["messages"]] == ["S", "4"]


def test_undo_of_an_empty_conversation_says_so() -> None:
    code, out = talk(Server().client(), "/undo")
    assert code == 0
    assert "nothing to undo" in out


def test_quit_asks_no_more_and_unknown_commands_are_not_sent() -> None:
    server = Server()
    code, out = talk(server.client(), "/help", "", "/quit", "not asked")
    assert code == 0
    assert server.asked == []
    assert "/help" in out


def test_a_refusal_is_shown_and_leaves_the_history_as_it_was() -> None:
    refusal = httpx2.Response(429, json={"error": {"message": "4 turns wait, 4 may"}})
    server = Server(refusal, reply("ok"))
    code, out = talk(server.client(), "Hi", "Again")
    assert code == 1
    assert "429: 4 turns wait, 4 may" in out
    assert [m["content"] for m in server.asked[1]["messages"]] == ["Again"]


@pytest.mark.parametrize(
    "broken",
    [
        stream(delta(content="Hel"), {"error": {"message": "the engine failed"}}),
        stream(delta(content="Hel")),
    ],
    ids=["error event", "stream that just ends"],
)
def test_a_broken_stream_never_enters_the_history(broken: httpx2.Response) -> None:
    client = Server(broken).client()
    with pytest.raises(ChatError):
        list(client.ask("nano", "Hi"))
    assert client.messages == []


def test_a_reply_that_is_stopped_half_way_never_enters_the_history() -> None:
    client = Server(reply("Hello!")).client()
    pieces = client.ask("nano", "Hi")
    assert next(pieces) == Piece("Hel")
    pieces.close()
    assert client.messages == []


def test_markup_in_a_reply_is_printed_as_it_is() -> None:
    _, out = talk(Server(reply("[bold]x[/bold] [/]")).client(), "Hi")
    assert "[bold]x[/bold] [/]" in out


def test_thinking_and_the_key_reach_the_server() -> None:
    server = Server(reply("ok"))
    talk(server.client(thinking=False, key="k"), "Hi")
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_server_of_another_kind_gets_a_plain_line() -> None:
    assert TurnReport("length").line() == "reused 0 of 0 prompt tokens, ended: length"


def test_no_server_is_a_clear_error() -> None:
    client = ChatClient("http://127.0.0.1:9/v1")
    with pytest.raises(ChatError, match=r"127\.0\.0\.1:9"):
        client.model()
