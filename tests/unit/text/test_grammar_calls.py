"""A parameter that the grammar lets through is read back as a value that its schema takes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_walks import arguments, read, refused_at, takes, tool, walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from capserve.errors import InvalidRequestError
from capserve.text.grammar import Constraint, Grammar, GrammarCompiler
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.tokenizer import Tokenizer

MARKUP = (
    "</parameter>",
    "a\n</parameter>",
    "</parameter> x\n</parameter>y",
    "<configuration>\n<parameter>1</parameter>\n</configuration>",
    "<parameter=b>\n1",
    "<tool_call>\n<function=f>\n<parameter=a>",
    "</function>",
    "</function>\n</functions>",
    "<tool_call>",
    "</tool_call>",
    "<think>x</think>",
    "a < b and c > d",
    "<",
    "<<</</p</pa</parameter",
)


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    return (tokenizer.specials["<|im_end|>"],)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, ends: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, ends)


def grammar_of(compiler: GrammarCompiler, parameters: dict[str, Any]) -> Grammar:
    tools = (tool("f", parameters),)
    grammar = compiler.compile(Constraint(tools=tools, function="f", parallel=False))
    assert grammar is not None
    return grammar


def call(*parameters: tuple[str, str]) -> str:
    return spell_call("f", "".join(spell_parameter(key, value) for key, value in parameters))


def read_back(tokenizer: Tokenizer, ends: tuple[int, ...], text: str, schema: Any) -> Any:
    said = [*tokenizer.encode(text).tolist(), ends[0]]
    [found] = read(tokenizer, ends, said, (tool("f", schema),)).tool_calls
    return json.loads(found.arguments)


@pytest.mark.parametrize("value", ["", "\n", "x", " two\nlines \n", "null", "5", "é猫🙂", '"q"'])
def test_a_string_is_any_text_as_it_is(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...], value: str
) -> None:
    schema = arguments(a={"type": "string", "description": "text"}, b={"type": "string"})
    text = call(("a", value), ("b", value))
    assert takes(grammar_of(compiler, schema), tokenizer, text)
    assert read_back(tokenizer, ends, text, schema) == {"a": value, "b": value}


@pytest.mark.parametrize("rule", [{}, {"maxLength": 2000}])
@pytest.mark.parametrize("value", MARKUP)
def test_markup_in_a_string_passes_where_it_is_read_back_as_it_is(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    value: str,
    rule: dict[str, Any],
) -> None:
    schema = arguments(a={"type": "string", **rule}, b={"type": "integer"})
    text = call(("a", value), ("b", "1"))
    closing = "</parameter>" in value or "</function>" in value
    assert takes(grammar_of(compiler, schema), tokenizer, text) is not (closing and bool(rule))
    assert read_back(tokenizer, ends, text, schema) == {"a": value, "b": 1}


@pytest.mark.parametrize("rule", [{}, {"maxLength": 200}])
@pytest.mark.parametrize(
    "value",
    [
        "x</parameter>\n<parameter=b>\n1",
        "x</parameter><parameter=c>",
        "x\n</parameter>  </function>",
        "x</parameter>\n</tool_call>",
        "x\n</function>\n</tool_call>\n<tool_call>\n<function=f>",
    ],
)
def test_a_string_never_holds_what_the_reader_takes_for_its_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer, value: str, rule: dict[str, Any]
) -> None:
    schema = arguments(a={"type": "string", **rule}, b={"type": "integer"})
    assert not takes(grammar_of(compiler, schema), tokenizer, call(("a", value), ("b", "1")))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["0", "-12"], ["1.5", "one", "", '"1"', "01"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "-3"]),
        ({"type": "number"}, ["0", "-1.5", "1e5"], ["NaN", "Infinity", "x", ".5"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "yes", "1", "null"]),
        ({"type": "null"}, ["null"], ["None", ""]),
        ({"type": "string", "enum": ["a", "b c", 'q"', "é\nx"]}, ["a", "b c", 'q"', "é\nx"],
         ["", "ab", "A", '"a"']),
        ({"type": "string", "const": "x"}, ["x"], ["y", "xx", ""]),
        ({"enum": ["a", 1, None, True]}, ["a", "1", "null", "true"], ["b", "2", "false"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é猫🙂"], ["a", "abcd", ""]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["", "aB", "a b"]),
        ({"type": "string", "pattern": "ab"}, ["ab", "xxabyy"], ["", "a b"]),
        ({"type": "string", "pattern": "^a|b$"}, ["axx", "xxb"], ["xax", "bx"]),
        ({"type": "string", "pattern": "^\\d+$"}, ["12"], ["١٢", "x"]),
        ({"type": "string", "pattern": "^a/b\\$$"}, ["a/b$"], ["a/b"]),
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "today", ""]),
        ({"type": "string", "format": "uuid"}, ["0" * 8 + "-0000-0000-0000-" + "0" * 12], ["0"]),
        ({"type": ["string", "null"]}, ["null", "", "nullx", "x\ny"], ["None", " null "]),
        ({"type": "string", "nullable": True}, ["x", "nil"], ["null"]),
        ({"type": ["string", "integer"]}, ["5", "five", "v5"], ["5 apples", " 5"]),
        ({"type": ["string", "boolean"]}, ["true", "truer", "x"], ["True", " false"]),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 10}]},
         ["abc", "10"], ["abcd", "9", "009"]),
        ({"anyOf": [{"type": "string"}, {"const": True}]}, ["true", "x"], ["false"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
         ["x", '["a", "b"]', "[]"], ["[1]", "[x", "{}"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b", "None"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]", "[1,2]"],
         ["[1, 2", "1", '["1"]', "[1,  2]"]),
        ({"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"],
          "additionalProperties": False}, ['{"k": "v"}', '{"k":"v"}'], ["{}", '{"k": 1}', "k"]),
        ({"$ref": "#/$defs/word"}, ["ab"], ["abc", ""]),
        ({"allOf": [{"$ref": "#/$defs/word"}, {"minLength": 2}]}, ["ab"], ["a"]),
        ({"type": "array", "items": {"$ref": "#/$defs/word"}}, ['["a"]'], ['["abc"]']),
        ({}, ["", "x", "5", "[1", '{"a": 1}'], []),
        ({"description": "anything"}, ["x", "null"], []),
        ({"minimum": 5}, ["5", "[1]", "null"], ["4"]),
    ],
)  # fmt: skip
def test_a_parameter_is_written_so_that_it_is_read_back_valid(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    schema: dict[str, Any],
    right: list[str],
    wrong: list[str],
) -> None:
    whole = arguments(a=schema, b={"type": "boolean"})
    whole["$defs"] = {"word": {"type": "string", "minLength": 1, "maxLength": 2}}
    grammar = grammar_of(compiler, whole)
    for value in right:
        text = call(("a", value), ("b", "true"))
        assert takes(grammar, tokenizer, text), value
        Draft202012Validator(whole).validate(read_back(tokenizer, ends, text, whole))
    for value in wrong:
        text = call(("a", value), ("b", "true"))
        assert refused_at(grammar, tokenizer, text) is not None, value


def test_parameters_come_in_order_and_only_optional_ones_may_be_left_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    word = {"type": "string"}
    grammar = grammar_of(
        compiler, arguments(["b", "d"], a=word, b={"type": "integer"}, c=word, d=word, e=word)
    )
    values = {"a": "x", "b": "1", "c": "x", "d": "x", "e": "x"}
    for keys in ("bd", "abd", "bcd", "bde", "abcde"):
        assert takes(grammar, tokenizer, call(*((k, values[k]) for k in keys))), keys
    for keys in ("", "b", "d", "abc", "bdd", "dbe", "bda", "bdz"):
        assert not takes(grammar, tokenizer, call(*((k, values.get(k, "")) for k in keys))), keys


def test_all_optional_parameters_may_be_left_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = grammar_of(compiler, arguments([], a={"type": "string"}, b={"enum": ["x"]}))
    for parameters in ((), (("a", ""),), (("b", "x"),), (("a", ""), ("b", "x"))):
        assert takes(grammar, tokenizer, call(*parameters)), parameters


_BOUNDS = st.integers(0, 6)
_SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({}),
    st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, _BOUNDS, _BOUNDS),
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, _BOUNDS, _BOUNDS
    ),
    st.lists(st.sampled_from(["a", "<", "null", "5", "[", "\n", 7, None, False]), min_size=1)
    .map(lambda values: {"enum": values}),
    st.sampled_from(["^[a-c]{1,3}$", "x", "^<a>$", "[0-9]$"])
    .map(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 5}),
    st.sets(st.sampled_from(["string", "null", "boolean", "integer"]), min_size=1)
    .map(lambda types: {"type": sorted(types), "maxLength": 4, "minimum": 0, "maximum": 99}),
)  # fmt: skip
_SCHEMAS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(
            lambda properties: arguments(**properties)
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda branches: {"anyOf": branches}),
    ),
    max_leaves=4,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(["a", "b", "c d"]), _SCHEMAS, max_size=3), st.randoms())
def test_whatever_the_schema_a_walk_through_its_grammar_is_read_back_valid(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    properties: dict[str, Any],
    rng: random.Random,
) -> None:
    schema = arguments(list(properties)[:2], **properties)
    try:
        grammar = grammar_of(compiler, schema)
    except InvalidRequestError as error:
        if error.param not in ("tools[0]", "tools"):
            raise
        return
    for _ in range(2):
        said = walk(grammar, tokenizer, ends, rng, 150)
        if said is None:
            continue
        [found] = read(tokenizer, ends, said, (tool("f", schema),)).tool_calls
        Draft202012Validator(schema).validate(json.loads(found.arguments))
