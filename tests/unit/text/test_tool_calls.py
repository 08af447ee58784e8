"""Calls are found whole, typed by their schema, and never invented."""

from __future__ import annotations

import json

import pytest

from capserve.text.arguments import ToolSchemas, to_json, types_of
from capserve.text.channels import ChannelSplitter, RawCall, ReasoningClosed, Text
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.output import OutputSpec, TurnOutput

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path", "text"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
)
P = spell_parameter
WRITE = spell_call("write", P("path", "a") + P("text", "b"))
WRITE_JSON = '{"path":"a","text":"b"}'


def read(tokenizer, text: str, *, thinking: bool = False):
    """(reasoning, content, [(name, arguments)])"""
    spec = OutputSpec(tools=TOOLS, starts_in_reasoning=thinking)
    output = TurnOutput(spec, tokenizer, {8185})
    output.feed(tokenizer.encode(text).tolist())
    output.finish()
    message = output.message()
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.reasoning, message.content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (WRITE, "", [("write", WRITE_JSON)]),
        (f"ok\n\n{WRITE}", "ok", [("write", WRITE_JSON)]),
        (f"ok {WRITE}\n\n and more \n", "ok \n\n and more \n", [("write", WRITE_JSON)]),
        (f"{WRITE}\nmore", "more", [("write", WRITE_JSON)]),
        (f"{WRITE}\n{WRITE}\n", "", [("write", WRITE_JSON)] * 2),
        ("<function=now>\n</function>", "", [("now", "{}")]),
        ("<function=now></function>\n</tool_call>\nx", "x", [("now", "{}")]),
        ("<tool_call>  <function= now >\n</function></tool_call>", "", [("now", "{}")]),
    ],
)
def test_calls_and_the_text_around_them(tokenizer, text, content, calls):
    assert read(tokenizer, text) == ("", content, calls)


@pytest.mark.parametrize(
    "value",
    [
        "x\n</parameter>\ny",
        "</parameter>",
        "</function>",
        "a </tool_call> b",
        "<tool_call>\n<function=f>",
        "\n\nblank lines\n\n",
        "",
        "ends with </parameter>\n</function>\nand goes on",
        "  \t",
        "<think>not</think> really",
        'say "hi" \\ 日本 🙂',
    ],
)
def test_a_string_argument_keeps_every_byte(tokenizer, value):
    text = spell_call("write", P("path", value) + P("text", value))
    reasoning, content, calls = read(tokenizer, text)
    assert (reasoning, content) == ("", "")
    assert json.loads(calls[0][1]) == {"path": value, "text": value}


@pytest.mark.parametrize(
    "lost", ["\n</tool_call>", "</function>\n</tool_call>", "l_call>", "unction>\n</tool_call>"]
)
def test_a_closing_tag_lost_at_the_end_still_gives_the_call(tokenizer, lost):
    assert read(tokenizer, WRITE.removesuffix(lost)) == ("", "", [("write", WRITE_JSON)])


def test_a_closing_tag_lost_before_another_call_does_not_swallow_it(tokenizer):
    text = WRITE.removesuffix("\n</tool_call>") + "\n" + WRITE
    assert read(tokenizer, text)[2] == [("write", WRITE_JSON)] * 2
    lost_function = WRITE.replace("</function>\n", "")
    assert read(tokenizer, lost_function + WRITE)[2] == [("write", WRITE_JSON)] * 2


def test_a_call_that_lost_its_parameter_tag_is_content_and_the_next_one_is_a_call(tokenizer):
    broken = "<tool_call>\n<function=write>\n<parameter=path>\nx\n</function>\n</tool_call>"
    assert read(tokenizer, f"{broken}\n{WRITE}") == ("", broken, [("write", WRITE_JSON)])


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>",
        "<tool_call>\n<func",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now",
        "<tool_call>\n<function=write>\n",
        "<tool_call>\n<function=write>\ntext\n</function>\n</tool_call>",
        "<tool_call>\n<function=write>\n<parameter=pa",
        "<tool_call>\n<function=write>\n<parameter=path>\n/etc/pas",
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</para",
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n<param",
        '<tool_call>\n{"name": "write"}\n</tool_call>',
        "use <function=name> like this",
        "< <t <tool_ </tool_call>",
    ],
)
def test_a_broken_call_is_content_byte_for_byte(tokenizer, broken):
    assert read(tokenizer, broken) == ("", broken, [])
    assert read(tokenizer, f"so\n\n{broken} \n") == ("", f"so\n\n{broken} \n", [])


def test_a_call_cut_before_a_required_parameter_is_content(tokenizer):
    cut = "<tool_call>\n<function=write>\n" + P("path", "a")
    assert read(tokenizer, cut) == ("", cut, [])
    complete = cut + P("text", "b")
    assert read(tokenizer, complete) == ("", "", [("write", WRITE_JSON)])


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("thought\n</think>\n\nanswer", "thought", "answer", 0),
        ("\n</think>\n\nanswer", "", "answer", 0),
        ("never closed, <tool_call> is talk", "never closed, <tool_call> is talk", "", 0),
        ("talk about <function=now>", "talk about <function=now>", "", 0),
        (f"thought\n{WRITE}", "thought", "", 1),
        (f"thought\n{WRITE}\n</think>\n\nanswer", "thought", "answer", 1),
        ("one\n</think>\n<think>\ntwo\n</think>x", "one\ntwo", "x", 0),
    ],
)
def test_a_reply_that_starts_in_reasoning(tokenizer, text, reasoning, content, calls):
    found = read(tokenizer, text, thinking=True)
    assert (found[0], found[1], len(found[2])) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nr\n</think>\n\nc", "r", "c"),
        ("\n <think>r</think>c", "r", "c"),
        ("  leading space stays", "", "  leading space stays"),
        ("c <think> is a word", "", "c <think> is a word"),
        ("c </think> d", "", "c </think> d"),
        ("<thin", "", "<thin"),
        (" \n", "", " \n"),
    ],
)
def test_a_reply_that_starts_in_content(tokenizer, text, reasoning, content):
    assert read(tokenizer, text) == (reasoning, content, [])


def test_text_goes_out_as_soon_as_it_can_be_no_mark():
    splitter = ChannelSplitter(starts_in_reasoning=False, calls=True)
    said = [splitter.feed(part) for part in ("a <", "b", " <tool_", "x", "<tool_call>", "y")]
    assert ["".join(p.text for p in pieces) for pieces in said] == [
        "a ",
        "<b",
        " ",
        "<tool_x",
        "",
        "<tool_call>y",
    ]


def test_a_splitter_reports_pieces_in_order():
    splitter = ChannelSplitter(starts_in_reasoning=True, calls=True)
    pieces = splitter.feed(f"r</think>c{WRITE}d") + splitter.finish()
    assert [type(piece) for piece in pieces] == [Text, ReasoningClosed, Text, RawCall, Text]
    assert pieces[3].source == WRITE


DEFS = {"$defs": {"P": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/P"}]}, {"string", "object"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{}, {"$ref": "#/$defs/P"}]}, {"object"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"type": "number", "nullable": True}, {"number", "null"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "https://elsewhere"}, set()),
        ({"$ref": "#/$defs/missing/deeper"}, set()),
        ("garbage", set()),
        (None, set()),
    ],
)
def test_types_that_a_schema_allows(schema, types):
    assert types_of(schema, DEFS) == types


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("5", {"string"}, '"5"'),
        (" 5\n", {"integer"}, "5"),
        ("123456789012345678901234567890", {"integer"}, "123456789012345678901234567890"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("0.10", {"number"}, "0.10"),
        ("5", {"number"}, "5"),
        ("5.0", {"integer"}, "5.0"),
        ("1e400", {"number"}, "1e400"),
        ("True", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("null", {"string", "null"}, "null"),
        ("007", {"integer"}, '"007"'),
        ("007", {"string", "integer"}, '"007"'),
        ('{"b": 1, "a": [1,2]}', {"object"}, '{"b": 1, "a": [1,2]}'),
        ("{'a': True, 'b': None}", {"object"}, '{"a":true,"b":null}'),
        ("['é', (1, 2)]", {"array"}, '["é",[1,2]]'),
        ('"{\\"a\\": 1}"', {"object"}, '{"a": 1}'),
        ('"5"', {"integer"}, "5"),
        ('"abc"', {"string", "array"}, '"\\"abc\\""'),
        ("not json", {"object"}, '"not json"'),
        ("{'a': {1, 2}}", {"object"}, "\"{'a': {1, 2}}\""),
        ("true", {"integer"}, "true"),
        ("3", set(), "3"),
        ('"q"', set(), '"\\"q\\""'),
        ("plain", set(), '"plain"'),
        ("True", set(), '"True"'),
        ("NaN", set(), '"NaN"'),
        ("é", set(), '"é"'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
        ("'\\ud800'", {"array"}, "\"'\\\\ud800'\""),
        ("['\\ud800']", {"array"}, "\"['\\\\ud800']\""),
    ],
)
def test_a_parameters_text_as_json(text, types, written):
    assert to_json(text, frozenset(types)) == written
    written.encode()


def test_arguments_keep_the_order_written_and_the_last_of_two():
    schemas = ToolSchemas(TOOLS)
    assert schemas.arguments("write", [("z", "1"), ("path", "1"), ("z", "2")]) == (
        '{"z":2,"path":"1"}'
    )
    assert schemas.arguments("unknown", [("ключ", "да")]) == '{"ключ":"да"}'


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": None},
        {"function": {"name": 3}},
        {"function": {"name": "f", "parameters": "x"}},
        {"function": {"name": "f", "parameters": {"properties": [], "required": "x"}}},
    ],
)
def test_a_garbled_definition_types_nothing_and_requires_nothing(tool):
    schemas = ToolSchemas([tool])
    assert schemas.arguments("f", [("a", "1")]) == '{"a":1}'
    assert schemas.requires("f") == frozenset()
