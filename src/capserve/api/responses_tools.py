"""Which tools does a request to `/v1/responses` offer, and what are they called on either side?

The model knows functions only. A function in a namespace is shown under its own name, or with the
namespace before it where two would be called alike; a tool that takes free text is shown as a
function with one string. The way back gives each call the name and the form that its client knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capserve.api.errors import UnsupportedValueError
from capserve.api.responses_schema import (
    HOSTED_TOOLS,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    read,
)
from capserve.api.schemas import MAX_TOOLS, quote
from capserve.api.strict_json import type_name
from capserve.errors import InvalidRequestError
from capserve.text.equivalence import parse_arguments

Json = dict[str, Any]

FREE_TEXT = "input"
"""The one parameter of a tool that takes free text."""

_SHOWN = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class WireName:
    """What a tool is called by its client."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Offered:
    """The tools of one request."""

    tools: list[Json] = field(default_factory=list)
    """As the model sees them, in the chat form."""
    names: dict[str, WireName] = field(default_factory=dict)
    """The name that the model writes -> the client's."""
    notes: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where each of `tools` stands in the request: `tools[0].tools[3]`."""
    _shown: dict[WireName, str] = field(default_factory=dict)

    def wire(self, shown: str) -> WireName:
        """The client's name for a call of the model, which may call what was never offered."""
        return self.names.get(shown, WireName(shown))

    def shown(self, name: str, namespace: str | None) -> str:
        """The model's name for a tool of the client."""
        for custom in (False, True):
            if shown := self._shown.get(WireName(name, namespace, custom)):
                return shown
        return name

    def show(self, definition: Json, wire: WireName, place: str) -> None:
        shown = wire.name
        if shown in self.names and wire.namespace is not None:
            shown = f"{wire.namespace}__{wire.name}"
        self.names[shown] = wire
        self._shown[wire] = shown
        self.tools.append({"type": "function", "function": definition | {"name": shown}})
        self.places.append(place)


def offered(sent: Sequence[Any]) -> Offered:
    """Raises `InvalidRequestError` naming `tools[i].field`."""
    table = Offered()
    # Names outside of namespaces come first: only the others can be told apart by a prefix.
    grouped: list[tuple[str, Any, str]] = []
    for i, raw in enumerate(sent):
        at = f"tools[{i}]"
        if _kind(raw, at) == "namespace":
            group = read(NamespaceTool, raw, at)
            grouped += [
                (f"{at}.tools[{j}]", tool, group.name) for j, tool in enumerate(group.tools)
            ]
        else:
            _add(table, raw, at, None)
    if len(table.tools) + len(grouped) > MAX_TOOLS:
        count = len(table.tools) + len(grouped)
        raise InvalidRequestError(
            f"tools must have at most {MAX_TOOLS} items, namespaces included, got {count}.",
            param="tools",
        )
    for at, tool, namespace in grouped:
        _add(table, tool, at, namespace)
    return table


def _kind(raw: object, at: str) -> object:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{at} must be an object, got {type_name(raw)}.", param=at)
    return raw.get("type")


def _add(table: Offered, raw: Any, at: str, namespace: str | None) -> None:
    kind = _kind(raw, at)
    if kind == "function":
        function = read(FunctionTool, raw, at)
        definition = {key: raw[key] for key in raw if key in _SHOWN}
        table.show(definition, WireName(function.name, namespace), at)
    elif kind == "custom":
        custom = read(CustomTool, raw, at)
        parameters = {
            "type": "object",
            "properties": {FREE_TEXT: {"type": "string"}},
            "required": [FREE_TEXT],
        }
        definition = {"name": custom.name, "description": custom.description or ""}
        definition |= {"parameters": parameters}
        table.show(definition, WireName(custom.name, namespace, custom=True), at)
    elif isinstance(kind, str) and kind in HOSTED_TOOLS:
        table.notes.append(f"left out: {at}, since nothing here runs a tool of type {kind!r}")
    else:
        raise InvalidRequestError(
            f"{at}.type must be 'function', 'custom' or 'namespace', got {quote(kind)}.",
            param=f"{at}.type",
        )


def free_text(arguments: str) -> str:
    """What the model wrote for a tool that takes free text."""
    value = parse_arguments(arguments)
    text = None if value is None else value.get(FREE_TEXT)
    return text if isinstance(text, str) else arguments


def as_arguments(text: str) -> str:
    """A call with free text, as the model wrote it."""
    return json.dumps({FREE_TEXT: text}, ensure_ascii=False)


def choice(sent: object, table: Offered) -> object:
    """`tool_choice` in the chat's form; what neither knows is left for the chat's own check."""
    if isinstance(sent, Mapping) and sent.get("type") in ("function", "custom"):
        name, namespace = sent.get("name"), sent.get("namespace")
        if not isinstance(name, str):
            raise InvalidRequestError(
                f"tool_choice.name must be a string, got {type_name(name)}.",
                param="tool_choice.name",
            )
        shown = table.shown(name, namespace if isinstance(namespace, str) else None)
        return {"type": "function", "function": {"name": shown}}
    if isinstance(sent, Mapping) and sent.get("type") == "allowed_tools":
        return _allowed(sent, table)
    if isinstance(sent, Mapping):
        raise UnsupportedValueError(
            "tool_choice.type must be 'function', 'custom' or 'allowed_tools', "
            f"got {quote(sent.get('type'))}.",
            param="tool_choice.type",
        )
    return sent


def _allowed(sent: Mapping[str, Any], table: Offered) -> object:
    """`allowed_tools` in the chat's form. Those that nothing here runs were left out already."""
    mode, tools = sent.get("mode"), sent.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(
            f"tool_choice.mode must be 'auto' or 'required', got {quote(mode)}.",
            param="tool_choice.mode",
        )
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        got = f"{len(tools)} items" if isinstance(tools, list) else type_name(tools)
        raise InvalidRequestError(
            f"tool_choice.tools must be an array of 1 to {MAX_TOOLS} items, got {got}.",
            param="tool_choice.tools",
        )
    names = []
    for i, tool in enumerate(tools):
        at = f"tool_choice.tools[{i}]"
        kind = _kind(tool, at)
        if isinstance(kind, str) and kind in HOSTED_TOOLS:
            continue
        name, namespace = tool.get("name"), tool.get("namespace")
        shown = ""
        if kind in ("function", "custom") and isinstance(name, str):
            shown = table.shown(name, namespace if isinstance(namespace, str) else None)
        if shown not in table.names:
            raise InvalidRequestError(
                f"{at} must be one of the {len(table.tools)} tools, by its type and name; got "
                f"{quote(name)} of type {quote(kind)}.",
                param=at,
            )
        names.append({"type": "function", "function": {"name": shown}})
    if not names:
        if mode == "required":
            raise InvalidRequestError(
                f"tool_choice demands a call, and nothing here runs any of the {len(tools)} tools "
                "that it allows.",
                param="tool_choice.tools",
            )
        return "none"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
