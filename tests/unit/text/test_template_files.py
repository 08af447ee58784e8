"""A template file that can't be used is one error that names the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capserve.errors import CheckpointError
from capserve.text.messages import Conversation, Message
from capserve.text.template import ChatTemplate

SOURCE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DEEP = "{% for a in b %}" * 30 + "{% endfor %}" * 30


def rendered(template: ChatTemplate) -> str:
    return template.render(Conversation((Message("user", "hi"),)), add_generation_prompt=False)


def with_config(folder: Path, template: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize(
    "template",
    [
        SOURCE,
        [{"name": "rag", "template": "no"}, {"name": "default", "template": SOURCE}],
        ["no entry", {"name": "default", "template": SOURCE}],
    ],
    ids=["text", "a list of named ones", "a list with something else"],
)
def test_the_template_of_the_tokenizer_configuration_is_used(tmp_path: Path, template: Any):
    with_config(tmp_path, template)
    assert rendered(ChatTemplate.from_dir(tmp_path)) == "user: hi\n"


def test_the_file_of_its_own_is_used_first_and_an_override_before_it(tmp_path: Path):
    with_config(tmp_path, "third")
    (tmp_path / "chat_template.jinja").write_text("second")
    (tmp_path / "other").write_text("first")
    assert rendered(ChatTemplate.from_dir(tmp_path, tmp_path / "other")) == "first"
    assert rendered(ChatTemplate.from_dir(tmp_path)) == "second"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "can't be read"),
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "a list, not an object"),
        (b'{"chat_template": 5}', "a int, not text"),
        (b'{"chat_template": {"default": "x"}}', "a dict, not text"),
        (b'{"chat_template": [{"name": "default"}]}', "default entry"),
        (b'{"chat_template": [{"name": "default", "template": 5}]}', "a int, not text"),
        (b'{"chat_template": "{% for"}', "does not compile"),
    ],
)
def test_a_broken_tokenizer_configuration_is_named(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        ChatTemplate.from_dir(tmp_path)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("overridden", [False, True], ids=["own file", "override"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "can't be read"),
        (b"{% if", "does not compile"),
        (DEEP.encode(), "does not compile"),
    ],
    ids=["no text", "no template", "loops that Python refuses"],
)
def test_a_broken_template_file_is_named(
    tmp_path: Path, content: bytes, words: str, overridden: bool
):
    file = tmp_path / ("mine" if overridden else "chat_template.jinja")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        ChatTemplate.from_dir(tmp_path, file if overridden else None)
    assert str(file) in caught.value.message


def test_a_missing_override_is_named_even_where_the_model_has_a_template(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    with pytest.raises(CheckpointError, match="no-such-file"):
        ChatTemplate.from_dir(tmp_path, tmp_path / "no-such-file")


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}, {"chat_template": []}])
def test_a_model_without_a_template_is_told_both_places(tmp_path: Path, config: Any):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja nor one in tokenizer_config"):
        ChatTemplate.from_dir(tmp_path)


def test_a_switch_named_like_a_parameter_of_our_own_reaches_the_template():
    template = ChatTemplate("{{ args }}{{ kwargs }}{{ context }}")
    names = ("self", "args", "kwargs", "context")
    conversation = Conversation(
        (Message("user", "hi"),), template_kwargs={name: f"<{name}>" for name in names}
    )
    text = template.render(conversation, add_generation_prompt=False)
    assert text == "<args><kwargs><context>"
