"""What comes through the pipe or the command line may be no text: the chat goes on."""

from __future__ import annotations

import io
import json
import sys

import httpx2
import pytest
from rich.console import Console

from capserve.cli.chat import questions
from capserve.cli.client import ChatClient, ChatError

NOT_UTF8 = b"\xff\xfe"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"], ids=["UTF-8 locale", "C locale"])
def test_a_piped_line_that_is_no_text_is_a_question_like_any(
    monkeypatch: pytest.MonkeyPatch, errors: str
):
    pipe = io.BytesIO(NOT_UTF8 + b"\nhi\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe, "utf-8", errors))
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8")
    lines = [line.strip() for line in questions(Console(file=shown))]
    assert lines == ["\ufffd\ufffd", "hi"]


def test_a_system_prompt_that_is_no_text_can_be_sent():
    asked: list[str] = []

    def refuse(request: httpx2.Request) -> httpx2.Response:
        asked.extend(m["content"] for m in json.loads(request.content)["messages"])
        return httpx2.Response(400, json={"error": {"message": "no"}})

    argument = (b"Be " + NOT_UTF8).decode("utf-8", "surrogateescape")  # as sys.argv brings it
    client = ChatClient("http://test/v1", system=argument, transport=httpx2.MockTransport(refuse))
    with pytest.raises(ChatError, match="400: no"):
        list(client.ask("nano", argument))
    assert asked == ["Be ??", "Be ??"]
