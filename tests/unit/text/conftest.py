"""The embedded checkpoint's tokenizer and template, and the family's own templates if there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import capserve.nano
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
NANO = Path(next(iter(capserve.nano.__path__)))
SHARED = Path(os.environ.get("CAPSERVE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    return NANO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(NANO)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate.from_dir(NANO)


@pytest.fixture(scope="session")
def builder(tokenizer: Tokenizer, template: ChatTemplate) -> PromptBuilder:
    return PromptBuilder(tokenizer, template)


class Official:
    """The family's own templates by name; a test skips where the files are not."""

    def source(self, name: str) -> str:
        path = SHARED / "facts" / "templates" / f"{name}.jinja"
        if not path.is_file():
            pytest.skip(f"{path.name} is not here: set CAPSERVE_SHARED to the folder that has it")
        return path.read_text(encoding="utf-8")

    def __call__(self, name: str) -> ChatTemplate:
        return ChatTemplate(self.source(name))


@pytest.fixture(scope="session")
def official() -> Official:
    return Official()
