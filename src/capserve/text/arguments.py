"""What JSON value does a parameter's text stand for?

The model writes strings as they are and everything else as JSON; the tool's schema says which one
was meant. A value that is JSON already is kept as it was written, digit for digit: no float ever
stands between a number and the client. Nothing raises; what fits no type stays a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

ANY: frozenset[str] = frozenset()
"""The types of a value about which the schema says nothing."""

MAX_SCHEMA_DEPTH = 16
"""Nested anyOf / $ref that are followed; a reference to itself ends here."""

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ToolSchemas:
    """The tools that a request offers, by name. Tolerates any JSON in a definition."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = _mapping(function.get("parameters"))

    def requires(self, name: str) -> frozenset[str]:
        """Parameters without which a call of `name` is incomplete."""
        required = self._parameters.get(name, {}).get("required")
        if not isinstance(required, list):
            return frozenset()
        return frozenset(key for key in required if isinstance(key, str))

    def arguments(self, name: str, parameters: Sequence[tuple[str, str]]) -> str:
        """JSON text of the arguments: keys in the order written, `","` and `":"` between, non-ASCII
        as it is. A key written twice has its last value."""
        root = self._parameters.get(name, {})
        properties = _mapping(root.get("properties"))
        values: dict[str, str] = {}
        for key, text in parameters:
            values[key] = to_json(text, types_of(properties.get(key), root))
        return "{" + ",".join(f"{_dumps(key)}:{value}" for key, value in values.items()) + "}"


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that `schema` allows; ANY when it does not say. `root` holds `$defs`."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return ANY
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolve(reference, root), root, depth + 1)
    named = schema.get("type")
    types: set[str] = set()
    if isinstance(named, str):
        types.add(named)
    elif isinstance(named, list):
        types.update(name for name in named if isinstance(name, str))
    elif isinstance(values := schema.get("enum"), list):
        types.update(_type_name(value) for value in values)
    elif "const" in schema:
        types.add(_type_name(schema["const"]))
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list):
                found = [types_of(branch, root, depth + 1) for branch in branches]
                if key == "allOf":
                    types.update(next((f for f in found if f), ANY))
                elif not all(found):  # one branch takes anything
                    return ANY
                else:
                    types.update(*found)
    if types and schema.get("nullable") is True:
        types.add("null")
    return frozenset(types)


def to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of one parameter.

    `types` == {"string"}: a string, byte-exact. ANY: the JSON value that `text` is, unless that is
    a string or none. Otherwise the value when it has one of the types, also in Python's spelling
    (`True`, `{'a': None}`) or as JSON inside a JSON string.
    """
    if types == {"string"}:
        return _dumps(text)
    word = text.strip()
    kind = json_type(word)
    if types == ANY:
        return _dumps(text) if kind in (None, "string") else word
    if kind is not None and kind != "string" and _fits(kind, types):
        return word
    other = _PYTHON_WORDS.get(word) or (_from_python(word) if word[:1] in "{[(" else None)
    if kind is None and other is not None and _fits(json_type(other), types):
        return other
    if kind == "string" and "string" not in types:
        inner: str = json.loads(word)
        if _fits(json_type(inner), types) and _is_text(inner):
            return inner.strip()
    if "string" in types or kind is None:
        return _dumps(text)
    return word


def json_type(text: str) -> str | None:
    """JSON type of `text`, or None when it is no strict JSON. Numbers are never converted."""
    try:
        value = json.loads(
            text, parse_int=lambda _: 0, parse_float=lambda _: 0.5, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    return _type_name(value)


def _type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _fits(kind: str | None, types: frozenset[str]) -> bool:
    # `5.0` is an integer to JSON Schema, and `5` is a number.
    numeric = kind in ("integer", "number") and bool(types & {"integer", "number"})
    return kind is not None and (kind in types or numeric)


def _from_python(text: str) -> str | None:
    try:
        written = _dumps(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written if _is_text(written) else None


def _is_text(text: str) -> bool:
    """False when an escape in it stood for a lone surrogate, which no reply can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def resolve(reference: str, root: Mapping[str, Any]) -> object:
    """The part of `root` that a local reference such as `#/$defs/Point` names, or None."""
    if not reference.startswith("#/"):
        return None
    node: object = root
    for step in reference[2:].split("/"):
        node = _mapping(node).get(step.replace("~1", "/").replace("~0", "~"))
    return node


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
