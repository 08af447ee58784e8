"""How is a refused field told to its sender?

The validation library finds the first wrong field; this module says it in one sentence that names
the field, the limit and the value, and puts the field's path into `param`
(`messages[2].content[0].type`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from capserve.api.errors import UnsupportedValueError
from capserve.api.schemas import quote
from capserve.api.strict_json import type_name
from capserve.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_LENGTHS = {
    "too_short": ("min_length", "at least", "items"),
    "too_long": ("max_length", "at most", "items"),
    "string_too_short": ("min_length", "at least", "characters"),
    "string_too_long": ("max_length", "at most", "characters"),
}


def validated(model: type[M], body: dict[str, Any]) -> M:
    """`body` as a `model`, or one `InvalidRequestError` about its first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as refusal:
        raise _explained(refusal.errors(include_url=False)[0]) from None


def _explained(error: ErrorDetails) -> InvalidRequestError:
    kind, value = error["type"], error["input"]
    context = error.get("ctx", {})
    param = _path(error["loc"])
    error_type = InvalidRequestError
    match kind:
        case "missing":
            fault = "is required"
        case "union_tag_not_found":
            param, fault = f"{param}.role", "is required"
        case "union_tag_invalid":
            roles = context["expected_tags"].replace("'", "")
            param, fault = f"{param}.role", f"must be one of {roles}; got {quote(value['role'])}"
        case "literal_error":
            fault = f"must be {context['expected']}, got {quote(value)}"
        case _ if kind in _BOUNDS:
            key, words = _BOUNDS[kind]
            fault = f"must be {words} {context[key]:g}, got {quote(value)}"
        case _ if kind in _LENGTHS:
            key, words, unit = _LENGTHS[kind]
            fault = f"must have {words} {context[key]} {unit}, got {len(value)}"
        case _ if kind in _TYPES:
            scalar = isinstance(value, bool | int | float | str)
            shown = quote(value) if scalar else type_name(value)
            fault = f"must be {_TYPES[kind]}, got {shown}"
        case _ if "text" in context:
            param, fault = param + context["at"], context["text"]
            if kind == UnsupportedValueError.code:
                error_type = UnsupportedValueError
        case _:
            fault = f"is not valid: {error['msg']}"
    refusal = error_type(f"{param} {fault}.", param=param)
    if fault == "is required":
        refusal.code = "missing_required_parameter"
    return refusal


def _path(loc: Sequence[int | str]) -> str:
    """`("messages", 0, "user", "content")` -> `messages[0].content`."""
    parts = list(loc)
    # A message's own role stands in the path, since the role chose which fields it may have.
    if parts[:1] == ["messages"] and len(parts) > 2 and parts[2] in _ROLES:
        del parts[2]
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
