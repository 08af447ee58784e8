"""Our sandbox renders what the reference library's renderer does, on every template at hand."""

from __future__ import annotations

import json

import pytest

from capserve.text.messages import Conversation, Message, ToolCall

utils = pytest.importorskip("transformers.utils.chat_template_utils")

TOOLS = (
    {
        "type": "function",
        "function": {"name": "read", "description": "<é> & 'x'", "parameters": {}},
    },
)
ARGUMENTS = {"path": "é <b>", "n": 3, "deep": {"a": [1, None, True, "x"]}, "f": 0.5, "none": None}
CONVERSATIONS = [
    (Message("user", " Hi "),),
    (
        Message("system", "Sys"),
        Message("user", "q"),
        Message("assistant", "a"),
        Message("user", "r"),
    ),
    (
        Message("user", "q"),
        Message("assistant", "ok", "R", (ToolCall("read", json.dumps(ARGUMENTS)),)),
        Message("tool", "one"),
        Message("tool", "two"),
        Message("assistant", "<think>\ninline\n</think>\n\nanswer"),
        Message("user", "<tool_response>x</tool_response>"),
    ),
]


def as_reference(message: Message) -> dict:
    fields: dict = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    return fields


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}, {"preserve_thinking": True}])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("name", ["nano", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"])
def test_rendering_equals_the_reference(nano_dir, template, official, name, tools, switches):
    if name == "nano":
        source = (nano_dir / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        template = official(name)
        source = official.source(name)
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            (wanted,), _ = utils.render_jinja_template(
                [[as_reference(m) for m in messages]],
                tools=list(tools) or None,
                chat_template=source,
                add_generation_prompt=prompt,
                **switches,
            )
            ours = template.render(Conversation(messages, tools, switches), prompt)
            assert ours == wanted
