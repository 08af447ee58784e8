"""What does one training conversation look like, and which of its tokens count how much?

A conversation is a system prompt, tools and a few scenes, with reasoning or without. The
checkpoint's own template renders it, so training sees exactly what a server will send; the rendered
text is then cut into what the model reads and what it has to write.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.nano.scenes import CHAT_SCENES, TOOL_SCENES, Dialog
from recipes.nano.toolbox import make_toolset
from recipes.nano.words import Rng

NANO = Path(__file__).parents[2] / "src" / "capserve" / "nano"
"""The shipped checkpoint: template, tokenizer settings and config are taken from there."""


class Loss(IntEnum):
    """Why a token is in the row, which decides its weight in the loss."""

    PADDING = 0
    PROMPT = 1
    REPLY = 2
    CODE = 3


@dataclass(frozen=True)
class Sample:
    """One conversation, as a chat request would carry it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    preserve_thinking: bool


def make_sample(rng: Rng) -> Sample:
    tooled = rng.random() < 0.75
    scenes: list[Any] = []
    needed: set[str] = set()
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        if tooled and rng.random() < 0.9:
            scene, needs = rng.choice(TOOL_SCENES)
            needed |= needs
        else:
            scene = rng.choice(CHAT_SCENES)
        scenes.append(scene)
    tools = make_toolset(rng, needed, extra=rng.randint(1, 5)) if tooled else {}
    dialog = Dialog(rng, tools)
    for scene in scenes:
        scene(dialog)
    messages = dialog.messages
    if rng.random() < 0.5:  # the model must know both ways: with reasoning and without
        for message in messages:
            message.pop("reasoning_content", None)
    system = rng.choice(
        ["", "You are a helpful assistant.", "You are a coding agent.", "Be brief."]
    )
    if system:
        messages.insert(0, {"role": "system", "content": system})
    schemas = [tool.schema for tool in tools.values()] or None
    return Sample(messages, schemas, preserve_thinking=rng.random() < 0.07)


class Renderer:
    """The checkpoint's template, with the `tojson` that chat templates expect."""

    def __init__(self, template: Path = NANO / "chat_template.jinja") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template.read_text(encoding="utf-8"))

    def text(self, sample: Sample) -> str:
        return self._template.render(
            messages=sample.messages,
            tools=sample.tools,
            preserve_thinking=sample.preserve_thinking,
        )

    def pieces(self, sample: Sample) -> list[tuple[str, Loss]]:
        """The rendered text in pieces that are tokenized on their own."""
        return split_replies(self.text(sample))


_REPLY = re.compile(
    r"(<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?)(.*?<\|im_end\|>)", re.DOTALL
)
"""Head (what a server puts there as the generation prompt) and what the model then writes."""


def split_replies(text: str) -> list[tuple[str, Loss]]:
    pieces: list[tuple[str, Loss]] = []
    end = 0
    for found in _REPLY.finditer(text):
        pieces.append((text[end : found.start()] + found[1], Loss.PROMPT))
        pieces.append((found[2], Loss.REPLY))
        end = found.end()
    return [*pieces, (text[end:], Loss.PROMPT)]


def _refuse(message: str) -> None:
    raise ValueError(message)
