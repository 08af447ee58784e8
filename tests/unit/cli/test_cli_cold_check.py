"""The demo's judge: a wrong token, a lost text and a demo without reuse all fail."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from capserve.cli.agent import Exchange
from capserve.cli.cold_check import Outcome, Verdict, check, lost_text
from capserve.cli.demo import judge
from capserve.engine.kernels.philox.reference import gumbel
from capserve.engine.margin import margin
from capserve.engine.sampling import Sampler
from capserve.engine.seam import Chunk, Sampling, TokenArray, TokenLogprob
from capserve.testing.fake_engine import FakeEngine

PROMPT = tuple(range(10, 30))


def cold_output(sampling: Sampling, count: int = 40) -> tuple[int, ...]:
    engine = FakeEngine()
    tokens = np.array(PROMPT, dtype=np.int32)
    engine.extend(tokens)
    engine.begin(sampling, tokens)
    out: list[int] = []
    while len(out) < count:
        chunk = engine.step()
        out += chunk.tokens
        if chunk.stop is not None:
            break
    return tuple(out[:count])


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_same_tokens_are_exact_whatever_k_is(drafts: int) -> None:
    output = cold_output(Sampling())
    engine = FakeEngine()
    assert check(engine, PROMPT, output, Sampling(drafts=drafts)).outcome is Outcome.EXACT


def test_a_warm_engine_is_made_cold_first() -> None:
    engine = FakeEngine()
    engine.extend(np.array([1, 2, 3], dtype=np.int32))
    assert check(engine, PROMPT, cold_output(Sampling()), Sampling()).outcome is Outcome.EXACT


@pytest.mark.parametrize("at", [0, 1, 17, 39])
def test_one_wrong_token_is_found_where_it_is(at: int) -> None:
    output = list(cold_output(Sampling()))
    output[at] = (output[at] + 1) % 100
    verdict = check(FakeEngine(), PROMPT, output, Sampling())
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.at == at
    assert verdict.margin is not None


def test_a_prompt_that_lost_a_token_differs() -> None:
    output = cold_output(Sampling())
    assert check(FakeEngine(), PROMPT[1:], output, Sampling()).outcome is Outcome.DIFFERS


class TieEngine(FakeEngine):
    """Says that its best two tokens are `margin` apart, always."""

    margin = 0.0

    def begin(
        self, sampling: Sampling, context: TokenArray, output: TokenArray | None = None
    ) -> None:
        super().begin(replace(sampling, top_logprobs=None), context, output)

    def step(self) -> Chunk:
        chunk = super().step()
        tie = tuple(
            TokenLogprob(token, -1.0, ((token, -1.0), (token + 1, -1.0 - self.margin)))
            for token in chunk.tokens
        )
        return replace(chunk, logprobs=tie)


@pytest.mark.parametrize(("margin", "outcome"), [(5e-5, Outcome.NEAR_TIE), (2e-4, Outcome.DIFFERS)])
def test_only_a_margin_that_rounding_can_turn_excuses_a_difference(
    margin: float, outcome: Outcome
) -> None:
    engine = TieEngine()
    engine.margin = margin
    output = list(cold_output(Sampling()))
    output[5] += 1
    verdict = check(engine, PROMPT, output, Sampling())
    assert (verdict.outcome, verdict.at) == (outcome, 5)


def test_a_tie_of_two_other_tokens_excuses_nothing() -> None:
    engine = TieEngine()
    output = list(cold_output(Sampling()))
    output[5] += 2  # the cold run's best two are equal here, and this is neither
    verdict = check(engine, PROMPT, output, Sampling())
    assert verdict == Verdict(Outcome.DIFFERS, 5, math.inf)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_sampled_choice_is_judged_with_its_temperature_and_noise(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=11)
    chosen = TokenLogprob(7, -1.0, ((7, -1.0), (8, -1.5)))
    noise = gumbel(torch.tensor([7, 8]), 40, 11).tolist()
    # The score that the sampler compares: scaled log probability plus the id's own noise.
    expected = (-1.0 / temperature + noise[0]) - (-1.5 / temperature + noise[1])
    assert margin(chosen, 8, 40, sampling) == pytest.approx(expected)
    assert margin(chosen, 8, 41, sampling) != pytest.approx(expected)
    assert margin(chosen, 8, 40, Sampling()) == pytest.approx(0.5)


def test_the_sampled_margin_agrees_with_the_sampler() -> None:
    logits = torch.log_softmax(torch.linspace(0.0, 2.0, 12), -1)
    for position in range(50):
        sampling = Sampling(temperature=0.8, seed=3, top_logprobs=12)
        sampler = Sampler(sampling, np.empty(0, np.int32), (), 12, torch.device("cpu"))
        token, known = sampler.choose_with_logprobs(logits, position)
        assert all(
            margin(known, other, position, sampling) > 0 for other in range(12) if other != token
        )


def test_a_reply_that_goes_on_after_the_cold_end_differs() -> None:
    plain = cold_output(Sampling())
    ending = Sampling(end_tokens=(plain[6],))
    first = plain.index(plain[6])
    verdict = check(FakeEngine(), PROMPT, plain, ending)
    assert (verdict.outcome, verdict.at) == (Outcome.DIFFERS, first + 1)


def test_every_text_that_was_sent_must_stand_in_the_prompt_in_order() -> None:
    assert lost_text("system S user a assistant b user a", ["S", "a", "b", "a"]) is None
    assert lost_text("user a assistant b user a", ["S", "a", "b", "a"]) == "S"
    assert lost_text("system S user a assistant b", ["S", "a", "b", "a"]) == "a"


def exchange(cached: int) -> Exchange:
    return Exchange("turn", PROMPT, (1,), Sampling(), {"cached_tokens": cached}, 1.0, {}, ())


@pytest.mark.parametrize(
    ("cached", "verdict", "code"),
    [
        (8, Verdict(Outcome.EXACT), 0),
        (8, Verdict(Outcome.NEAR_TIE, 3, 1e-6), 0),
        (8, Verdict(Outcome.DIFFERS, 3, 0.5), 1),
        (8, Verdict(Outcome.DIFFERS, 3, math.inf), 1),
        (8, Verdict(Outcome.DIFFERS, 3), 1),
        (8, Verdict(Outcome.LOST, lost="a text"), 1),
        (0, Verdict(Outcome.EXACT), 1),
    ],
)
def test_the_demo_succeeds_only_with_reuse_and_without_a_difference(
    cached: int, verdict: Verdict, code: int
) -> None:
    out = io.StringIO()
    assert judge(Console(file=out, width=200), [exchange(cached)], [verdict]) == code
    assert ("FAILED" in out.getvalue()) == bool(code)
    if verdict.outcome is not Outcome.EXACT:
        assert "turn 1: " in out.getvalue()
