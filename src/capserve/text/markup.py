"""Which marks does this model family write, and how is a call spelled?

The reader of replies and the renderer of histories share these words, so that what one cannot read
is exactly what the other writes back.
"""

from __future__ import annotations

from collections.abc import Iterable

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
EMPTY_THINK = "<think>\n\n</think>\n\n"
"""The block that templates put before a reply without reasoning."""

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
FUNCTION_OPEN = "<function="
FUNCTION_CLOSE = "</function>"
PARAMETER_OPEN = "<parameter="
PARAMETER_CLOSE = "</parameter>"

KEPT_MARKS = frozenset({THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE})
"""Read as text even where a checkpoint declares them special: the reply's structure is in them."""


def spell_call(name: str, body: str) -> str:
    """One call in the family's layout; `body` is what stands between the function's tags."""
    return f"{CALL_OPEN}\n{FUNCTION_OPEN}{name}>\n{body}{FUNCTION_CLOSE}\n{CALL_CLOSE}"


def spell_parameter(key: str, value: str) -> str:
    return f"{PARAMETER_OPEN}{key}>\n{value}\n{PARAMETER_CLOSE}\n"


def unfinished(text: str, words: Iterable[str]) -> int:
    """Characters at the end of `text` that may still grow into one of `words`."""
    longest = 0
    for word in words:
        for n in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:n]):
                longest = n
                break
    return longest
