"""A hundred JSON schemas of varied features. Strings and arrays are bounded where a small model
would ramble: a reply that `max_tokens` cuts is `length`, and no promise is made about it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 12}


def obj(required: list[str] | None = None, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Any, least: int = 0, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def number(**bounds: Any) -> Schema:
    return {"type": "number", **bounds}


def integer(**bounds: Any) -> Schema:
    return {"type": "integer", **bounds}


def string(**rules: Any) -> Schema:
    return {"type": "string", "maxLength": 16, **rules}


TREE: Schema = {
    "$defs": {
        "node": obj(
            value=integer(minimum=0, maximum=9),
            children=array({"$ref": "#/$defs/leaf"}, 0, 2),
        ),
        "leaf": obj(name=WORD),
    },
    "$ref": "#/$defs/node",
}

CHAIN: Schema = {
    "$defs": {
        "link": obj(
            ["id"],
            id=integer(minimum=1, maximum=99),
            next={"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
        )
    },
    "$ref": "#/$defs/link",
}

SCALARS: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    integer(minimum=0, maximum=255),
    integer(minimum=-5, maximum=5),
    integer(exclusiveMinimum=10, exclusiveMaximum=1000),
    integer(minimum=1000000, maximum=9999999),
    integer(multipleOf=5, minimum=0, maximum=500),
    number(minimum=0, maximum=1),
    number(minimum=-1.5, maximum=2.25),
    number(exclusiveMinimum=0, maximum=100),
    string(),
    string(minLength=3),
    string(minLength=4, maxLength=4),
    string(maxLength=0),
    string(pattern="^[a-z]{2,8}$"),
    string(pattern="^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$"),
    string(pattern="^(red|green|blue)$"),
    string(pattern="^#[0-9a-fA-F]{6}$"),
    string(pattern="^\\d{3}-\\d{4}$"),
    string(pattern="^v\\d+\\.\\d+$"),
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"enum": ["a", "b", "c"]},
    {"enum": [1, 2.5, "x", None, True]},
    {"enum": ['quote "', "back \\ slash", "new\nline", "tab\t", "é", "猫", "🙂"]},
    {"const": "only"},
    {"const": {"a": [1, 2]}},
    {"type": ["string", "null"], "maxLength": 8},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 10},
    {"anyOf": [integer(minimum=0, maximum=9), string(maxLength=5)]},
    {"anyOf": [{"const": 1}, {"const": "one"}]},
    {"oneOf": [{"type": "null"}, integer(minimum=1, maximum=3)]},
    {"allOf": [integer(minimum=3, maximum=300), {"maximum": 30}]},
]

ARRAYS: list[Schema] = [
    array(integer(minimum=0, maximum=9)),
    array(integer(minimum=0, maximum=99), 2, 2),
    array(WORD, 1, 2),
    array({"type": "boolean"}, 3, 4),
    array(array(integer(minimum=0, maximum=9), 1, 2), 1, 2),
    array({"enum": ["x", "y"]}, 1, 5),
    array({"anyOf": [{"type": "null"}, WORD]}, 1, 3),
    array(number(minimum=0, maximum=10), 1, 2),
    array(obj(k=WORD), 1, 2),
    array(False, 0, 1),
    {"type": "array", "prefixItems": [WORD, integer(minimum=0, maximum=9)], "items": False},
    {
        "type": "array",
        "prefixItems": [{"const": "p"}, {"type": "boolean"}],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 4,
    },
    array({"$ref": "#/$defs/c"}, 1, 2, **{"$defs": {"c": {"enum": ["u", "v"]}}}),
    {"type": "array", "maxItems": 0},
]

OBJECTS: list[Schema] = [
    obj(),
    obj(a={"type": "boolean"}),
    obj([], a={"type": "boolean"}),
    obj(["b"], a=WORD, b=WORD, c=WORD),
    obj(["a", "c"], a=integer(minimum=0, maximum=9), b={"type": "null"}, c={"type": "boolean"}),
    obj([], **{f"k{i}": integer(minimum=0, maximum=9) for i in range(12)}),
    obj(**{f"k{i}": {"type": "boolean"} for i in range(20)}),
    obj(**{"key with blank": WORD, 'quote"': WORD, "é": WORD, "new\nline": WORD}),
    obj(outer=obj(inner=obj(deep=obj(value={"type": "boolean"})))),
    obj(name=string(minLength=1), age=integer(minimum=0, maximum=150), admin={"type": "boolean"}),
    obj(kind={"const": "point"}, x=number(minimum=0, maximum=1), y=number(minimum=0, maximum=1)),
    obj(tags=array(WORD, 0, 2), meta={"type": ["object", "null"], "maxProperties": 0}),
    obj(value={"anyOf": [obj(a=WORD), obj(b={"type": "boolean"})]}),
    obj(date={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    obj(level={"enum": ["low", "high"]}, score=integer(minimum=1, maximum=5)),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {
        "type": "object",
        "additionalProperties": integer(minimum=0, maximum=9),
        "minProperties": 1,
        "maxProperties": 2,
    },
    {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {**obj(["a"], a=WORD), "title": "T", "description": "D", "$comment": "c", "examples": [{}]},
    {
        "type": "object",
        "properties": {"a": WORD, "b": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"allOf": [obj(["a"], a=WORD, b=WORD), {"required": ["b"]}]},
    {"$defs": {"s": WORD}, **obj(a={"$ref": "#/$defs/s"}, b={"$ref": "#/$defs/s"})},
    {"definitions": {"n": integer(minimum=0, maximum=9)}, **obj(a={"$ref": "#/definitions/n"})},
    {"$defs": {"s": {"type": "string"}}, **obj(a={"$ref": "#/$defs/s", "maxLength": 6})},
    TREE,
    CHAIN,
    obj(steps=array(obj(explanation=WORD, output=WORD), 1, 2), final_answer=WORD),
    obj(["q"], q=WORD, page={"type": "integer", "minimum": 1, "maximum": 20, "default": 1}),
    obj(a={"anyOf": [{"type": "null"}, obj(b={"anyOf": [{"type": "null"}, WORD]})]}),
    obj(lat=number(minimum=-90, maximum=90), lon=number(minimum=-180, maximum=180)),
]

COMBINED: list[Schema] = [
    {"anyOf": [obj(type={"const": kind}, value=value) for kind, value in kinds]}
    for kinds in (
        [("int", integer(minimum=0, maximum=9)), ("str", WORD)],
        [("flag", {"type": "boolean"}), ("none", {"type": "null"}), ("list", array(WORD, 0, 2))],
        [
            ("date", {"type": "string", "format": "date"}),
            ("ip", {"type": "string", "format": "ipv4"}),
        ],
    )
]
COMBINED += [
    obj(rows=array(obj(cells=array(value, 1, 2)), 1, 2), total=integer(minimum=0, maximum=99))
    for value in (
        WORD,
        integer(minimum=-9, maximum=9),
        {"type": ["boolean", "null"]},
        {"enum": ["", "x", 0]},
    )
]
COMBINED += [
    obj(**{f"field_{i}": {"type": ["string", "null"], "maxLength": n} for i in range(n)})
    for n in (1, 3, 5)
]
COMBINED += [
    obj(path=string(pattern=pattern), count=integer(minimum=least, maximum=least + 50))
    for pattern, least in (
        ("^/[a-z]+(/[a-z]+)?$", 0),
        ("^[a-z_]{1,9}\\.py$", -25),
        ("ab", 7),
        ("^x|y$", 100),
        ("^(?:a|b|c){1,5}$", 3),
    )
]
COMBINED += [
    obj(a=array({"anyOf": [integer(minimum=0, maximum=n), {"const": "n/a"}]}, 1, n))
    for n in (1, 2, 3, 4, 5)
]

SCHEMAS: list[Schema] = [*SCALARS, *ARRAYS, *OBJECTS, *COMBINED]
