"""Messages are rendered as the checkpoint's template says; whatever it refuses is a 400."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest

from capserve.errors import CheckpointError, InvalidRequestError
from capserve.text.messages import Conversation, Message, ToolCall
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

S, U, A, R = (
    lambda text: Message("system", text),
    lambda text: Message("user", text),
    lambda text="", **kw: Message("assistant", text, **kw),
    lambda text: Message("tool", text),
)
OFFICIAL = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")


def call(arguments: str, name: str = "read") -> ToolCall:
    return ToolCall(name, arguments, "call_1")


def render(template, *messages, tools=(), prompt=True, **kwargs) -> str:
    return template.render(Conversation(messages, tools, kwargs), add_generation_prompt=prompt)


def test_the_embedded_template_renders_a_tool_step(template):
    text = render(
        template,
        U("Do"),
        A("ok", reasoning="R1", tool_calls=(call('{"path": "a.txt", "n": 3}'),)),
        R("one"),
    )
    assert text == (
        "<|im_start|>user\nDo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR1\n</think>\n\nok\n\n"
        "<tool_call>\n<function=read>\n<parameter=path>\na.txt\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_an_official_template_renders_the_documented_example(official):
    history = (S("Sys"), U("Q1"), A("A1", reasoning="R1"), U("Q2"))
    head = "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n"
    tail = "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    plain = "<|im_start|>assistant\nA1<|im_end|>\n"
    kept = "<|im_start|>assistant\n<think>\nR1\n</think>\n\nA1<|im_end|>\n"
    template = official("qwen3_6")
    assert render(template, *history) == head + plain + tail
    assert render(template, *history, preserve_thinking=True) == head + kept + tail


def test_tools_are_shown_as_they_were_sent(template):
    tool = {"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "a": 1.0}}
    text = render(template, U("q"), tools=(tool,))
    assert json.dumps(tool, ensure_ascii=False) + "\n</tools>" in text


@pytest.mark.parametrize("empty", ["", " ", "null", "{}", "{ }"])
def test_a_call_without_arguments_has_no_parameters(template, empty):
    text = render(template, U("q"), A(tool_calls=(call(empty),)), R("x"))
    assert "<tool_call>\n<function=read>\n</function>\n</tool_call>" in text


BROKEN = ["{", "[1]", "3", '"text"', "{'a': 1}", '{"a": "\\ud800"}', "[" * 100_000, "9" * 5000]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("name", ["nano", *OFFICIAL])
def test_arguments_that_are_no_object_are_shown_as_they_are(template, official, name, arguments):
    template = template if name == "nano" else official(name)
    good = call('{"z": "é", "a": [1]}')
    text = render(template, U("q"), A("ok", tool_calls=(good, call(arguments))), R("x"))
    assert (
        "ok\n\n<tool_call>\n<function=read>\n<parameter=z>\né\n</parameter>\n"
        "<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>\n"
        f"<tool_call>\n<function=read>\n{arguments}\n</function>\n</tool_call><|im_end|>"
    ) in text
    text.encode()


def test_reasoning_is_passed_only_when_it_is_known(template):
    inline = "<think>\nthought\n</think>\n\nanswer"
    assert render(template, U("q"), A(inline), prompt=False) == render(
        template, U("q"), A("answer", reasoning="thought"), prompt=False
    )
    assert "<think>\n\n</think>\n\n<think>" in render(template, U("q"), A(inline, reasoning=""))


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_late_system_message_keeps_its_place_and_the_prefix(official, name):
    template = official(name)
    assert not template.takes_late_system
    before = render(template, S("one"), U("q"), A("a"), prompt=False)
    after = render(template, S("one"), U("q"), A("a"), S("probe word"), U("r"), prompt=False)
    head = before[: before.index("<|im_start|>assistant")]
    assert after.startswith(head)
    assert "<|im_start|>user\n<system>\nprobe word\n</system><|im_end|>\n" in after


@pytest.mark.parametrize("name", OFFICIAL)
def test_system_messages_at_the_head_become_one(official, name):
    template = official(name)
    assert render(template, S("one"), S("two"), U("q")) == render(template, S("one\n\ntwo"), U("q"))


def test_the_embedded_template_takes_a_late_system_message_itself(template):
    assert template.takes_late_system
    text = render(template, U("q"), A("a"), S("late"), U("r"))
    assert "<|im_start|>system\nlate<|im_end|>\n" in text


@pytest.mark.parametrize("name", ["nano", *OFFICIAL])
def test_every_role_is_known_to_be_stripped(template, official, name):
    template = template if name == "nano" else official(name)
    assert template.stripped == {"system", "user", "assistant", "tool"}


def test_a_template_that_strips_nothing_is_found_out():
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}")
    assert template.stripped == set()
    assert template.takes_late_system


def test_what_the_template_refuses_is_a_400_with_its_own_words(official):
    with pytest.raises(InvalidRequestError, match="No user query found") as caught:
        render(official("qwen3_6"), S("only"))
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.missing.field }}",
        "{{ 1 + 'a' }}",
        "{{ [][3].x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_one_clear_error(source):
    with pytest.raises(InvalidRequestError):
        render(ChatTemplate(source, max_chars=100_000), U("abc"))


@pytest.mark.parametrize("hostile", ["{{ 1 / 0 }}", "{% raw %}", "{# x", "{{ messages }}"])
def test_content_is_data_and_never_template_source(template, hostile):
    assert f"<|im_start|>user\n{hostile}<|im_end|>" in render(template, U(hostile))


def test_deep_tools_are_refused_not_a_crash(template):
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError):
        render(template, U("q"), tools=({"x": deep},))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "raise_exception"])
def test_a_switch_may_not_take_the_place_of_the_conversation(template, name):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        template.render(Conversation((U("q"),), (), {name: []}), add_generation_prompt=True)
    assert caught.value.param == "chat_template_kwargs"


def test_helpers_that_templates_expect():
    template = ChatTemplate(
        "{{ strftime_now('%Y') }} {{ {'b': '<é>', 'a': 1} | tojson }} "
        "{{ [1, 2] | tojson(separators=(',', ':')) }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        clock=lambda: datetime(2031, 5, 6),
    )
    assert render(template, U("q")) == '2031 {"b": "<é>", "a": 1} [1,2]01'


def test_where_a_template_comes_from(tmp_path):
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate.from_dir(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert render(ChatTemplate.from_dir(tmp_path), U("q")) == "from config"
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert render(ChatTemplate.from_dir(tmp_path), U("q")) == "named"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert render(ChatTemplate.from_dir(tmp_path), U("q")) == "from file"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert render(ChatTemplate.from_dir(tmp_path, own), U("q")) == "own"
    with pytest.raises(CheckpointError, match="can't be read"):
        ChatTemplate.from_dir(tmp_path, tmp_path / "absent.jinja")
    own.write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate.from_dir(tmp_path, own)


EFFORT = (
    "{% set effort = reasoning_effort|default('xhigh') %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}"
    "{{ raise_exception('no ' ~ effort) }}{% endif %}"
    "{{ effort }}: {% for message in messages %}{{ message.content }}{% endfor %}"
)


def efforts_told(template: ChatTemplate, builder: PromptBuilder) -> dict[str | None, str]:
    talk = Conversation((Message("user", "q"),))
    asked = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max", "huge")
    return {
        effort: template.render(
            replace(talk, template_kwargs=builder.switches({}, effort)), add_generation_prompt=True
        )
        for effort in asked
    }


def test_an_effort_is_told_in_the_templates_own_words(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(EFFORT)
    told = efforts_told(template, PromptBuilder(tokenizer, template))
    words = {effort: text.split(":")[0] for effort, text in told.items()}
    nearest = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "max": "xhigh"}
    unsaid = dict.fromkeys([None, "none", "huge", "xhigh"], "xhigh")
    assert words == {**unsaid, **nearest}
    builder = PromptBuilder(tokenizer, template)
    assert builder.switches({"reasoning_effort": "high"}, "low") == {"reasoning_effort": "high"}


def test_a_template_without_efforts_is_told_none(
    template: ChatTemplate, builder: PromptBuilder
) -> None:
    assert template.efforts == ()
    assert len(set(efforts_told(template, builder).values())) == 1
    assert builder.switches({"a": 1}, "low") == {"a": 1}


def test_the_familys_efforts_are_found_in_its_own_template(official) -> None:
    assert official("qwen3_8").efforts == ("low", "medium", "xhigh")
    assert official("qwen3_6").efforts == ()


def test_switches_that_a_template_asks_for_are_known(
    tokenizer: Tokenizer, builder: PromptBuilder
) -> None:
    assert not builder.knows("thinking_budget")
    source = "{{ thinking_budget }}{% for message in messages %}{{ message.content }}{% endfor %}"
    assert PromptBuilder(tokenizer, ChatTemplate(source)).knows("thinking_budget")
