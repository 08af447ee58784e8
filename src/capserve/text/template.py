"""How does a checkpoint's own template turn a conversation into text?

Jinja2 in its immutable sandbox, with the helpers that Hugging Face templates expect. Messages are
data, never template source, and whatever a template does with them ends as text or as one
`InvalidRequestError`. What templates differ in is found out once, by rendering small probes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from capserve.errors import CheckpointError, InvalidRequestError
from capserve.text.equivalence import parse_arguments
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.messages import Conversation, Message, Role, ToolCall

MAX_RENDERED_CHARS = 64 << 20
"""Twice the largest body that is accepted: a loop in a template ends here, not in swap."""

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""How hard a model may be told to think, in the words of all clients together, ascending."""

RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt"})

_CLIENT_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises on data that it did not expect."""


_DICT_ATTRIBUTES = frozenset(dir(dict))


_REMEMBERED_VERDICTS = 512
"""More names than any template has; a name may come from data, so there is a bound."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a short way to the fields of messages.

    Templates say `message.role` thousands of times a prompt, and the stock look-up first fails to
    find an attribute. For a plain dict without such an attribute the outcome is the same item.
    The sandbox's verdict on an attribute depends on its name and the object's type alone, so it is
    asked once for each.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._verdicts: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = super().is_safe_attribute(obj, attr, value)
            if len(self._verdicts) < _REMEMBERED_VERDICTS:
                self._verdicts[key] = verdict
        return verdict


class ChatTemplate:
    """A compiled template. Rendering is a pure function of its arguments, safe in any thread."""

    def __init__(
        self,
        source: str,
        *,
        clock: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Raises CheckpointError when `source` is no template."""
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._reserved = RESERVED_KWARGS | environment.globals.keys()
        self._max_chars = max_chars
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            # The last two come from Python's own compiler: too many loops in each other, too deep.
            raise CheckpointError(
                f"the chat template does not compile: {error}", param="chat_template"
            ) from error
        self.switches = frozenset(find_undeclared_variables(environment.parse(source)))
        """Names that the template asks for, those that it is always given among them."""
        self.takes_late_system = self._probe_late_system()
        self.efforts = self._probe_efforts()
        """Which of EFFORTS it knows, in their order."""
        self.stripped: frozenset[Role] = self._probe_stripped()
        """Roles whose content is trimmed."""

    @classmethod
    def from_dir(cls, path: str | Path, override: Path | None = None) -> ChatTemplate:
        """The file `override`, else `chat_template.jinja`, else `chat_template` of
        `tokenizer_config.json`.

        Raises CheckpointError, naming the file, when there is none or it can't be used.
        """
        folder = Path(path)
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        if override is not None:
            file, source = override, _read(override)
        elif file.is_file():
            source = _read(file)
        elif config.is_file() and (configured := _configured(config)) is not None:
            file, source = config, configured
        else:
            raise CheckpointError(
                f"{folder} has no chat template: neither {file.name} nor one in {config.name}",
                param="chat_template",
            )
        try:
            return cls(source)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error.message}", param=error.param) from error

    def render(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        """Text of the conversation.

        Raises InvalidRequestError: `messages` when the template refuses them (with its own words),
        `chat_template_kwargs` when a switch has the name of something that the template is given.
        """
        messages: Sequence[Message] = conversation.messages
        if not self.takes_late_system:
            messages = _fold_late_system(messages)
        return self._render(
            messages,
            tools=list(conversation.tools) or None,
            kwargs=conversation.template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
        )

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = False,
    ) -> str:
        if taken := sorted(self._reserved & kwargs.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs: {taken[0]!r} can't be set by a request",
                param="chat_template_kwargs",
            )
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self._template.generate(
                # One mapping, not keywords: a switch may be named like a parameter of the method.
                {
                    "messages": [_as_mapping(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                    **kwargs,
                }
            ):
                pieces.append(piece)
                chars += len(piece)
                if chars > self._max_chars:
                    raise InvalidRequestError(
                        f"messages: the rendered prompt passes {self._max_chars} characters",
                        param="messages",
                    )
        except _CLIENT_FAULTS as error:
            raise InvalidRequestError(
                f"messages: the chat template refuses them: {error}", param="messages"
            ) from error
        return "".join(pieces)

    def _probe_efforts(self) -> tuple[str, ...]:
        if "reasoning_effort" not in self.switches:
            return ()
        known = []
        for effort in EFFORTS:
            try:
                self._render(
                    (Message("user", "q"),),
                    kwargs={"reasoning_effort": effort},
                    add_generation_prompt=True,
                )
            except InvalidRequestError:
                continue
            known.append(effort)
        return tuple(known)

    def _probe_late_system(self) -> bool:
        try:
            self._render((Message("user", "a"), Message("system", "b"), Message("user", "c")))
        except InvalidRequestError:
            return False
        return True

    def _probe_stripped(self) -> frozenset[Role]:
        call = Message("assistant", tool_calls=(ToolCall("f", "{}"),))
        probes: dict[Role, tuple[Message, ...]] = {
            "system": (Message("system", "x"), Message("user", "q")),
            "user": (Message("user", "x"),),
            "assistant": (Message("user", "q"), Message("assistant", "x"), Message("user", "q")),
            "tool": (Message("user", "q"), call, Message("tool", "x")),
        }
        found: set[Role] = set()
        for role, probe in probes.items():
            padded = tuple(
                replace(m, content=" \nx\n ") if m.role == role and m.content == "x" else m
                for m in probe
            )
            try:
                plain, other = self._render(probe), self._render(padded)
            except InvalidRequestError:
                continue
            if plain == other:
                found.add(role)
        return frozenset(found)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} can't be read: {error}", param="chat_template") from error


def _configured(file: Path) -> str | None:
    """The template in a `tokenizer_config.json`; None when that has none."""
    try:
        config = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}", param="chat_template") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file} holds a {type(config).__name__}, not an object", param="chat_template"
        )
    source = config.get("chat_template")
    if isinstance(source, list):  # older checkpoints name several
        entries = [entry for entry in source if isinstance(entry, dict)]
        default = next((entry for entry in entries if entry.get("name") == "default"), None)
        if default is None:
            return None
        source = default.get("template")
        if source is None:
            raise CheckpointError(
                f"{file}: the default entry of chat_template has no template",
                param="chat_template",
            )
    if source is not None and not isinstance(source, str):
        raise CheckpointError(
            f"{file}: chat_template is a {type(source).__name__}, not text", param="chat_template"
        )
    return source


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes < > & ' for HTML, which would give the model other tokens.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _as_mapping(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.role != "assistant":
        return fields
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        arguments = [parse_arguments(call.arguments) for call in message.tool_calls]
        if None in arguments:
            fields["content"] = _with_spelled_calls(message, arguments)
        else:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": value},
                }
                for call, value in zip(message.tool_calls, arguments, strict=True)
            ]
    return fields


def _with_spelled_calls(message: Message, arguments: Sequence[dict[str, Any] | None]) -> str:
    """Content followed by every call as text, for a message with arguments that are no object.

    Templates take objects only. A broken call can't become one without inventing a parameter, so it
    is shown as the model would have written it, which is also how a reply's broken call reaches the
    client: as content. All calls of the message go the same way, because results follow by order.
    """
    blocks = []
    for call, value in zip(message.tool_calls, arguments, strict=True):
        if value is None:
            body = call.arguments + "\n"
        else:
            body = "".join(
                spell_parameter(k, v if isinstance(v, str) else _tojson(v))
                for k, v in value.items()
            )
        blocks.append(spell_call(call.name, body))
    content = message.content.strip()
    return (content + "\n\n" if content else "") + "\n".join(blocks)


def _fold_late_system(messages: Sequence[Message]) -> list[Message]:
    """System messages where a template refuses them, put where it takes them.

    Those at the head are joined to the first: same authority, and the head is one block anyway.
    Later ones stay where they are, as a marked user turn: moved to the head they would change the
    prompt from its first tokens on, and nothing read so far could be used again.
    """
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    folded: list[Message] = []
    if head:
        parts = [message.content for message in messages[:head]]
        folded.append(replace(messages[0], content="\n\n".join(part for part in parts if part)))
    for message in messages[head:]:
        if message.role == "system":
            content = f"<system>\n{message.content.strip()}\n</system>"
            folded.append(Message("user", content))
        else:
            folded.append(message)
    return folded
