"""Which raw texts may stand for a string that its schema restricts?

In the family's call form a string is written as it is, without quotes: its schema must become a
regular expression over the text itself. The answer is a list of alternatives, each of them terms in
the grammar library's notation, all of which must hold. What can't be said so is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from llguidance import regex_to_lark

from capserve.text.arguments import MAX_SCHEMA_DEPTH, resolve
from capserve.text.grammar_schema import Unsupported

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    }
)
"""Keywords that restrict no value."""

_OTHER_TYPES = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "uniqueItems",
    }
)
"""Keywords that say nothing about a string."""

_DAY = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
"""No 29th to 31st: a valid day of any month, without a calendar in a regular expression."""
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

FORMATS: dict[str, str] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": r"P(\d+W|(\d+Y)?(\d+M)?\d+D|T(\d+H)?(\d+M)?\d+S)",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]*)*",
}
"""RFC 3339, 5321, 1123, 4291, 4122 and 3986, each narrowed where the whole would be long: all that
matches is valid, not all that is valid matches."""

MOST_ALTERNATIVES = 64
"""anyOf inside allOf multiplies; nobody writes more by hand."""


@dataclass(frozen=True, slots=True)
class _Facets:
    least: int = 0
    most: int | None = None
    terms: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None

    def meet(self, other: _Facets) -> _Facets | None:
        """What satisfies both, None when nothing does."""
        most = min((m for m in (self.most, other.most) if m is not None), default=None)
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(v for v in self.values if v in other.values)
        met = _Facets(max(self.least, other.least), most, (*self.terms, *other.terms), values)
        if values is not None:
            met = replace(met, values=tuple(v for v in values if met.fits(len(v))))
        empty = met.values == () or (met.most is not None and met.least > met.most)
        return None if empty else met

    def fits(self, chars: int) -> bool:
        return self.least <= chars and (self.most is None or chars <= self.most)


def restrictions(schema: object, root: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Alternatives for a string that satisfies `schema`: terms that must all hold. One without
    terms takes any text.

    Raises Unsupported, also when no string fits.
    """
    found = _facets(schema, root, 0)
    if not found:
        raise Unsupported("no string satisfies it")
    if any(f == _Facets() for f in found):
        return [()]
    return [tuple(_terms(f)) for f in found]


def allows(schema: object, value: bool | None, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Does `schema` take this value? Keywords about other types don't matter to it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return False
    kind = "null" if value is None else "boolean"
    for keyword, said in schema.items():
        match keyword:
            case "type":
                fits = kind == said or (isinstance(said, list) and kind in said)
            case "enum" if isinstance(said, list):
                fits = any(v is value for v in said)
            case "const":
                fits = said is value
            case "$ref" if isinstance(said, str):
                fits = allows(resolve(said, root), value, root, depth + 1)
            case "allOf" | "anyOf" | "oneOf" if isinstance(said, list):
                count = sum(allows(branch, value, root, depth + 1) for branch in said)
                fits = {"allOf": count == len(said), "anyOf": count > 0, "oneOf": count == 1}[
                    keyword
                ]
            case _:
                fits = True
        if not fits:
            return False
    return True


def _terms(facets: _Facets) -> Iterator[str]:
    yield from facets.terms
    if facets.values is not None:
        yield "(" + " | ".join(json.dumps(v, ensure_ascii=False) for v in facets.values) + ")"
    elif facets.least or facets.most is not None:
        most = "" if facets.most is None else facets.most
        yield f"/(?s:.{{{facets.least},{most}}})/"


def _facets(schema: object, root: Mapping[str, Any], depth: int) -> list[_Facets]:
    if schema is True:
        return [_Facets()]
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        raise Unsupported(f"a schema is an object or a boolean, not {type(schema).__name__}")
    if depth > MAX_SCHEMA_DEPTH:
        raise Unsupported(f"$ref and anyOf nest deeper than {MAX_SCHEMA_DEPTH} for a string")
    found = [_Facets()]
    for keyword, value in schema.items():
        found = _both(found, _keyword(keyword, value, root, depth))
    return found


def _keyword(keyword: str, value: Any, root: Mapping[str, Any], depth: int) -> list[_Facets]:
    match keyword:
        case "type":
            types = [value] if isinstance(value, str) else value
            return [_Facets()] if isinstance(types, list) and "string" in types else []
        case "enum" if isinstance(value, list):
            strings = tuple(dict.fromkeys(v for v in value if isinstance(v, str)))
            return [_Facets(values=strings)] if strings else []
        case "const":
            return [_Facets(values=(value,))] if isinstance(value, str) else []
        case "minLength":
            return [_Facets(least=_length(keyword, value))]
        case "maxLength":
            return [_Facets(most=_length(keyword, value))]
        case "pattern" if isinstance(value, str):
            return [_Facets(terms=(_searched(value),))]
        case "format" if isinstance(value, str):
            if value not in FORMATS:
                raise Unsupported(f"format {value!r} is not supported")
            return [_Facets(terms=(_regex(FORMATS[value]),))]
        case "$ref" if isinstance(value, str):
            return _facets(resolve(value, root), root, depth + 1)
        case "allOf" if isinstance(value, list):
            found = [_Facets()]
            for branch in value:
                found = _both(found, _facets(branch, root, depth + 1))
            return found
        case "anyOf" | "oneOf" if isinstance(value, list):
            branches = [_facets(branch, root, depth + 1) for branch in value]
            if keyword == "oneOf" and sum(map(bool, branches)) > 1:
                raise Unsupported("oneOf with several branches that take a string")
            return [facets for branch in branches for facets in branch]
        case _ if keyword in ANNOTATIONS | _OTHER_TYPES or keyword.startswith("x-"):
            return [_Facets()]
        case _:
            raise Unsupported(f"{keyword} is not supported for a string")


def _both(left: list[_Facets], right: list[_Facets]) -> list[_Facets]:
    if len(left) * len(right) > MOST_ALTERNATIVES:
        raise Unsupported(f"anyOf and allOf make more than {MOST_ALTERNATIVES} alternatives")
    return [met for a in left for b in right if (met := a.meet(b)) is not None]


def _length(keyword: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unsupported(f"{keyword} is not a number of characters")
    return value


def _regex(pattern: str) -> str:
    return f"/{regex_to_lark(pattern, use_ascii='dw')}/"


def _searched(pattern: str) -> str:
    """A term for the texts in which `pattern` is found. JSON Schema's patterns are not anchored
    unless they say so, and the library's terms know no anchors."""
    branches = []
    for branch in _branches(pattern):
        starts = branch.startswith("^")
        ends = branch.endswith("$") and not _escaped(branch, len(branch) - 1)
        inner = branch[starts : len(branch) - ends]
        if any(char in "^$" for _, char in _bare(inner)):
            raise Unsupported(f"pattern {pattern!r} has an anchor inside")
        before, after = "" if starts else "(?s:.*)", "" if ends else "(?s:.*)"
        branches.append(f"{before}({inner}){after}")
    return _regex("|".join(branches))


def _branches(pattern: str) -> list[str]:
    cuts, depth = [-1], 0
    for at, char in _bare(pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            cuts.append(at)
    cuts.append(len(pattern))
    return [pattern[a + 1 : b] for a, b in pairwise(cuts)]


def _bare(pattern: str) -> Iterator[tuple[int, str]]:
    """Characters that are neither escaped nor in a class."""
    at, in_class = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            yield at, char
        at += 1


def _escaped(text: str, at: int) -> bool:
    slashes = len(text[:at]) - len(text[:at].rstrip("\\"))
    return slashes % 2 == 1
