"""E3, E5 and E12: every engine keeps to a turn's constraint, whatever it drafts and wherever a turn
is parked. The constraint here is a small automaton that checks how it is called."""

from __future__ import annotations

import numpy as np
import pytest
from contract_steps import GREEDY, SAMPLED, decode, most_drafts, some_tokens, with_drafts

from capserve.engine.seam import Engine, Sampling, TokenMask

COUNT = 24


class Residues:
    """The next id is one of two residues modulo 7 that depend on all ids before it. Every sixth
    token is free."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.tokens: list[int] = []
        self.advances = 0

    def restart(self) -> None:
        self.tokens = []

    def allowed(self, before: list[int]) -> set[int] | None:
        if len(before) % 6 == 5:
            return None
        first = (sum(before) * 3 + len(before)) % 7
        return {first, (first + 2) % 7}

    def mask(self) -> TokenMask | None:
        allowed = self.allowed(self.tokens)
        if allowed is None:
            return None
        bits = np.isin(np.arange(self._vocab) % 7, sorted(allowed))
        bits = np.concatenate([bits, np.ones(-len(bits) % 32, dtype=bool)])  # nobody's bits
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> None:
        allowed = self.allowed(self.tokens)
        assert allowed is None or token % 7 in allowed, f"{token} was forbidden"
        self.tokens.append(token)
        self.advances += 1

    def rollback(self, tokens: int) -> None:
        assert 0 < tokens <= len(self.tokens)
        del self.tokens[-tokens:]


def constrained(engine: Engine, prompt: np.ndarray, sampling: Sampling, count: int) -> list[int]:
    rule = Residues(engine.limits.vocab_size)
    engine.reset()
    engine.extend(prompt)
    engine.begin(sampling, prompt, None, rule)
    said: list[int] = []
    while len(said) < count:
        said += engine.step().tokens
        assert rule.tokens == said, "after a step the constraint stands where the output does"
    return said[:count]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_e12_every_token_was_allowed_where_it_stands(engine: Engine, sampling: Sampling) -> None:
    prompt = some_tokens(engine, 40)
    said = constrained(engine, prompt, sampling, COUNT)
    engine.reset()
    engine.extend(prompt)
    engine.begin(sampling, prompt)
    assert decode(engine, COUNT) != said, "a constraint that forbids nothing shows nothing"
    rule = Residues(engine.limits.vocab_size)
    for token in said:
        rule.advance(token)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_e5_under_a_constraint_the_tokens_do_not_depend_on_the_number_of_drafts(
    engine: Engine, sampling: Sampling
) -> None:
    prompt = some_tokens(engine, 40, seed=1)
    alone = constrained(engine, prompt, sampling, COUNT)
    for drafts in range(1, most_drafts(engine) + 1):
        assert constrained(engine, prompt, with_drafts(sampling, drafts), COUNT) == alone, drafts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("same_object", [True, False])
def test_e3_a_constrained_turn_that_was_parked_goes_on_as_it_would_have(
    engine: Engine, sampling: Sampling, same_object: bool
) -> None:
    drafting = with_drafts(sampling, most_drafts(engine))
    prompt = some_tokens(engine, 40, seed=2)
    alone = constrained(engine, prompt, drafting, COUNT)
    engine.reset()
    engine.extend(prompt)
    rule = Residues(engine.limits.vocab_size)
    engine.begin(drafting, prompt, None, rule)
    said: list[int] = []
    while len(said) < COUNT:
        said += engine.step().tokens
        parked = engine.snapshot()
        engine.reset()
        engine.extend(some_tokens(engine, 9, seed=3))  # somebody else's turn
        engine.restore(parked)
        if not same_object:
            rule = Residues(engine.limits.vocab_size)
        engine.begin(drafting, prompt, np.array(said, dtype=np.int32), rule)
    assert said[:COUNT] == alone


def test_a_turn_without_a_constraint_follows_one_that_had_one_freely(engine: Engine) -> None:
    prompt = some_tokens(engine, 40, seed=4)
    engine.extend(prompt)
    engine.begin(GREEDY, prompt)
    free = decode(engine, 8)
    constrained(engine, prompt, GREEDY, 8)
    engine.reset()
    engine.extend(prompt)
    engine.begin(GREEDY, prompt)
    assert decode(engine, 8) == free


def test_an_end_token_that_is_allowed_ends_the_chunk_under_a_constraint(engine: Engine) -> None:
    prompt = some_tokens(engine, 40, seed=5)
    alone = constrained(engine, prompt, GREEDY, COUNT)
    end = alone[COUNT // 2]
    first = alone.index(end) + 1
    for drafts in range(most_drafts(engine) + 1):
        sampling = with_drafts(GREEDY, drafts, end_tokens=(end,))
        engine.reset()
        engine.extend(prompt)
        rule = Residues(engine.limits.vocab_size)
        engine.begin(sampling, prompt, None, rule)
        said: list[int] = []
        stop = None
        while stop is None:
            chunk = engine.step()
            said += chunk.tokens
            stop = chunk.stop
        assert said == alone[:first]
        assert rule.tokens == said


def test_log_probabilities_are_those_among_the_allowed_ids(engine: Engine) -> None:
    prompt = some_tokens(engine, 40, seed=6)
    rule = Residues(engine.limits.vocab_size)
    engine.extend(prompt)
    engine.begin(with_drafts(GREEDY, 0, top_logprobs=5), prompt, None, rule)
    before: list[int] = []
    for _ in range(6):
        [logprob] = engine.step().logprobs
        allowed = rule.allowed(before)
        assert logprob.top[0] == (logprob.token, logprob.logprob)
        assert all(allowed is None or token % 7 in allowed for token, _ in logprob.top)
        assert all(np.isfinite(value) for _, value in logprob.top)
        before.append(logprob.token)
