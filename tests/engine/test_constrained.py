"""What the model writes under a grammar is valid, at any number of drafts and across a park."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.text.grammar import Constraint, Grammar, GrammarCompiler
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.tokenizer import Tokenizer
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


def test_there_are_a_hundred_schemas() -> None:
    assert len(SCHEMAS) >= 100
    for schema in SCHEMAS:
        Draft202012Validator.check_schema(schema)


def test_what_the_model_writes_under_a_hundred_schemas_is_valid(
    nano: TorchEngine,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
) -> None:
    cut = 0
    for n, schema in enumerate(SCHEMAS):
        form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
        grammar = compiled(compiler, response_format=form)
        sampling = replace(WARM, seed=n, drafts=n % 5, end_tokens=ends)
        said = reply(nano, prompt, sampling, grammar)
        if said[-1] not in ends:
            cut += 1
            continue
        output = TurnOutput(OutputSpec(), tokenizer, ends)
        output.feed(said)
        output.finish()
        value = json.loads(output.message().content)
        Draft202012Validator(schema).validate(value)
    assert cut == 0, "a cut reply proves nothing"


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
