"""What the request demands of a reply's form is what the grammar lets through, and no more."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from grammar_walks import allowed, arguments, read, refused_at, takes, tool, walk

from capserve.errors import InvalidRequestError
from capserve.text.grammar import Constraint, Grammar, GrammarCompiler
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.tokenizer import Tokenizer

EDIT = tool("edit", arguments(path={"type": "string"}, line={"type": "integer"}))
LIST = tool("list", arguments())
LOOSE = tool("loose", {"type": "object", "properties": {}}, strict=False)
A_CALL = spell_call("edit", spell_parameter("path", "a.py") + spell_parameter("line", "3"))
ANOTHER = spell_call("list", "")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.specials["<|im_end|>"], tokenizer.specials["<|endoftext|>"]


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, ends: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, ends)


def compiled(compiler: GrammarCompiler, **demands: Any) -> Grammar:
    grammar = compiler.compile(Constraint(**demands))
    assert grammar is not None
    return grammar


def json_format(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    inner = {"name": "n", "strict": strict, "schema": schema}
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    "demands",
    [
        {},
        {"tools": (EDIT,), "choice": "none"},
        {"tools": (LOOSE,)},
        {"tools": (EDIT,), "choice": "none", "parallel": False},
        {"response_format": {"type": "text"}},
        {"choice": "none", "starts_in_reasoning": True},
    ],
)
def test_a_request_that_demands_nothing_has_no_grammar(
    compiler: GrammarCompiler, demands: dict[str, Any]
) -> None:
    assert compiler.compile(Constraint(**demands)) is None


def test_a_json_object_is_one_object_and_then_the_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, response_format={"type": "json_object"})
    assert takes(grammar, tokenizer, '{"a": [1, {"b": null}], "c": "<tool_call>"}')
    assert takes(grammar, tokenizer, '{\n  "a": 1\n}')
    for wrong in ("[1]", "Sure: {}", "```json\n{}\n```", ' {"a": 1}', '{"a": 1} x', '{"a": }'):
        assert refused_at(grammar, tokenizer, wrong) is not None, wrong
    assert not takes(grammar, tokenizer, '{"a": 1')


def test_a_schema_is_kept_with_its_order_and_its_required_keys(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, response_format=json_format(POINT))
    assert takes(grammar, tokenizer, '{"x": 1, "y": 2.5}')
    assert takes(grammar, tokenizer, '{"x":1}')
    for wrong in ('{"y": 2.5}', '{"x": 1.5}', '{"x": 1, "z": 2}', '{"y": 1, "x": 1}'):
        assert not takes(grammar, tokenizer, wrong), wrong


def test_blanks_between_the_words_of_json_come_to_an_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, response_format=json_format(POINT))
    pretty = json.dumps({"x": 1, "y": 2.5}, indent=2)
    assert takes(grammar, tokenizer, pretty)
    assert takes(grammar, tokenizer, pretty.replace("  ", "\t"))
    for blanks in ("  ", "\n\n", " \n", "\n" + " " * 33):
        assert refused_at(grammar, tokenizer, "{" + blanks + '"x"') is not None, blanks


def test_a_required_call_is_a_call_to_the_byte_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LIST), choice="required")
    assert takes(grammar, tokenizer, A_CALL)
    assert takes(grammar, tokenizer, f"{A_CALL}\n{ANOTHER}\n{A_CALL}")
    for wrong in (
        "I will call",
        "",
        A_CALL.replace("edit", "erase"),
        A_CALL.replace("\n3\n", "\nthree\n"),
        A_CALL.replace("line", "path"),
        A_CALL.replace(">\n<f", "><f"),
        spell_call("edit", spell_parameter("path", "a.py")),
        spell_call("list", spell_parameter("path", "a.py")),
        A_CALL + "\nDone.",
    ):
        assert not takes(grammar, tokenizer, wrong), wrong


def test_a_named_function_is_the_only_one_that_can_be_called(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LIST), function="list")
    assert takes(grammar, tokenizer, ANOTHER)
    assert not takes(grammar, tokenizer, A_CALL)


@pytest.mark.parametrize("demands", [{"choice": "required"}, {}])
def test_without_parallel_calls_the_reply_ends_with_its_call(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...], demands: dict[str, Any]
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LOOSE), parallel=False, **demands)
    matcher = grammar.matcher()
    for token in tokenizer.encode(A_CALL).tolist():
        matcher.advance(token)
    assert set(allowed(matcher).tolist()) == set(ends)


def test_with_strict_tools_text_is_free_and_calls_are_not(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LIST, LOOSE))
    text = "A < b, <p> and </parameter>\n<parameter=x>, even <tool_cal and </function>.\n"
    for right in ("", text, text + A_CALL, f"{A_CALL}\n{ANOTHER}", A_CALL + text + ANOTHER):
        assert takes(grammar, tokenizer, right), right
    free = spell_call("loose", spell_parameter("any", "thing\n</b>") + spell_parameter("k", ""))
    assert takes(grammar, tokenizer, free)
    for wrong in ("x<tool_call>y", A_CALL.replace("edit", "erase"), "see <function=foo>"):
        assert refused_at(grammar, tokenizer, wrong) is not None, wrong


def test_a_bare_function_tag_is_held_to_the_schema_too(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """The reader of replies takes it for a call."""
    grammar = compiled(compiler, tools=(EDIT,))
    bare = A_CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert takes(grammar, tokenizer, "Well. " + bare)
    assert not takes(grammar, tokenizer, bare.replace("\n3\n", "\nx\n"))


@pytest.mark.parametrize(
    ("demands", "content"),
    [
        ({"response_format": json_format(POINT)}, '{"x": 1}'),
        ({"tools": (EDIT,), "choice": "required"}, A_CALL),
        ({"tools": (EDIT,)}, "Hello"),
    ],
)
def test_reasoning_is_free_and_the_demand_begins_behind_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, demands: dict[str, Any], content: str
) -> None:
    grammar = compiled(compiler, starts_in_reasoning=True, **demands)
    thought = 'Hm, {"x": <b> <function=foo> </tool_call> "\n'
    assert takes(grammar, tokenizer, f"{thought}</think>\n\n{content}")
    assert takes(grammar, tokenizer, f"</think>{content}")
    assert not takes(grammar, tokenizer, thought)
    if content != A_CALL:  # which may interrupt reasoning
        assert not takes(grammar, tokenizer, content)


def test_a_call_made_while_reasoning_is_held_to_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT,), choice="required", starts_in_reasoning=True)
    assert takes(grammar, tokenizer, f"Hm.{A_CALL}")
    assert not takes(grammar, tokenizer, f"Hm.{A_CALL.replace('edit', 'erase')}")


def test_json_or_calls_where_both_were_asked_for(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT,), response_format=json_format(POINT))
    assert takes(grammar, tokenizer, '{"x": 1}')
    assert takes(grammar, tokenizer, A_CALL)
    assert not takes(grammar, tokenizer, "Hello")


def test_where_one_text_is_left_its_own_tokens_are(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """So a reply that is sent back encodes to the tokens that were generated."""
    grammar = compiled(compiler, tools=(LIST,), choice="required", parallel=False)
    matcher, said = grammar.matcher(), []
    while not matcher.done:
        [token] = allowed(matcher).tolist()
        said.append(token)
        matcher.advance(token)
    assert said == tokenizer.encode(ANOTHER).tolist()


def test_no_control_token_is_ever_allowed_but_an_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...]
) -> None:
    for demands in ({"tools": (EDIT,)}, {"response_format": {"type": "json_object"}}):
        matcher = compiled(compiler, **demands).matcher()
        for text in ("", '{"'):
            for token in tokenizer.encode(text).tolist():
                matcher.advance(token)
            assert not set(allowed(matcher).tolist()) & (tokenizer.control_ids - set(ends))


def test_any_way_back_leads_to_the_same_masks(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...]
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LIST))
    tokens = [*tokenizer.encode(f"Hi <b>. {A_CALL}\n{ANOTHER}").tolist(), ends[0], ends[1], ends[0]]
    matcher, masks = grammar.matcher(), []
    for token in tokens:
        masks.append(matcher.mask())
        matcher.advance(token)
    rng = random.Random(5)
    at = len(tokens)
    for _ in range(60):
        back = rng.randint(1, min(9, at))
        matcher.rollback(back)
        at -= back
        assert np.array_equal(matcher.mask(), masks[at])
        while at < len(tokens) and rng.random() < 0.85:
            matcher.advance(tokens[at])
            at += 1
    matcher.restart()
    for token, mask in zip(tokens, masks, strict=True):
        assert np.array_equal(matcher.mask(), mask)
        matcher.advance(token)


def test_two_matchers_of_one_grammar_do_not_know_of_each_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiled(compiler, tools=(EDIT, LIST), choice="required")
    one, two = grammar.matcher(), grammar.matcher()
    start = two.mask()
    for token in tokenizer.encode(A_CALL).tolist():
        one.advance(token)
    assert np.array_equal(two.mask(), start)


def test_behind_an_end_token_only_end_tokens_come(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...]
) -> None:
    matcher = compiled(compiler, response_format={"type": "json_object"}).matcher()
    for token in [*tokenizer.encode("{}").tolist(), ends[0]]:
        matcher.advance(token)
    assert set(allowed(matcher).tolist()) == set(ends)
    matcher.advance(ends[0])
    matcher.rollback(2)
    assert matcher.done
    assert tokenizer.encode("}").tolist()[0] not in allowed(matcher)


def test_equal_demands_are_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = GrammarCompiler._compiled

    def counted(self: GrammarCompiler, *parts: Any) -> Any:
        made.append(parts)
        return original(self, *parts)

    monkeypatch.setattr(GrammarCompiler, "_compiled", counted)
    schema = arguments(only_here={"type": "boolean"})
    for _ in range(3):
        compiled(compiler, response_format=json_format(json.loads(json.dumps(schema))))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("demands", "param", "words"),
    [
        ({"choice": "required"}, "tool_choice", "no tool"),
        ({"tools": (EDIT,), "function": "nope"}, "tool_choice", "nope"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": json_format({"not": {}})}, "response_format", "not"),
        ({"response_format": json_format({"minLength": 3, "maxLength": 2, "type": "string"})},
         "response_format", "minLength (3)"),
        ({"response_format": json_format({"type": "array", "uniqueItems": True})},
         "response_format", "uniqueItems"),
        ({"response_format": json_format({"format": "iban", "type": "string"})},
         "response_format", "iban"),
        ({"response_format": json_format({"$ref": "https://example.com/s"})},
         "response_format", "example.com"),
        ({"tools": (LIST, tool("f", arguments(a={"type": "array", "contains": {}})))},
         "tools[1]", "contains"),
        ({"tools": (LIST, tool("f", arguments(a={"type": "string", "not": {}})))},
         "tools[1]", "not"),
        ({"tools": (LIST, LIST, tool("f", {**arguments(), "anyOf": [{}]}))}, "tools[2]", "anyOf"),
        ({"tools": (tool("f", arguments(["b"], a={})),)}, "tools[0]", "'b'"),
        ({"tools": (tool("f", arguments(**{"a>b": {}})),)}, "tools[0]", "a>b"),
    ],
)  # fmt: skip
def test_what_can_not_be_enforced_is_refused_by_field_and_feature(
    compiler: GrammarCompiler, demands: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(Constraint(**demands))
    assert caught.value.param == param
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_schema_that_nobody_called_strict_gives_way(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    loose = tool("f", arguments(a={"type": "array", "contains": {}}), strict=False)
    grammar = compiled(compiler, tools=(loose,), choice="required")
    assert takes(grammar, tokenizer, spell_call("f", spell_parameter("b", "x")))
    grammar = compiled(
        compiler, response_format=json_format({"type": "array", "contains": {}}, strict=False)
    )
    assert takes(grammar, tokenizer, "[]")


def test_every_walk_through_a_mixed_request_ends_in_valid_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: tuple[int, ...]
) -> None:
    rng, ended = random.Random(7), 0
    tools = (EDIT, LIST, LOOSE)
    for reasoning in (False, True):
        grammar = compiled(compiler, tools=tools, choice="required", starts_in_reasoning=reasoning)
        for _ in range(20):
            said = walk(grammar, tokenizer, ends, rng, 250)
            if said is None:
                continue
            ended += 1
            message = read(tokenizer, ends, said, tools, starts_in_reasoning=reasoning)
            assert message.tool_calls
            assert message.content == ""
            for call in message.tool_calls:
                found = json.loads(call.arguments)
                if call.name == "edit":
                    assert list(found) == ["path", "line"]
                    assert type(found["line"]) is int
    assert ended >= 12, "too few replies ended for this to show anything"
