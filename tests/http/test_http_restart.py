"""An agent's conversation outlives its server, whether that is stopped or killed.

The client is the openai SDK; it sends tool calls back without the reasoning that led to them. The
turn after the restart says what a server says that was never disturbed, and reads no more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.process import ServerProcess, server_process

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]
SYSTEM = "You are a careful assistant. Use a tool where one fits. Answer in one or two sentences."
FIRST: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Read notes.txt and tell me what it says."},
]
NEXT = {"role": "user", "content": "What is 12 times 7?"}

pytestmark = pytest.mark.slow


class Agent:
    """A client of one conversation."""

    def __init__(self) -> None:
        self.messages = list(FIRST)
        self.replies: list[dict[str, Any]] = []

    def ask(self, server: ServerProcess) -> dict[str, Any]:
        """The next reply, which is taken into the history without its reasoning; a call gets its
        result."""
        with server.openai() as client:
            made = client.chat.completions.create(
                model="nano",
                messages=self.messages,
                tools=TOOLS,
                temperature=0.0,
                max_tokens=200,
                logprobs=True,
                # Else the template drops the thoughts before the newest words of the user.
                extra_body={"chat_template_kwargs": {"preserve_thinking": True}},
            )
        reply = made.model_dump()
        message = made.choices[0].message
        self.replies.append(reply)
        echoed: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            echoed["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        self.messages.append(echoed)
        for call in message.tool_calls or ():
            text = "The meeting is on Tuesday at 10."
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return reply

    def begin(self, server: ServerProcess) -> str:
        """A call, its result, and what the model makes of it. The session's id."""
        called, answered = self.ask(server), self.ask(server)
        message = called["choices"][0]["message"]
        assert message["tool_calls"], "nano calls the tool"
        assert message["reasoning_content"], "nano reasons"
        assert called["capserve"]["session_id"] == answered["capserve"]["session_id"]
        self.messages.append(NEXT)
        session_id: str = answered["capserve"]["session_id"]
        return session_id


def said(reply: dict[str, Any]) -> list[str]:
    """The tokens."""
    return [token["token"] for token in reply["choices"][0]["logprobs"]["content"]]


def thought(reply: dict[str, Any]) -> tuple[Any, ...]:
    message = reply["choices"][0]["message"]
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message.get("tool_calls") or ()
    ]
    return message["content"], message.get("reasoning_content"), calls


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The replies of a server that lives through the whole conversation."""
    agent = Agent()
    with server_process(tmp_path_factory.mktemp("undisturbed")) as server:
        agent.begin(server)
        agent.ask(server)
    return agent.replies


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_conversation_goes_on_after_its_server_was_stopped_or_killed(
    end: Literal["stopped", "killed"], undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    agent = Agent()
    with server_process(tmp_path) as server:
        session_id = agent.begin(server)
        if end == "stopped":
            server.terminate()
        else:
            server.wait_durable(session_id)
            server.kill()
    with server_process(tmp_path) as server:
        reply = agent.ask(server)
    assert [said(reply) for reply in agent.replies] == [said(reply) for reply in undisturbed]
    assert [thought(reply) for reply in agent.replies] == [thought(r) for r in undisturbed]
    cost, usual = reply["capserve"], undisturbed[-1]["capserve"]
    assert cost["restored_from"] == "disk"
    assert cost["session_id"] == session_id
    assert usual["restored_from"] is None, "the undisturbed state was hot"
    assert usual["prefix_action"] == "message_append"
    assert cost["new_prefill_tokens"] == usual["new_prefill_tokens"] < 40
    assert reply["usage"]["prompt_tokens"] == undisturbed[-1]["usage"]["prompt_tokens"]
