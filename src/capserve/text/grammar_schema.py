"""Is a schema worth giving to the grammar library?

What would take it too long, or what it would follow for ever, is refused here; so is what no JSON
text can hold. Everything else is the library's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from capserve.text.arguments import MAX_SCHEMA_DEPTH, resolve

MOST_BYTES = 256 << 10
"""All enforced schemas of a request, as JSON. The largest tool lists seen in the wild have 50 KB;
three thousand properties, which is this much, take the library half a second."""

MOST_PARAMETERS = 1000
"""Of one function. The library descends for each: 1,500 were the end of a stack of 8 MiB."""

MOST_DESCENT = 4000
"""Levels of a request's schema with those of all definitions that it names, as the library descends
from one into the next: of objects in objects, 3,000 were the end of 8 MiB."""

MOST_FUNCTIONS = 2000
"""That a grammar may choose from: more would be too many symbols, and are so after seconds."""

MOST_GRAMMAR_CHARS = 4 << 20
"""Of a grammar's text: each parameter has the definitions that it names with it."""

MOST_CROSSED = 16
"""Each `pattern` in an allOf, or beside one, may double the automaton of the others: sixteen took
the library 0.4 s, and twice as many more than a minute."""

MOST_PATTERNS = 64
"""`patternProperties` of a schema. The library crosses each with each: a hundred took it 0.2 s,
three hundred 16 s."""

MOST_DEPTH = 64
"""Levels of JSON in one schema; one written by hand has below twenty."""

MOST_LITERAL_CHARS = 8192
"""One string in a schema. The library's time grows with the square of a literal's length: a
megabyte took it 20 s."""


MOST_FOLLOWED = 20_000
"""Places that are reached from a request's parameters through $ref, anyOf, oneOf and allOf, each
way to a place counted. Ten levels that double make a thousand of each parameter."""

_ROUNDS = 32
"""Each settles at least one more definition; in schemas that people write, two settle all."""


class Unsupported(Exception):
    """A schema says something that can't be enforced; the message names it."""


def size_of(schema: object) -> int:
    """Bytes of `schema` as JSON. Raises Unsupported for what is too deep, holds too long a string
    or is no JSON."""
    for depth, node in _nodes(schema):
        if depth > MOST_DEPTH:
            raise Unsupported(f"the schema is deeper than {MOST_DEPTH} levels")
        if isinstance(node, str) and len(node) > MOST_LITERAL_CHARS:
            raise Unsupported(
                f"the schema holds a string of {len(node)} characters, "
                f"the limit is {MOST_LITERAL_CHARS}"
            )
    try:
        return len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except ValueError as error:  # a lone surrogate, NaN or an infinity
        raise Unsupported(f"the schema is no JSON text: {error}") from None


def check_finite(root: Mapping[str, Any]) -> None:
    """Raises Unsupported when every value of `root` would have to hold another one without end."""
    finite: set[str] = set()
    references = {
        node["$ref"]
        for _, node in _nodes(root)
        if isinstance(node, Mapping) and isinstance(node.get("$ref"), str)
    }
    for _ in range(_ROUNDS):
        known = len(finite)
        for reference in references:
            if reference not in finite and _ends(resolve(reference, root), finite):
                finite.add(reference)
        if len(finite) == known:
            break
    else:
        return  # a long chain of definitions: not judged
    if not _ends(root, finite):
        raise Unsupported("the schema requires itself: no finite value satisfies it")


def check_shape(root: Mapping[str, Any]) -> None:
    """Raises Unsupported for what the library would descend into too deep, or cross too often."""
    patterns, crossed, references = 0, 0, set()
    waiting: list[tuple[object, bool]] = [(root, False)]
    while waiting:
        node, holds_too = waiting.pop()
        if isinstance(node, list):
            waiting.extend((part, holds_too) for part in node)
        if not isinstance(node, Mapping):
            continue
        if isinstance(node.get("$ref"), str):
            references.add(node["$ref"])
        if isinstance(node.get("patternProperties"), Mapping):
            patterns += len(node["patternProperties"])
        if isinstance(node.get("pattern"), str):
            crossed += holds_too or "$ref" in node or "allOf" in node
        waiting.extend((part, holds_too or key == "allOf") for key, part in node.items())
    if patterns > MOST_PATTERNS:
        raise Unsupported(f"it has {patterns} patternProperties, the limit is {MOST_PATTERNS}")
    if crossed > MOST_CROSSED:
        raise Unsupported(
            f"{crossed} patterns would have to hold beside others, the limit is {MOST_CROSSED}"
        )
    levels = _levels(root)
    for reference in references:
        levels += _levels(resolve(reference, root))
        if levels > MOST_DESCENT:
            raise Unsupported(
                f"the schema and its {len(references)} definitions have more than {MOST_DESCENT} "
                "levels"
            )


def _levels(node: object) -> int:
    return 1 + max(depth for depth, _ in _nodes(node))


def followed(parameters: Mapping[str, Any]) -> int:
    """Places that deciding the parameters' types will look at; counts to MOST_FOLLOWED + 1."""
    properties = parameters.get("properties")
    waiting: list[tuple[int, object]] = (
        [(0, schema) for schema in properties.values()] if isinstance(properties, Mapping) else []
    )
    count = 0
    while waiting and count <= MOST_FOLLOWED:
        depth, schema = waiting.pop()
        count += 1
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            continue
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append((depth + 1, resolve(reference, parameters)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(keyword), list):
                waiting.extend((depth + 1, branch) for branch in branches)
    return count


def _ends(schema: object, finite: set[str]) -> bool:
    """Has `schema` a value, if those references have one? Looks only where recursion can hide."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in finite:
        return False
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and isinstance(properties, Mapping) and _only(schema, "object"):
        for key in required:
            if isinstance(key, str) and not _ends(properties.get(key), finite):
                return False
    least = schema.get("minItems")
    if isinstance(least, int) and least > 0 and _only(schema, "array"):
        parts = schema.get("prefixItems")
        first = parts[0] if isinstance(parts, list) and parts else schema.get("items")
        if not _ends(first, finite):
            return False
    for keyword, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        branches = schema.get(keyword)
        if isinstance(branches, list) and not enough(_ends(b, finite) for b in branches):
            return False
    return True


def _only(schema: Mapping[str, Any], kind: str) -> bool:
    return schema.get("type") in (kind, [kind])


def _nodes(root: object) -> Iterator[tuple[int, object]]:
    """Every part of a JSON value with its level, keys included, without recursion."""
    waiting = [(0, root)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        if depth > MOST_DEPTH:
            continue
        if isinstance(node, Mapping):
            waiting.extend((depth + 1, part) for part in (*node.keys(), *node.values()))
        elif isinstance(node, list):
            waiting.extend((depth + 1, part) for part in node)
