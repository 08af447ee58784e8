"""Three dozen more schemas: what the hundred leave out, and what real programs send.

Deep nesting, recursion over several definitions, properties in other scripts, patterns over
Unicode, formats, large enumerations, and the schemas that pydantic makes. `REFUSED` is what can't
be kept: each with the word that the refusal has to say.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tests.engine.constrained_schemas import WORD, Schema, array, integer, number, obj, string


def nested(levels: int) -> Schema:
    schema: Schema = {"type": "boolean"}
    for level in range(levels):
        schema = obj(**{f"level_{level}": schema})
    return schema


def listed(levels: int) -> Schema:
    schema: Schema = integer(minimum=0, maximum=9)
    for _ in range(levels):
        schema = array(schema, 1, 1)
    return schema


class Colour(enum.Enum):
    RED = "red"
    DEEP_BLUE = "deep blue"


class Circle(BaseModel):
    shape: Literal["circle"]
    radius: float = Field(gt=0, lt=100)


class Square(BaseModel):
    shape: Literal["square"]
    side: int = Field(ge=1, le=99)


class Drawing(BaseModel):
    """A union told apart by a field, an enumeration, a date, an id, a default."""

    title: str = Field(min_length=1, max_length=12)
    colour: Colour
    shapes: list[Annotated[Circle | Square, Field(discriminator="shape")]] = Field(max_length=2)
    on: datetime.date
    key: uuid.UUID
    scale: int | None = Field(default=1, ge=1, le=9)


class Branch(BaseModel):
    """A tree."""

    name: Literal["left", "right"]
    under: list[Branch] = Field(max_length=1)


def of_model(model: type[BaseModel]) -> Schema:
    """What an SDK makes of it for a strict request: nothing but what is named, all required."""

    def strict(node: Any) -> Any:
        if isinstance(node, list):
            return [strict(one) for one in node]
        if not isinstance(node, dict):
            return node
        made = {key: strict(value) for key, value in node.items() if key != "discriminator"}
        if "oneOf" in made:
            made["anyOf"] = made.pop("oneOf")
        if "properties" in made:
            made |= {"additionalProperties": False, "required": list(made["properties"])}
        return made

    found: Schema = strict(model.model_json_schema())
    return found


MORE: dict[str, Schema] = {
    **{
        f"format {name}": {"type": "string", "format": name, "maxLength": 40}
        for name in ("ipv6", "email", "hostname", "uri", "duration")
    },
    "25 levels of objects": nested(25),
    "20 levels of arrays": listed(20),
    "recursion to the root": {
        "anyOf": [{"type": "boolean"}, array({"$ref": "#"}, 0, 2), {"type": "null"}]
    },
    "two definitions that name each other": {
        "$defs": {
            "even": obj(["b"], b={"type": "boolean"}, odd={"$ref": "#/$defs/odd"}),
            "odd": obj(["n"], n=integer(minimum=0, maximum=9), even={"$ref": "#/$defs/even"}),
        },
        "$ref": "#/$defs/even",
    },
    "a reference with escapes": {
        "$defs": {"a/b~c": {"enum": ["one", "two"]}},
        **obj(x={"$ref": "#/$defs/a~1b~0c"}),
    },
    "a reference by anchor": {
        "$defs": {"x": {"$anchor": "flag", "type": "boolean"}},
        "$ref": "#flag",
    },
    "properties in other scripts": obj(
        名前=WORD, größe=integer(minimum=0, maximum=300), **{"🙂": {"type": "boolean"}, "": WORD}
    ),
    "values in other scripts": {"enum": ["größer", "더 큰", "больше", "أكبر", "👩‍💻", "e\u0301"]},
    "a pattern of umlauts": string(pattern="^[äöüß]{2,4}$"),
    "a pattern of Han": string(pattern="^[\u4e00-\u9fff]{1,4}$"),
    "a pattern of emoji": string(pattern="^(🙂|🎉){1,3}$"),
    "a pattern without anchors": string(pattern="[0-9]{2}"),
    "a pattern of escapes": string(pattern=r"^[\"\\/\t]{1,4}$"),
    "two patterns of names": {
        "type": "object",
        "patternProperties": {"^is_[a-z]{1,5}$": {"type": "boolean"}, "^n_[a-z]{1,5}$": WORD},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "names and a pattern of names": {
        "type": "object",
        "properties": {"id": integer(minimum=0, maximum=99)},
        "patternProperties": {"^x_[a-z]{1,5}$": {"type": ["boolean", "null"]}},
        "additionalProperties": False,
        "required": ["id"],
        "maxProperties": 3,
    },
    "names and any others": {
        **obj(["a"], a=WORD),
        "additionalProperties": {"type": "null"},
        "maxProperties": 3,
    },
    "one more than is required": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "patternProperties": {"^x_[a-z]{1,5}$": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "an enumeration of 200": {"enum": [f"item number {n}" for n in range(200)]},
    "an enumeration of all kinds": {"enum": [{"a": [1, None]}, [], {}, "", -0.5, False]},
    "a constant that is null": obj(a={"const": None}, b={"const": ""}),
    "a long constant": {"const": -(2**53)},
    "negative numbers": obj(
        a=integer(minimum=-999, maximum=-1), b=number(minimum=-1, maximum=-0.5)
    ),
    "a grid of numbers": number(multipleOf=0.25, minimum=0, maximum=9),
    "where floats end": integer(minimum=2**53 - 3, maximum=2**53 + 2),
    "a union of arrays": {"anyOf": [array(WORD, 1, 1), array({"type": "boolean"}, 2, 2)]},
    "one of what can't overlap": {
        "oneOf": [obj(k={"const": "a"}, v=WORD), obj(k={"const": "b"}, v={"type": "boolean"})]
    },
    "all of three": {
        "allOf": [
            {"required": ["b"]},
            obj(["a"], a=WORD, b=WORD),
            {"properties": {"a": {"const": "x"}}},
        ]
    },
    "no length and no items": obj(a=string(maxLength=0), b={"type": "array", "maxItems": 0}),
    "exactly five": array({"enum": ["x", "y"]}, 5, 5),
    "pydantic: a drawing": of_model(Drawing),
    "pydantic: a tree": of_model(Branch),
}

REFUSED: dict[str, tuple[Schema, str]] = {
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
    "not": ({"type": "string", "not": {"const": "x"}}, "not"),
    "uniqueItems": (array({"enum": [1, 2, 3]}, uniqueItems=True), "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "unevaluated": ({**obj(a=WORD), "unevaluatedProperties": False}, "unevaluatedProperties"),
    "overlapping oneOf": ({"oneOf": [integer(minimum=0), integer(maximum=9)]}, "oneOf"),
    "look-ahead": (string(pattern="^(?=a)a$"), "look-ahead"),
    "back reference": (string(pattern=r"^(a)\1$"), "backreferences"),
    "an unknown format": ({"type": "string", "format": "car-plate"}, "car-plate"),
    "a longer constant": (obj(a={"const": 2**53 + 1}), "9007199254740993"),
    "a long number in a list": ({"enum": [1, [2**64]]}, "18446744073709551616"),
    "a bound that is no float": (integer(minimum=2**53 + 1), "minimum 9007199254740993"),
    "two names that are free": (
        {"type": "object", "additionalProperties": WORD, "minProperties": 2},
        "minProperties 2",
    ),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "/$defs/none"),
}
