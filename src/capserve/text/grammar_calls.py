"""Which texts are a valid call of these tools, in the family's own form?

The form is `markup.spell_call`'s, to the byte. Parameters come in the schema's order, each at most
once. How a parameter may be written follows from how `arguments.to_json` reads it back: a string as
raw text, all else as compact JSON. A raw text never holds what `tool_calls.CallReader` would take
for its end; a string inside JSON still may (`</parameter>` with `<parameter=` or `</tool_call>` at
its heels), as the library's JSON can't be told of it.

    call:       "<function=" NAME ">\\n" ( "<parameter=" r0 | "</function>" )
    rI:         KEY ">\\n" value "\\n</parameter>\\n" ( "<parameter=" rI+1 | "</function>" )
                | rI+1, when parameter I may be left out
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capserve.text.arguments import ANY, json_type, types_of
from capserve.text.grammar_schema import MOST_GRAMMAR_CHARS, MOST_PARAMETERS, Unsupported
from capserve.text.grammar_strings import ANNOTATIONS, allows, restrictions
from capserve.text.markup import FUNCTION_CLOSE, PARAMETER_CLOSE, PARAMETER_OPEN

COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""One optional space behind a comma or a colon, as `json.dumps` writes and without. No other space:
an alternative of JSON and raw text works only where nothing is skipped between JSON's words."""


def _without(*words: str) -> str:
    """A regular expression for the texts that hold none of these words, each of which has one `<`,
    at its start. The library's own negation, crossed with a length, makes too many states."""

    def partial(rests: set[str]) -> str:
        heads = {rest[0] for rest in rests if len(rest) > 1}
        return "".join(
            f"({'|'.join(h + partial(_tails(rests, h)) for h in sorted(heads))})?" * bool(heads)
        )

    def missed(rests: set[str]) -> str:
        heads = {rest[0] for rest in rests}
        ways = [h + missed(_tails(rests, h)) for h in sorted(heads) if _tails(rests, h) != {""}]
        return "(" + "|".join([f"[^<{''.join(sorted(heads))}]", *ways]) + ")"

    rests = {word[1:] for word in words}
    half = f"<{partial(rests)}"
    return f"([^<]|({half})*<{missed(rests)})*({half})*".replace("/", r"\/")


def _tails(rests: set[str], head: str) -> set[str]:
    return {rest[1:] for rest in rests if rest[0] == head}


# A raw text is read in chunks that start at a `<`: within a chunk the library need not look at
# each token of the vocabulary, which it must within one long match that ends at a tag.
SHARED = (
    r"""
body: TEXT_NL | TEXT? unit* unit_nl
unit: CHUNK | CLOSER NEUTRAL
unit_nl: CHUNK_NL | CLOSER_NL | CLOSER NEUTRAL_NL
TEXT: /[^<]+/
TEXT_NL: /[^<]*\n/
CHUNK: /<[^<]*/ & ~/<\/(parameter|function)>\s*/
CHUNK_NL: CHUNK & /(?s:.*)\n/
CLOSER: /<\/(parameter|function)>\s*/
CLOSER_NL: /<\/(parameter|function)>\s*\n/
NEUTRAL: /<[^<]*/ & ~/<(parameter=|\/?tool_call>|\/function>|\/parameter>)(?s:.*)/
NEUTRAL_NL: NEUTRAL & /(?s:.*)\n/
"""
    + f"SAFE: /{_without(PARAMETER_CLOSE, FUNCTION_CLOSE)}/\n"
)
"""`body` is a raw text without a restriction, and the line break behind it. SAFE is for those with
one, in one match: neither closing tag may stand in them at all."""

_LOOKS_LIKE = {
    "number": r"/[\s\x1c-\x1f]*[0-9-](?s:.*)/",
    "boolean": r"/[\s\x1c-\x1f]*(true|false|True|False)[\s\x1c-\x1f]*/",
    "null": r"/[\s\x1c-\x1f]*(null|None)[\s\x1c-\x1f]*/",
    "object": r"/[\s\x1c-\x1f]*[{\[(](?s:.*)/",
}
"""Texts that `to_json` may read as this type and not as a string. Where JSON is another form of the
same parameter, its first character tells: of two matches the longer would hide the shorter."""
_LOOKS_LIKE["integer"] = _LOOKS_LIKE["number"]
_LOOKS_LIKE["array"] = _LOOKS_LIKE["object"]

_WORDS = ((None, "null"), (True, "true"), (False, "false"))
"""Values that a raw text's own term lists when strings are allowed beside them."""

_NOT_STRINGS = ("object", "array", "number", "boolean", "null")
_ROOT_KEYWORDS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "strict"}


_CLOSED = json.dumps(PARAMETER_CLOSE + "\n")
"""One word, as long as a CLOSER that looks the same: the longest match wins, and both must live."""


@dataclass(frozen=True, slots=True)
class _Value:
    """How one parameter may be written."""

    free: bool = False
    """Any raw text."""
    text: str | None = None
    """A term for a restricted raw text."""
    json_schema: Mapping[str, Any] | None = None


def loose_call(prefix: str, name: str) -> list[str]:
    """Rules for a call whose parameters nobody checks; the rule `prefix` is behind `<function=`."""
    return [
        f'{prefix}: "{_word(name, "function name")}>\\n" ({_text(PARAMETER_OPEN)} {prefix}_any)* '
        f"{_text(FUNCTION_CLOSE)}",
        f"{prefix}_any: /[^<>\\n]+>\\n/ body {_CLOSED}",
    ]


def strict_call(prefix: str, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """Rules for a call that is valid by the schema `parameters`; raises Unsupported."""
    for keyword in parameters:
        if keyword not in _ROOT_KEYWORDS and not keyword.startswith("x-"):
            raise Unsupported(f"{keyword} is not supported beside properties")
    if parameters.get("type", "object") != "object":
        raise Unsupported(f"type is {parameters['type']!r}, and arguments are an object")
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    if not isinstance(properties, Mapping):
        raise Unsupported("properties must be an object")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise Unsupported("required must be a list of names")
    if isinstance(parameters.get("additionalProperties"), Mapping) and not properties:
        raise Unsupported("additionalProperties with a schema")
    if not properties and parameters.get("additionalProperties") is not False and not required:
        return loose_call(prefix, name)
    missing = [key for key in required if key not in properties]
    if missing:
        raise Unsupported(f"required names {missing[0]!r}, which properties do not have")
    keys = list(properties)
    if len(keys) > MOST_PARAMETERS:
        raise Unsupported(f"it has {len(keys)} parameters, the limit is {MOST_PARAMETERS}")
    rules = [f'{prefix}: "{_word(name, "function name")}>\\n" ({_next(prefix, 0, keys, required)})']
    chars = 0
    for i, key in enumerate(keys):
        try:
            value = _value_of(properties[key], parameters)
        except Unsupported as error:
            raise Unsupported(f"{key}: {error}") from None
        more = _parameter(prefix, i, keys, required, value)
        chars += sum(map(len, more))
        rules += more
        if chars > MOST_GRAMMAR_CHARS:
            raise Unsupported(
                f"with their definitions its parameters have more than {MOST_GRAMMAR_CHARS} "
                "characters"
            )
    return rules


def _parameter(
    prefix: str, i: int, keys: list[str], required: list[str], value: _Value
) -> list[str]:
    goes_on, ends = i + 1 < len(keys), not set(keys[i + 1 :]) & set(required)
    rule = f"{prefix}_r{i}"
    after = _next(prefix, i + 1, keys, required)
    forms, extra = [], []
    if value.free:
        forms.append(f"body {_CLOSED} ({after})")
    if value.json_schema is not None:
        schema = {"x-guidance": COMPACT, **value.json_schema}
        extra.append(f"{rule}_j: %json {json.dumps(schema)}")
        forms.append(f'{rule}_j "\\n" {_CLOSED} ({after})')
    if value.text is not None:
        # One match that ends at a tag, as a restriction is about the text as a whole.
        ways = [("p", PARAMETER_OPEN, f" {prefix}_r{i + 1}")] if goes_on else []
        ways += [("f", FUNCTION_CLOSE, "")] if ends else []
        for letter, tag, follows in ways:
            name, end = f"{rule}_{letter}", f"\n{PARAMETER_CLOSE}\n{tag}"
            extra.append(f"{name}[lazy]: {name.upper()}")
            extra.append(f"{name.upper()}: ({value.text}) {_text(end)}")
            forms.append(name + follows)
    key = _word(keys[i], "parameter name")
    skip = f" | {prefix}_r{i + 1}" if keys[i] not in required and goes_on else ""
    return [f'{rule}: "{key}>\\n" ({" | ".join(forms)}){skip}', *extra]


def _next(prefix: str, i: int, keys: list[str], required: list[str]) -> str:
    """What follows a parameter's end: one of the parameters from `i` on, or the call's end."""
    choices = [f"{_text(PARAMETER_OPEN)} {prefix}_r{i}"] if i < len(keys) else []
    if not set(keys[i:]) & set(required):
        choices.append(_text(FUNCTION_CLOSE))
    return " | ".join(choices)


def _value_of(schema: object, root: Mapping[str, Any]) -> _Value:
    if schema is True:
        return _Value(free=True)
    if not isinstance(schema, Mapping):
        raise Unsupported(f"{json.dumps(schema)} is no schema that a value satisfies")
    types = types_of(schema, root)
    if types == ANY:
        if not set(schema) - ANNOTATIONS:
            return _Value(free=True)
        types = frozenset(_NOT_STRINGS)  # a text might be read as JSON: only JSON is certain
    if "string" not in types:
        return _Value(json_schema=_only(schema, sorted(types), root))
    longer = sorted(types & {"integer", "number", "object", "array"})
    looks = sorted({_LOOKS_LIKE[kind] for kind in types if kind in _LOOKS_LIKE})
    texts = [_text(word) for value, word in _WORDS if looks and allows(schema, value, root)]
    for terms in restrictions(schema, root):
        if not terms and not looks:
            return _Value(free=True)
        texts.append(" & ".join([*terms, "SAFE", *(f"~{look}" for look in looks)]))
    return _Value(
        text=" | ".join(f"({text})" for text in texts),
        json_schema=_only(schema, longer, root) if longer else None,
    )


def _only(
    schema: Mapping[str, Any], types: list[str], root: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """`schema` for JSON values of these types, with the definitions that it may name; None when it
    lists its values and none is of them."""
    if isinstance(schema.get("enum"), list):
        values = [v for v in schema["enum"] if json_type(json.dumps(v)) in types]
        if not values:
            return None
        schema = {**schema, "enum": values}
    if types_of(schema, root) != frozenset(types):
        schema = {"allOf": [schema, {"type": types}]}
    return with_definitions(schema, root)


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that stands alone: beside it the definitions of `root` that it needs."""
    tables: dict[str, dict[str, Any]] = {}
    waiting = _references(schema)
    while waiting:
        reference = waiting.pop()
        steps = reference.split("/")
        if len(steps) < 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
            raise Unsupported(f"$ref {reference!r} does not name a definition of the same schema")
        name = steps[2].replace("~1", "/").replace("~0", "~")
        known = tables.setdefault(steps[1], {})
        source = root.get(steps[1])
        if not isinstance(source, Mapping) or name not in source:
            raise Unsupported(f"$ref {reference!r} names nothing")
        if name not in known:
            known[name] = source[name]
            waiting += _references(source[name])
    return {**schema, **tables}


def _references(node: object) -> list[str]:
    found: list[str] = []
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                found.append(part["$ref"])
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return found


def _text(text: str) -> str:
    return json.dumps(text)


def _word(word: str, what: str) -> str:
    """A name that the call form can carry, as it stands inside a quoted string of the grammar."""
    if not word or word != word.strip() or any(char in word for char in "<>\n\r"):
        raise Unsupported(f"{what} {word!r} can't be written in a call")
    return json.dumps(word, ensure_ascii=False)[1:-1]
