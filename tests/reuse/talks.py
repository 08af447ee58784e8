"""What do clients do to a conversation between two requests?

A `Talk` is the client's own list of messages. Its moves are those that agents make: the next turn
(a tool's result where a tool was called), an edit, a branch, the same request again, a reply that
is to go on. Nothing here knows of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from capserve.text.messages import Conversation, Message, ToolCall

TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for name, description, argument in (
        ("calculate", "Evaluate an arithmetic expression.", "expression"),
        ("read_file", "Read a file.", "path"),
    )
)

SYSTEM = "You are a careful assistant. Use a tool where one fits. Answer in one or two sentences."

LISTING = "\n".join(
    f"def step_{i}(value, limit={i}):\n    return min(value + {i * 3}, limit * {i + 2})"
    for i in range(8)
)

WORDS = (
    "What is 12 times 7?",
    "Read notes.txt and tell me what it says.",
    "What is the capital of France?",
    "Write a function that adds two numbers.",
    f"What does the third function do?\n\n{LISTING}",
    f"Here is stats.py. Is there a bug in it?\n\n{LISTING}\n\n{LISTING[:300]}",
)

RESULTS = ("84", "The meeting is on Tuesday at 10.", "error: no such file", LISTING)


@dataclass
class Talk:
    system: str = SYSTEM
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    preserve: bool = False
    messages: list[Message] = field(default_factory=list)

    def conversation(self, *, thinking: bool | None = None) -> Conversation:
        switches: dict[str, Any] = {
            "enable_thinking": self.thinking if thinking is None else thinking
        }
        if self.preserve:
            switches["preserve_thinking"] = True
        head = (Message("system", self.system),) if self.system else ()
        return Conversation((*head, *self.messages), self.tools, switches)

    def branch(self) -> Talk:
        return replace(self, messages=list(self.messages))

    @property
    def answered(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def heard(self, reply: Message, *, loses: bool) -> None:
        """Take the reply into the history; `loses`: as clients do that keep only what they need."""
        self.messages.append(as_echoed(reply) if loses else reply)

    def say(self, words: str, result: str) -> None:
        """The next turn: a result for each call of the last reply, else a person's words.

        A request that got no answer is not built upon: it is sent again as it is.
        """
        if self.messages and not self.answered:
            return
        calls = self.messages[-1].tool_calls if self.messages else ()
        if calls:
            self.messages += [Message("tool", result, tool_call_id=call.id) for call in calls]
        else:
            self.messages.append(Message("user", words))

    def edit(self, back: int, words: str) -> None:
        """Replace the `back`-th last message of a person, and forget what followed it."""
        asked = [i for i, message in enumerate(self.messages) if message.role == "user"]
        if asked:
            del self.messages[asked[-min(back, len(asked))] :]
        self.messages.append(Message("user", words))

    def take_back_reply(self) -> None:
        """Ready to send the same request again."""
        if self.answered:
            self.messages.pop()

    @property
    def may_go_on(self) -> bool:
        """The last reply is words that a client can ask to be continued."""
        return (
            self.answered
            and bool(self.messages[-1].content.strip())
            and not (self.messages[-1].tool_calls)
        )


def as_echoed(reply: Message) -> Message:
    """The same reply as a client sends it back that drops reasoning, renames calls, and writes
    arguments and whitespace its own way."""
    calls = tuple(
        ToolCall(call.name, _rewritten(call.arguments), f"renamed_{i}")
        for i, call in enumerate(reply.tool_calls)
    )
    return Message("assistant", reply.content + " \n", None, calls)


def _rewritten(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=2, sort_keys=True)
