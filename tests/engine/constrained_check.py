"""Is a value what a schema says, formats included?

By the jsonschema package; it checks some formats only when other packages are there, so those that
the tests use are checked here, by the standard library or by a pattern of the RFC.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker

_OFFSET = r"([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?{_OFFSET}"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DURATION = r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)"


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _date_time(text: str) -> bool:
    date, time = re.split("[tT ]", text, maxsplit=1)
    return bool(datetime.date.fromisoformat(date)) and _matches(_TIME)(time)


CHECKS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": _matches(_TIME),
    "date-time": _date_time,
    "duration": _matches(_DURATION),
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "email": _matches(r"[^@\s]+@[^@\s]+"),
    "hostname": lambda text: len(text) <= 253 and _matches(rf"{_LABEL}(\.{_LABEL})*")(text),
    "uri": lambda text: bool(urlsplit(text).scheme) and text.isascii() and " " not in text,
}

CHECKER = FormatChecker(formats=())
for _name, _check in CHECKS.items():
    CHECKER.checks(_name, raises=ValueError)(
        lambda value, check=_check: not isinstance(value, str) or bool(check(value))
    )


def formats_in(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(formats_in, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["format"]} if isinstance(schema.get("format"), str) else set()
    return own.union(*map(formats_in, schema.values()))


def check(value: Any, schema: Any) -> None:
    """Raises ValidationError when `value` is not what `schema` says."""
    Draft202012Validator(schema, format_checker=CHECKER).validate(value)
