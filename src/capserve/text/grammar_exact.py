"""Would the grammar library keep a schema exactly, where it seems to?

It reads numbers as 64-bit floats, so that a long integer would become another one, and it does not
see that a name which is free to choose stands in an object twice. What would let a wrong value
through is refused here. The rest of what it can't keep, it names itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capserve.text.grammar_schema import Unsupported

EXACT = 1 << 53
"""Up to this number a float holds each integer."""

_LONG = (1 << 63) - 1
"""The library cuts integers to 64 bits: a larger maximum is kept as this one."""

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SILENT = frozenset({"default", "examples"})


def check_exact(root: Mapping[str, Any]) -> None:
    """Raises Unsupported for what would be kept as something else."""
    waiting: list[tuple[object, bool]] = [(root, False)]
    while waiting:
        node, names = waiting.pop()
        if isinstance(node, list):
            waiting.extend((part, False) for part in node)
        if not isinstance(node, Mapping):
            continue
        if names:
            waiting.extend((schema, False) for schema in node.values())
            continue
        for key, value in node.items():
            if key in ("const", "enum"):
                _check_literal(value)
            elif key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                _check_bound(key, value)
            elif key not in _SILENT:
                waiting.append((value, key in _BY_NAME))
        _check_names(node)


def _check_literal(value: object) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int) and abs(part) > EXACT:
            raise Unsupported(
                f"the value {part} is beyond {EXACT}, where no integer is kept exactly"
            )
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())


def _check_bound(key: str, value: object) -> None:
    """A bound may become a narrower one, which lets no wrong value through."""
    if not isinstance(value, int) or abs(value) <= EXACT or value >= _LONG:
        return
    kept = int(float(value))
    if kept < value if key in ("minimum", "exclusiveMinimum") else kept > value:
        raise Unsupported(f"{key} {value} is beyond {EXACT} and would be kept as {kept}")


def _check_names(schema: Mapping[str, Any]) -> None:
    """A name that is free may come twice, and counts once: only one such name is sure to be new."""
    least, required = schema.get("minProperties"), schema.get("required")
    free = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if not isinstance(least, int | float) or not free:
        return
    most = 1 + len(required if isinstance(required, list) else ())
    if least > most:
        raise Unsupported(
            f"minProperties {least} is more than can be kept where names are free: {most}, "
            "one besides those that are required"
        )
