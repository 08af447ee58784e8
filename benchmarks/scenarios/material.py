"""What is said in the scenes? Fixed texts, long enough to matter, the same on every machine.

The questions and tools are those that the embedded model was made for, so that it really calls
them; the bulk is generated source, as an agent's context mostly is.
"""

from __future__ import annotations

import json
import random
from typing import Any

from capserve.cli.workbench import PROJECT, TOOLS

__all__ = ["PROJECT", "QUESTIONS", "SYSTEM", "TITLE_SYSTEM", "TOOLS", "answer", "source"]

SYSTEM = "You are a coding agent. Keep answers short."
TITLE_SYSTEM = "You write titles. Answer with one short title for what the user says."

QUESTIONS = (
    "Change the port to 9090 in config.toml.",
    "Read config.toml and tell me the port.",
    "The tests fail. Please find and fix the bug in stats.py.",
    "List the files here.",
    "Read README.md and tell me what it is about.",
    "What is the capital of France?",
)

_WORDS = (
    *("alpha", "beta", "index", "total", "value", "count", "limit", "queue", "frame"),
    *("token", "width", "store", "reader", "cursor", "batch", "merge", "split", "header"),
)


def source(seed: int, chars: int) -> str:
    """At least `chars` characters of functions that no other seed gives, whole lines."""
    draw = random.Random(seed)
    lines: list[str] = []
    size = 0
    while size < chars:
        name, verb, first, second = draw.sample(_WORDS, 4)
        block = (
            f"def {name}_{verb}({first}, {second}):",
            f'    """Return the {name} of {first} and {second}."""',
            f"    {verb} = {first} * {draw.randrange(90)} + {second}",
            f"    return {verb} if {first} > {draw.randrange(90)} else {second}",
            "",
        )
        lines += block
        size += sum(len(line) + 1 for line in block)
    return "\n".join(lines)


def answer(call: dict[str, Any], bulk_chars: int, seed: int) -> str:
    """What the tool says to `call`: a file of the project, and bulk for whatever reads or runs."""
    function = call["function"]
    try:
        path = json.loads(function["arguments"]).get("path", "")
    except (ValueError, AttributeError):
        return "Error: arguments must be a JSON object"
    if function["name"] in ("write_file", "edit_file"):
        return "OK"
    return f"{source(seed, bulk_chars)}\n{PROJECT.get(path, '')}"
