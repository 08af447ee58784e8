"""What may a model write? Generated replies that a parser has to survive.

Reasoning, content with emoji, CJK, half tags and code that talks about calls; several calls with
awkward arguments; broken calls; replies cut anywhere. A clean reply knows what it must be read as.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capserve.text.markup import THINK_CLOSE, THINK_OPEN, spell_call, spell_parameter


@dataclass(frozen=True)
class Expected:
    """A clean reply's parts; arguments as values, in the order written."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Reply:
    text: str
    starts_in_reasoning: bool
    expected: Expected | None
    """None for a reply that was broken on purpose."""


TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "mode": {"type": "integer"},
                },
                "required": ["path", "content"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search, with options of every type.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "score": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "filters": {"$ref": "#/$defs/Filters"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "$defs": {"Filters": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time."}},
)

_THOUGHTS = (
    "",
    "I read the file first.",
    "两个文件。先看第一个 🙂\n\nThen the second.",
    "If a < b then <b>bold</b>; maybe <thin or <tool_ or </thi nothing.",
    "The form is <function=name>, I know.",
)

_CONTENTS = (
    "",
    "Done.",
    "Zażółć gęślą jaźń, 日本語, 👩‍👩‍👧‍👦 and e\u0301.",
    "Use `<tool` or `</tool_call` or `<function` or `<think`, they are harmless.",
    "```xml\n<parameter=x>\n1\n</parameter>\n</function>\n```\nThat is how a call ends.",
    "The block <tool_call>{}</tool_call> is no call.",
    "a\n\n\n  b\t c",
    "Write <function= and then a name",
    "1 < 2 <3 <<< x",
)

_STRINGS = (
    "",
    "a.txt",
    "  leading and trailing  ",
    "\n\nblank lines around\n\n",
    'quotes " and \\ and \t tab',
    "<div class='x'>&amp;</div>",
    "</parameter> in the middle",
    "x\n</parameter>\ny",
    "see </function> and </tool_call> and <tool_call>",
    "true",
    "123",
    "null",
    '{"json": "as text"}',
    "🙂 日本 e\u0301",
    "def f():\n    return 1\n",
)

_VALUES: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "limit": (("3", 3), ("null", None), ("None", None), ("123456789012345678901234567890", 0)),
    "score": (("0.10", 0.1), ("1e3", 1000.0), ("-5", -5)),
    "deep": (("true", True), ("False", False)),
    "filters": (('{"a": [1, 2], "b": {"c": "é"}}', {"a": [1, 2], "b": {"c": "é"}}), ("{}", {})),
    "tags": (('["x", "<y>"]', ["x", "<y>"]), ("[]", []), ("['p', 'q']", ["p", "q"])),
}


def generate_replies(count: int, seed: int = 0) -> list[Reply]:
    """`count` replies, the same for the same seed; about two in three are clean."""
    rng = random.Random(seed)
    return [_damaged(rng) if rng.random() < 0.35 else _clean(rng) for _ in range(count)]


def _clean(rng: random.Random) -> Reply:
    text = reasoning = ""
    starts_in_reasoning = rng.random() < 0.4
    if starts_in_reasoning or rng.random() < 0.3:
        reasoning = rng.choice(_THOUGHTS)
        opening = "" if starts_in_reasoning else THINK_OPEN + rng.choice(("\n", ""))
        text = opening + reasoning + rng.choice(("\n", "")) + THINK_CLOSE + rng.choice(("\n\n", ""))
    content = rng.choice(_CONTENTS)
    text += content
    calls = [_call(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    if calls and content:
        text += rng.choice(("\n\n", "\n"))
    blocks = [spell_call(name, body) for name, body, _ in calls]
    if len(blocks) == 1 and rng.random() < 0.2:  # a call without its wrapper
        blocks[0] = blocks[0].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    text += rng.choice(("\n", "\n\n", "")).join(blocks)
    expected = Expected(content, reasoning, tuple((name, args) for name, _, args in calls))
    return Reply(text, starts_in_reasoning, expected)


def _call(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """(name, what stands between the function's tags, arguments)."""
    name = rng.choice(("write_file", "search", "get_time"))
    body = ""
    arguments: dict[str, Any] = {}
    if name == "write_file":
        for key in ("path", "content"):
            arguments[key] = rng.choice(_STRINGS)
            body += spell_parameter(key, arguments[key])
    elif name == "search":
        for key in rng.sample(sorted(_VALUES), rng.randrange(len(_VALUES) + 1)):
            written, value = rng.choice(_VALUES[key])
            arguments[key] = int(written) if value == 0 and written.isdigit() else value
            body += spell_parameter(key, written)
    return name, body, arguments


def _damaged(rng: random.Random) -> Reply:
    reply = _clean(rng)
    text = reply.text
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:  # the reply ends here
                text = text[:at]
            case 1:  # a piece is lost
                text = text[:at] + text[at + rng.randrange(1, 12) :]
            case 2:  # a mark where none belongs
                marks = ("<tool_call>", "</tool_call>", "<function=", "</parameter>", "</think>")
                text = text[:at] + rng.choice((*marks, THINK_OPEN, "<parameter=x>")) + text[at:]
            case _:  # a piece is written twice
                text = text[:at] + text[max(at - 20, 0) : at] + text[at:]
    return Reply(text, reply.starts_in_reasoning, None)
