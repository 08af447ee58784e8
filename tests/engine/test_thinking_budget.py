"""A thought that is cut at its budget is exact: by drafts, by parks, and by what follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.text.grammar import GrammarCompiler
from capserve.text.grammar_rules import Constraint
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.thinking import Rule, ThinkingBudget
from capserve.text.tokenizer import Tokenizer

MOST = 90
SPEC = OutputSpec(starts_in_reasoning=True)


@pytest.fixture(scope="module")
def tokenizer(nano_dir: Any) -> Tokenizer:
    return Tokenizer.from_dir(nano_dir)


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.specials["<|im_end|>"], tokenizer.specials["<|endoftext|>"]


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> TokenArray:
    return tokenizer.encode(
        "<|im_start|>user\nWhat is 17 times 23, and why?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def reply(
    engine: TorchEngine,
    prompt: TokenArray,
    sampling: Sampling,
    budget: ThinkingBudget | None,
    rule: Rule | None = None,
    park: int = 0,
) -> list[int]:
    """Until an end token, or MOST tokens; every `park` steps the turn is put aside."""
    engine.reset()
    engine.extend(prompt)
    constraint = rule if budget is None else budget.follow(rule)
    engine.begin(sampling, prompt, None, constraint)
    said: list[int] = []
    steps = 0
    while len(said) < MOST:
        chunk = engine.step(MOST - len(said))
        said += chunk.tokens
        steps += 1
        if chunk.stop is not None:
            break
        if park and steps % park == 0:
            capsule = engine.snapshot()
            engine.reset()
            engine.extend(prompt[:7])
            engine.restore(capsule)
            # Also by a process that knows of the turn only what was said.
            if budget is not None and steps % (2 * park) == 0 and rule is None:
                constraint = budget.follow(None)
            engine.begin(sampling, prompt, np.array(said, dtype=np.int32), constraint)
    return said


def thinking_tokens(tokenizer: Tokenizer, ends: tuple[int, ...], said: list[int]) -> int:
    output = TurnOutput(SPEC, tokenizer, ends)
    output.feed(said)
    output.finish()
    return output.reasoning_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_a_budget_drafts_and_parks_change_no_token(
    nano: TorchEngine,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    prompt: TokenArray,
    temperature: float,
) -> None:
    sampling = Sampling(temperature=temperature, seed=4, end_tokens=ends)
    free = reply(nano, prompt, sampling, None)
    own = thinking_tokens(tokenizer, ends, free)
    assert own > 8, "a thought that is no longer than its budget shows nothing"
    for most in (0, 3, 8):
        budget = ThinkingBudget(tokenizer, SPEC, most)
        alone = reply(nano, prompt, sampling, budget)
        assert thinking_tokens(tokenizer, ends, alone) == max(most, 2)
        for drafts in (1, 4):
            drafting = replace(sampling, drafts=drafts)
            assert reply(nano, prompt, drafting, budget) == alone, (most, drafts)
            assert reply(nano, prompt, drafting, budget, park=2) == alone, (most, drafts)


def test_up_to_the_cut_and_behind_it_the_reply_is_the_models_own(
    nano: TorchEngine, tokenizer: Tokenizer, ends: tuple[int, ...], prompt: TokenArray
) -> None:
    """The answer is what a cold run says that reads prompt and thought as one text."""
    sampling = Sampling(temperature=0.8, seed=9, drafts=3, end_tokens=ends)
    free = reply(nano, prompt, sampling, None)
    for most in (12, 16):
        said = reply(nano, prompt, sampling, ThinkingBudget(tokenizer, SPEC, most))
        assert said[: most - 5] == free[: most - 5]
        closed = most + 1  # the blank line behind the mark
        known = np.concatenate([prompt, np.array(said[:closed], dtype=np.int32)])
        assert said[closed:] == reply(nano, known, sampling, None)[: len(said) - closed]
        assert len(said) > closed + 4


def test_a_budget_and_a_grammar_hold_together_at_any_number_of_drafts(
    nano: TorchEngine, tokenizer: Tokenizer, ends: tuple[int, ...], prompt: TokenArray
) -> None:
    schema = {
        "type": "object",
        "properties": {"product": {"type": "integer"}},
        "required": ["product"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    demanded = Constraint(response_format=form, starts_in_reasoning=True)
    grammar = GrammarCompiler(tokenizer, ends).compile(demanded)
    assert grammar is not None
    budget = ThinkingBudget(tokenizer, SPEC, 9)
    sampling = Sampling(temperature=1.0, seed=2, end_tokens=ends)
    alone = reply(nano, prompt, sampling, budget, grammar.matcher())
    assert thinking_tokens(tokenizer, ends, alone) == 9
    text = b"".join(map(tokenizer.token_bytes, alone)).decode()
    assert text.split("</think>\n\n")[1].startswith("{")
    for drafts in (1, 4):
        drafting = replace(sampling, drafts=drafts)
        for park in (0, 2):
            assert reply(nano, prompt, drafting, budget, grammar.matcher(), park) == alone
