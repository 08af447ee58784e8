"""No schema stalls the server: it is compiled or refused, and then followed, in bounded time."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from grammar_walks import allowed, arguments, tool

from capserve.errors import InvalidRequestError
from capserve.text.deep_call import DeepCalls
from capserve.text.grammar import MEMO_GRAMMARS, Constraint, GrammarCompiler
from capserve.text.grammar_schema import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_FUNCTIONS,
    MOST_LITERAL_CHARS,
    MOST_PARAMETERS,
)
from capserve.text.tokenizer import Tokenizer

SECONDS = 20
"""For what takes below one on an idle machine."""


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, (tokenizer.specials["<|im_end|>"],))


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def wide(keys: int) -> Any:
    return {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(keys)},
        "required": [f"k{i}" for i in range(0, keys, 2)],
    }


def chain(objects: int) -> Any:
    """The library descends from each definition into the next: deep enough is its stack's end."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(objects)
    }
    return {"$defs": {**defs, f"d{objects}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def bomb(keyword: str, levels: int) -> Any:
    """Each definition names the next one twice."""
    defs: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def many_bombs(levels: int) -> Any:
    whole = bomb("anyOf", levels)
    properties = {f"k{i}": {"$ref": "#/$defs/d0"} for i in range(300)}
    return {"$defs": whole["$defs"], **arguments(**properties)}


def products(groups: int) -> Any:
    return {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"a{i}_{j}": {"type": "integer"}}}
                    for j in range(4)
                ]
            }
            for i in range(groups)
        ]
    }


HOSTILE: dict[str, Any] = {
    "thousands of keys": wide(3000),
    "thousands of values": {"enum": [f"value {i}" for i in range(5000)]},
    "hundreds of optional keys": {**wide(400), "required": []},
    "hundreds of shapes": {"anyOf": [arguments(**{f"a{i}": {}}, z={}) for i in range(500)]},
    "a product of choices": products(6),
    "a larger product of choices": products(12),
    "doubling allOf": bomb("allOf", 22),
    "doubling anyOf": bomb("anyOf", 22),
    "nested repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "a long repeat": {"type": "string", "pattern": "^[a-z]{1,100000}$"},
    "an automaton of 2^30 states": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "a search in a search": {"type": "string", "pattern": "a.{50}b.{50}c"},
    "many searches": {"type": "string", "pattern": "|".join(f"a.{{{n}}}b" for n in range(200))},
    "a long string": {"type": "string", "minLength": 10**6},
    "no bound on a string": {"type": "string", "maxLength": 10**9},
    "a long array": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "a prime step": {"type": "integer", "multipleOf": 99991, "minimum": 5},
    "a fine step": {"type": "number", "multipleOf": 1e-7},
    "large bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "many patterns": {
        "type": "object",
        "patternProperties": {f"^a{i}_.*": {"type": "string"} for i in range(100)},
    },
    "a long chain of objects": chain(1300),
    "a longer chain of objects": chain(2500),
    "hundreds of name patterns": {
        "type": "object",
        "patternProperties": {f"^a{i}$": {"type": "string"} for i in range(600)},
    },
    "patterns that all must hold": {
        "allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(500)]
    },
    "patterns that hold one by one": {
        "$defs": {
            f"d{i}": {"type": "string", "pattern": f"a{i}", "$ref": f"#/$defs/d{i + 1}"}
            for i in range(60)
        },
        "$ref": "#/$defs/d0",
    },
    "a chain of definitions": {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_a_hostile_schema_is_refused_or_followed_in_bounded_time(
    compiler: GrammarCompiler, name: str, place: str
) -> None:
    schema = HOSTILE[name]
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    whole = {**arguments(p=inner), "$defs": schema.get("$defs", {})}
    demands: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": form},
        "tools": {"tools": (tool("f", whole),), "function": "f"},
    }
    rng = random.Random(3)
    try:
        grammar = compiler.compile(Constraint(**demands[place]))
        assert grammar is not None
        matcher = grammar.matcher()
        for _ in range(25):
            matcher.advance(int(rng.choice(allowed(matcher))))
    except InvalidRequestError as refusal:
        field = refusal.param
        if field is None or not field.startswith(place):
            raise


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(MOST_DEPTH), str(MOST_DEPTH)),
        (nested(900), str(MOST_DEPTH)),
        ({"const": "x" * (MOST_LITERAL_CHARS + 1)}, str(MOST_LITERAL_CHARS)),
        ({"properties": {"x" * 9000: {}}}, "9000"),
        (wide(20_000), str(MOST_BYTES)),
        ({"const": "\ud800"}, "no JSON"),
        ({"minimum": float("nan")}, "no JSON"),
        ({"$defs": {"n": arguments(c={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}, "itself"),
        ({"$defs": {"n": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
          "$ref": "#/$defs/n"}, "itself"),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_too_large_too_deep_or_endless_is_refused_with_the_limit(
    compiler: GrammarCompiler, schema: Any, words: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    for demands, param in (
        ({"response_format": form}, "response_format"),
        ({"tools": (tool("f", arguments(a=schema)),), "function": "f"}, "tools[0]"),
    ):
        if "$defs" in schema and param != "response_format":
            continue  # a parameter's own $defs are not its root's
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(Constraint(**demands))
        assert caught.value.param == param
        assert words in caught.value.message


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("required", [True, False])
def test_as_many_parameters_as_may_be_are_followed_and_more_are_refused(
    compiler: GrammarCompiler, required: bool
) -> None:
    """Each is a level of the library's descent: 1,500 were the end of the whole process."""
    for count in (MOST_PARAMETERS, MOST_PARAMETERS + 1, 3 * MOST_PARAMETERS):
        names = [f"k{i}" for i in range(count)]
        parameters = {**wide(count), "required": names if required else []}
        demanded = Constraint(tools=(tool("f", parameters),), function="f")
        if count == MOST_PARAMETERS:
            assert compiler.compile(demanded) is not None
            continue
        with pytest.raises(InvalidRequestError, match=f"{count} .*{MOST_PARAMETERS}") as caught:
            compiler.compile(demanded)
        assert caught.value.param == "tools[0]"
        # Nobody called it strict: then it gets calls of its name.
        loose = tool("f", parameters, strict=False)
        assert compiler.compile(Constraint(tools=(loose,), function="f")) is not None


@pytest.mark.timeout(SECONDS)
def test_more_tools_than_a_grammar_can_choose_from_are_refused_at_once(
    compiler: GrammarCompiler,
) -> None:
    offers = tuple(tool(f"f{i}", {}, strict=False) for i in range(MOST_FUNCTIONS + 1))
    with pytest.raises(InvalidRequestError, match=f"{MOST_FUNCTIONS + 1} tools .*{MOST_FUNCTIONS}"):
        compiler.compile(Constraint(tools=offers, choice="required"))
    assert compiler.compile(Constraint(tools=offers)) is None


def test_a_library_that_does_not_come_back_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, (tokenizer.specials["<|im_end|>"],))
    compiler._calls = DeepCalls(most_s=0.02)
    back = threading.Event()
    monkeypatch.setattr(
        "capserve.text.grammar.LLMatcher.grammar_from_lark", lambda _: back.wait(SECONDS)
    )
    with pytest.raises(InvalidRequestError, match=r"given up: it took more than 0\.02 s") as caught:
        compiler.compile(Constraint(response_format={"type": "json_object"}))
    assert caught.value.param == "response_format"
    back.set()


@pytest.mark.timeout(SECONDS)
def test_many_parameters_that_lead_to_the_same_maze_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="lead to more than"):
        compiler.compile(Constraint(tools=(tool("f", many_bombs(14)),), function="f"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"required": [[1]]},
        {"required": "a"},
        {"properties": [1]},
        {"type": ["object", "null"]},
        {"type": 5},
        {"properties": {"a": 7}},
        {"properties": {"a": {"type": {"x": 1}}}},
        {"properties": {"a": {"enum": [[1], {"b": 2}, "c"], "type": ["string", "array"]}}},
        {"properties": {"a": {"type": "string", "pattern": "("}}},
        {"properties": {"a": {"type": "string", "pattern": 5}}},
        {"properties": {"a": {"type": "string", "maxLength": -1}}},
        {"properties": {"a": {"type": "string", "maxLength": True}}},
        {"properties": {"a": {"type": "string", "format": ["x"]}}},
        {"properties": {"a": {"anyOf": "x"}}},
        {"properties": {"a": {"$ref": "#/$defs"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}, "b": {"type": "string"}}},
        {"additionalProperties": {"type": "string"}},
        {"$defs": [], "properties": {"a": {"$ref": "#/$defs/0"}}},
    ],
)
def test_a_broken_definition_is_a_refusal_or_nothing_at_all(
    compiler: GrammarCompiler, parameters: Any
) -> None:
    """Never another error, and never for a tool that nobody called strict."""
    try:
        compiler.compile(Constraint(tools=(tool("f", parameters),), function="f"))
    except InvalidRequestError as refusal:
        if refusal.param not in ("tools[0]", "tools"):
            raise
    loose = tool("f", parameters, strict=False)
    assert compiler.compile(Constraint(tools=(loose,), function="f")) is not None


def test_recursion_that_can_end_is_followed(compiler: GrammarCompiler) -> None:
    for schema in (
        arguments([], c={"$ref": "#/$defs/n"}),
        arguments(c={"type": "array", "items": {"$ref": "#/$defs/n"}}),
        arguments(c={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}),
    ):
        whole = {"$defs": {"n": schema}, "$ref": "#/$defs/n"}
        form = {"type": "json_schema", "json_schema": {"strict": True, "schema": whole}}
        assert compiler.compile(Constraint(response_format=form)) is not None


@pytest.mark.timeout(SECONDS)
def test_two_hundred_tools_are_one_grammar(compiler: GrammarCompiler) -> None:
    tools = tuple(tool(f"t{i}", arguments(a={"type": "string"}, b={})) for i in range(200))
    assert compiler.compile(Constraint(tools=tools, choice="required")) is not None


def test_only_the_last_grammars_are_kept(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, (tokenizer.specials["<|im_end|>"],))
    for i in range(MEMO_GRAMMARS + 5):
        form = {"type": "json_schema", "json_schema": {"strict": True, "schema": {"const": i}}}
        compiler.compile(Constraint(response_format=form))
    assert len(compiler._memo) == MEMO_GRAMMARS


def test_a_refused_schema_leaves_the_compiler_as_it_was(compiler: GrammarCompiler) -> None:
    bad = {"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            compiler.compile(Constraint(response_format=bad))
        assert compiler.compile(Constraint(response_format={"type": "json_object"})) is not None
