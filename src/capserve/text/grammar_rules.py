"""What does a request demand of the reply's form, and how is that told to the grammar library?

`Constraint` is the demand, in words of messages and tools; `Rules` are the lines of its grammar,
each with the field of the request that it came from. What can't be kept is refused by that name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from capserve.errors import InvalidRequestError
from capserve.text.grammar_calls import SHARED, loose_call, strict_call
from capserve.text.grammar_exact import check_exact
from capserve.text.grammar_schema import (
    MOST_BYTES,
    MOST_FOLLOWED,
    MOST_FUNCTIONS,
    MOST_GRAMMAR_CHARS,
    Unsupported,
    check_finite,
    check_shape,
    followed,
    size_of,
)

_JSON = {"whitespace_pattern": r"(\x20|\n\x20{0,32}|\n\t{0,16})"}
"""One space, or a new line with its indentation: room for compact and pretty forms, and no endless
blank for a model that has lost its way."""


@dataclass(frozen=True)
class Constraint:
    """What the request demands of the reply's form."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions as the request has them, `{"type": "function", "function": {...}}` or bare."""
    choice: Literal["none", "auto", "required"] = "auto"
    function: str | None = None
    """The reply is a call of this function; stands above `choice`."""
    allowed: tuple[str, ...] | None = None
    """Functions that may be called; None: all that there are. Some of them must be tools."""
    parallel: bool = True
    """False: at most one call, and the reply ends with it."""
    response_format: Mapping[str, Any] | None = None
    """As OpenAI has it: type `text`, `json_object`, or `json_schema` with its `json_schema`."""
    starts_in_reasoning: bool = False

    @property
    def must_call(self) -> bool:
        return self.function is not None or self.choice == "required"

    def functions(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Those that may be called, each with its place among the tools.

        Raises InvalidRequestError for a tool that has no name.
        """
        every = list(_functions(self.tools))
        named = self.allowed if self.function is None else (self.function,)
        if self.choice == "none" and self.function is None:
            return []
        return [(i, f) for i, f in enumerate(every) if named is None or f["name"] in named]

    def demands(self) -> bool:
        """Whether there is anything to keep to: else no grammar is made. As `functions` raises."""
        offered = self.functions()
        return (
            self.must_call
            or json_schema(self.response_format) is not None
            or any(function.get("strict") is True for _, function in offered)
            or (bool(offered) and not self.parallel)
            or (self.choice != "none" and len(offered) < len(self.tools))
        )


class Rules:
    """The grammar's text: lines, each with the request's field that it came from."""

    def __init__(self, constraint: Constraint, *, tolerant: bool) -> None:
        self._constraint = constraint
        self._tolerant = tolerant
        """Only what is called strict has to be kept."""
        self.has_promised_more = False
        """A schema is enforced that nobody called strict."""
        self._lines: list[tuple[str, str]] = []
        self._bytes = self._followed = self._chars = 0
        self._must_call = constraint.must_call
        self._offered = constraint.functions()
        if self._must_call and not self._offered:
            named = constraint.function
            raise refused(
                "no tool to call" if named is None else f"no tool is named {named!r}", "tool_choice"
            )

    def _count(self, schema: Mapping[str, Any]) -> None:
        self._bytes += size_of(schema)
        if self._bytes > MOST_BYTES:
            raise Unsupported(f"the schemas have {self._bytes} bytes, the limit is {MOST_BYTES}")
        check_shape(schema)
        check_finite(schema)
        check_exact(schema)
        self._followed += followed(schema)
        if self._followed > MOST_FOLLOWED:
            raise Unsupported(f"$ref and anyOf lead to more than {MOST_FOLLOWED} places")

    def build(self) -> list[tuple[str, str]] | None:
        """None when nothing is demanded. Raises InvalidRequestError."""
        c = self._constraint
        if not c.demands():
            return None
        schema = None if self._must_call else json_schema(c.response_format)
        self._add_calls()
        starts = self._content(schema)
        start = starts[0]
        if c.starts_in_reasoning:
            thought = f'TEXT? RCHUNK* ("</think>" "\\n\\n"? ({start})'
            if self._offered:
                thought += f' | "<tool_call>" {starts[1]}'
            start = thought + ")"
        owner = "response_format" if schema is not None else "tools"
        lines = [(f"start: {start}", owner)]
        marks = r"<(\/think|tool_call)>" if self._offered else r"<\/think>"
        lines += [(line, owner) for line in SHARED.strip().splitlines()]
        lines.append((f"RCHUNK: /<[^<]*/ & ~/{marks}(?s:.*)/", owner))
        lines.append((r"FCHUNK: /<[^<]*/ & ~/<(tool_call>|function=)(?s:.*)/", owner))
        return lines + self._lines

    def _content(self, schema: Mapping[str, Any] | None) -> tuple[str, str]:
        """The reply's content, and what follows a `<tool_call>` in its reasoning."""
        one = '"\\n<function=" call "\\n</tool_call>"'
        more = f'("\\n"? "<tool_call>" {one})*' if self._constraint.parallel else ""
        calls = f'"<tool_call>" {one} {more}'
        if schema is not None:
            try:
                self._count(schema)
            except Unsupported as error:
                raise refused(str(error), "response_format") from None
            self._lines.append((f"json: %json {json.dumps(schema)}", "response_format"))
            return ("json" if not self._offered else f"json | {calls}"), f"{one} {more}"
        if self._must_call:
            return calls, f"{one} {more}"
        call = f'("<tool_call>" {one} | "<function=" call)'
        if not self._constraint.parallel:
            return f"TEXT? FCHUNK* {call}?", one
        return (
            f"TEXT? FCHUNK* ({call} TEXT? FCHUNK*)*",
            f"{one} TEXT? FCHUNK* ({call} TEXT? FCHUNK*)*",
        )

    def _add_calls(self) -> None:
        if not self._offered:
            return
        if (count := len(self._offered)) > MOST_FUNCTIONS:
            raise refused(
                f"{count} tools can't be enforced, {MOST_FUNCTIONS} are the most", "tools"
            )
        names = " | ".join(f"t{i}" for i, _ in self._offered)
        self._lines.append((f"call: {names}", "tools"))
        for i, function in self._offered:
            param = f"tools[{i}]"
            strict = function.get("strict") is True
            parameters = function.get("parameters") or {}
            if not isinstance(parameters, Mapping):
                raise refused("parameters must be an object", param)
            try:
                rules = self._rules(f"t{i}", function["name"], parameters, strict)
                self._chars += sum(map(len, rules))
                if self._chars > MOST_GRAMMAR_CHARS:
                    raise Unsupported(f"the grammar has more than {MOST_GRAMMAR_CHARS} characters")
            except Unsupported as error:
                raise refused(f"{function['name']}: {error}", param) from None
            self._lines += [(line, param) for line in rules]

    def _rules(
        self, prefix: str, name: str, parameters: Mapping[str, Any], strict: bool
    ) -> list[str]:
        if not strict:
            if self._tolerant or not self._must_call:
                return loose_call(prefix, name)
            self.has_promised_more = True
        self._count(parameters)
        return strict_call(prefix, name, parameters)


def _functions(tools: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refused("a tool needs a function with a name", f"tools[{i}]")
        yield function


def json_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The schema that the reply's content has to satisfy, None when it is free."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"x-guidance": _JSON, "type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema, **rest}}:
            lenient = rest.get("strict") is not True
            return {**schema, "x-guidance": {**_JSON, "lenient": lenient}}
        case _:
            raise refused(
                "type is text, json_object or json_schema with an object json_schema.schema",
                "response_format",
            )


def refused(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {reason}", param=param)
