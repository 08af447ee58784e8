"""How do the settings become command-line flags?

Each field of `Settings` is one flag, with the panel and help text that the field carries. Values
stay the text that was typed: `load_settings` validates flags and environment variables alike, so a
bad value has one message wherever it came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from pydantic import ByteSize

from capserve.config import Settings, env_name, flag_name, flag_of, is_list, load_settings


def takes_settings(panels: tuple[str, ...] | None = None) -> Callable[..., Callable[..., None]]:
    """Give a command a flag for each setting in `panels` (None: all), and call it with `Settings`.

    The command's first parameter receives the settings; its other parameters stay its own flags.
    """
    names = [
        name for name in Settings.model_fields if panels is None or flag_of(name).panel in panels
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def wrapper(**values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            for name in filter(is_list, names):
                flags[name] = flags[name] or None  # an absent list flag comes as []
            command(load_settings(flags), **values)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in [*own, *(_parameter(name) for name in names)]
        ]
        face: Any = wrapper  # typer reads a function's name, docstring, signature and annotations
        face.__name__, face.__doc__ = command.__name__, command.__doc__
        face.__signature__ = inspect.Signature(parameters)
        face.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    flag, field = flag_of(name), Settings.model_fields[name]
    kind: Any = str | None
    metavar: str | None = _metavar(field.annotation)
    declaration = flag_name(name)
    if field.annotation is bool:
        kind, metavar = bool | None, None
        declaration = f"{declaration}/--no-{declaration.removeprefix('--')}"
    elif is_list(name):
        kind = list[str] | None
    option = typer.Option(
        declaration,
        metavar=metavar,
        help=f"{flag.help} [dim]{_default(field.default)}{env_name(name)}[/]",
        show_default=False,
        rich_help_panel=flag.panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _default(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    text = value.human_readable() if isinstance(value, ByteSize) else value
    return f"default {text:g}; " if isinstance(text, float) else f"default {text}; "


def _metavar(annotation: Any) -> str:
    choices = get_args(annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    kinds = [kind for kind in choices if kind is not type(None)] or [annotation]
    return {"int": "INT", "float": "NUMBER", "ByteSize": "BYTES"}.get(kinds[0].__name__, "TEXT")
