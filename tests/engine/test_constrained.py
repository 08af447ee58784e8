"""What the model writes under a grammar is valid, at any number of drafts and across a park."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, ValidationError

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.errors import InvalidRequestError
from capserve.text.grammar import Constraint, Grammar, GrammarCompiler
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.tokenizer import Tokenizer
from tests.engine.constrained_check import CHECKS, check, formats_in
from tests.engine.constrained_more import MORE, REFUSED
from tests.engine.constrained_schemas import SCHEMAS, obj

WARM = Sampling(temperature=1.0, seed=11)
MOST = 600

TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
    for name, parameters in (
        ("read_file", obj(["path"], path={"type": "string"}, lines={"type": "integer"})),
        (
            "search",
            obj(
                query={"type": "string", "maxLength": 30},
                kind={"type": "string", "enum": ["text", "name"]},
                limit={"type": ["integer", "null"], "minimum": 1, "maximum": 50},
                where={"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2},
            ),
        ),
        ("stop", obj()),
    )
)


@pytest.fixture(scope="module")
def tokenizer(nano_dir: Any) -> Tokenizer:
    return Tokenizer.from_dir(nano_dir)


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.specials["<|im_end|>"], tokenizer.specials["<|endoftext|>"]


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, ends: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, ends)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> TokenArray:
    return tokenizer.encode(
        "<|im_start|>user\nWhich files are in the folder src?<|im_end|>\n<|im_start|>assistant\n"
    )


def compiled(compiler: GrammarCompiler, **demands: Any) -> Grammar:
    grammar = compiler.compile(Constraint(**demands))
    assert grammar is not None
    return grammar


def reply(
    engine: TorchEngine, prompt: TokenArray, sampling: Sampling, grammar: Grammar, park: int = 0
) -> list[int]:
    """Until an end token, or MOST tokens; every `park` steps the turn is put aside."""
    engine.reset()
    engine.extend(prompt)
    constraint = grammar.matcher()
    engine.begin(sampling, prompt, None, constraint)
    said: list[int] = []
    steps = 0
    while len(said) < MOST:
        chunk = engine.step()
        said += chunk.tokens
        steps += 1
        if chunk.stop is not None:
            break
        if park and steps % park == 0:
            capsule = engine.snapshot()
            engine.reset()
            engine.extend(prompt[:7])
            engine.restore(capsule)
            engine.begin(sampling, prompt, np.array(said, dtype=np.int32), constraint)
    return said


EVERY_SCHEMA = [*SCHEMAS, *MORE.values()]

FEATURES = {
    *("enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "$anchor", "definitions"),
    *("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format", "properties", "required"),
    *("additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "title", "description", "default"),
}


def keys_in(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keys_in, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(keys_in, schema.values()))


def test_there_are_a_hundred_schemas_and_more_and_no_two_are_the_same() -> None:
    assert len(SCHEMAS) >= 100
    assert len(EVERY_SCHEMA) >= 135
    assert len({json.dumps(schema, sort_keys=True) for schema in EVERY_SCHEMA}) == len(EVERY_SCHEMA)
    for schema in EVERY_SCHEMA:
        Draft202012Validator.check_schema(schema)
    assert keys_in(EVERY_SCHEMA) >= FEATURES
    assert formats_in(EVERY_SCHEMA) == set(CHECKS), "a format that nobody checks proves nothing"


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        ("date", "2026-02-30"),
        ("time", "24:00:00Z"),
        ("time", "10:00:00"),
        ("date-time", "2026-02-30T10:00:00Z"),
        ("duration", "P"),
        ("uuid", "1234"),
        ("ipv4", "1.2.3.256"),
        ("ipv6", "1::2::3"),
        ("email", "nobody"),
        ("hostname", "-a.example"),
        ("uri", "no scheme"),
    ],
)
def test_what_is_no_value_of_a_format_is_noticed(form: str, wrong: str) -> None:
    with pytest.raises(ValidationError):
        check(wrong, {"type": "string", "format": form})


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_kept_is_refused_by_its_name(compiler: GrammarCompiler, name: str) -> None:
    schema, word = REFUSED[name]
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    with pytest.raises(InvalidRequestError) as refused:
        compiler.compile(Constraint(response_format=form))
    assert word in refused.value.message


def written(
    engine: TorchEngine,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
    schema: Any,
    seed: int,
) -> str:
    """What the model writes, at temperature 1; a cut reply proves nothing and is an error."""
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    grammar = compiled(compiler, response_format=form)
    sampling = replace(WARM, seed=seed, drafts=seed % 5, end_tokens=ends)
    said = reply(engine, prompt, sampling, grammar)
    assert said[-1] in ends, f"cut at {MOST} tokens: {schema}"
    output = TurnOutput(OutputSpec(), tokenizer, ends)
    output.feed(said)
    output.finish()
    return output.message().content


PARTS = 8
"""Each well below a test's time limit, on a busy machine too."""


@pytest.mark.parametrize("part", range(PARTS))
def test_what_the_model_writes_under_a_hundred_schemas_is_valid(
    nano: TorchEngine,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
    part: int,
) -> None:
    for seed, schema in list(enumerate(EVERY_SCHEMA))[part::PARTS]:
        text = written(nano, compiler, tokenizer, ends, prompt, schema, seed)
        check(json.loads(text), schema)


def test_other_seeds_write_other_values_and_all_are_valid(
    nano: TorchEngine,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
) -> None:
    """At temperature 1 a schema is walked along many ways, not along one."""
    for name in ("pydantic: a drawing", "names and a pattern of names", "format ipv6"):
        texts = [
            written(nano, compiler, tokenizer, ends, prompt, MORE[name], seed) for seed in range(6)
        ]
        for text in texts:
            check(json.loads(text), MORE[name])
        assert len(set(texts)) >= 3, texts


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_the_model_calls_is_valid_by_the_tools_own_schemas(
    nano: TorchEngine,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
    choice: str,
) -> None:
    grammar = compiled(compiler, tools=TOOLS, choice=choice)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    called = 0
    for seed in range(12):
        sampling = replace(WARM, seed=seed, drafts=seed % 5, end_tokens=ends)
        said = reply(nano, prompt, sampling, grammar)
        output = TurnOutput(OutputSpec(tools=TOOLS), tokenizer, ends)
        output.feed(said)
        output.finish()
        message = output.message()
        if choice == "required":
            assert message.content == "" or said[-1] not in ends
        for call in message.tool_calls:
            called += 1
            Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
    assert called >= 6, "no call, nothing shown"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_a_grammar_drafts_and_parks_change_no_token(
    nano: TorchEngine,
    compiler: GrammarCompiler,
    ends: tuple[int, ...],
    prompt: TokenArray,
    temperature: float,
) -> None:
    grammar = compiled(compiler, tools=TOOLS, choice="required", parallel=False)
    for seed in (1, 2):
        sampling = Sampling(temperature=temperature, seed=seed, end_tokens=ends)
        alone = reply(nano, prompt, sampling, grammar)
        for drafts in range(1, 5):
            drafting = replace(sampling, drafts=drafts)
            assert reply(nano, prompt, drafting, grammar) == alone, drafts
            assert reply(nano, prompt, drafting, grammar, park=2) == alone, drafts


def test_a_draft_is_drawn_under_the_mask_of_its_place(
    nano: TorchEngine, compiler: GrammarCompiler, ends: tuple[int, ...], prompt: TokenArray
) -> None:
    """Where the grammar leaves one token, no draft can miss it."""
    only = compiled(compiler, tools=(TOOLS[2],), choice="required", parallel=False)
    nano.reset()
    nano.extend(prompt)
    nano.begin(replace(WARM, drafts=4, end_tokens=ends), prompt, None, only.matcher())
    drafted = accepted = 0
    stop = None
    while stop is None:
        chunk = nano.step()
        stop = chunk.stop
        drafted += chunk.drafted
        accepted += chunk.accepted
    assert drafted >= 4
    assert accepted >= drafted - 1  # behind the call, two end tokens are allowed
