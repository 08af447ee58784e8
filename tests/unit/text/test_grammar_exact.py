"""What the grammar library would keep as something else is refused, and nothing more than that."""

from __future__ import annotations

from typing import Any

import pytest

from capserve.text.grammar_exact import EXACT, check_exact
from capserve.text.grammar_schema import Unsupported

LONG = EXACT + 1
"""The first integer that no float holds."""


def obj(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


KEPT: dict[str, Any] = {
    "an exact constant": {"const": EXACT},
    "a negative one": {"enum": [-EXACT, True, None, 0.1]},
    "a float of any size": {"const": 1e300},
    "a minimum that becomes larger": {"minimum": LONG + 2},
    "a maximum that becomes smaller": {"maximum": LONG},
    "a maximum of 64 bits": {"maximum": 2**63 - 1},
    "a maximum beyond them": {"maximum": 2**64 - 1},
    "a minimum of 64 bits": {"minimum": -(2**63)},
    "a property that is named like a keyword": obj(
        properties={"const": {"default": LONG}, "minimum": {}, "minProperties": {}}
    ),
    "a default and an example": {"default": LONG, "examples": [{"const": LONG}]},
    "one name": obj(minProperties=1),
    "one name besides those required": obj(required=["a", "b"], minProperties=3),
    "names that are all listed": obj(
        properties={"a": {}, "b": {}}, additionalProperties=False, minProperties=2
    ),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "a constant": ({"const": LONG}, str(LONG)),
    "a negative constant": ({"const": -LONG}, str(-LONG)),
    "inside a constant": ({"const": {"a": [1, {"b": LONG}]}}, str(LONG)),
    "in an enumeration, deep inside": (
        obj(properties={"a": {"anyOf": [{"items": {"enum": [1, LONG]}}]}}),
        str(LONG),
    ),
    "in a property that is named like a keyword": (
        obj(properties={"enum": {"const": LONG}}),
        str(LONG),
    ),
    "in a definition": ({"$defs": {"default": {"const": LONG}}}, str(LONG)),
    "a minimum that becomes smaller": ({"minimum": LONG}, f"kept as {EXACT}"),
    "a lower edge": ({"exclusiveMinimum": LONG}, f"exclusiveMinimum {LONG}"),
    "a maximum that becomes larger": ({"maximum": LONG + 2}, f"kept as {LONG + 3}"),
    "a negative maximum": ({"maximum": -LONG}, f"kept as {-EXACT}"),
    "two names": (obj(minProperties=2), "minProperties 2"),
    "two names of a pattern": (
        obj(patternProperties={"^x": {}}, additionalProperties=False, minProperties=2),
        "minProperties 2",
    ),
    "two names besides the one required": (
        obj(required=["a"], minProperties=3),
        "can be kept where names are free: 2",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_exactly_or_more_narrowly_passes(name: str) -> None:
    check_exact(KEPT[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_let_a_wrong_value_through_is_refused_with_its_number(name: str) -> None:
    schema, word = REFUSED[name]
    with pytest.raises(Unsupported) as refused:
        check_exact(schema)
    assert word in str(refused.value)
