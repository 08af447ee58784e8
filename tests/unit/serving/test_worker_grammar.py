"""A turn keeps to its grammar wherever it is parked. One that the grammar gives up ends alone."""

from __future__ import annotations

import numpy as np
import pytest
from serving_harness import (
    END,
    Serving,
    cold_reply,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    user,
)

from capserve.engine.seam import Sampling, TokenMask
from capserve.errors import InvalidRequestError
from capserve.testing.fake_engine import FakeEngine
from capserve.text.prompt import Prompt

LONG = make_prompt([user(some_words(2000, seed=3))])
SHORT = make_prompt([user(some_words(20, seed=4))])
SAMPLING = Sampling(temperature=0.8, seed=7, drafts=3, end_tokens=(END,))
MOST = 60


class Residues:
    """The next id is 16 or more, and of one residue modulo 5 that depends on all before it."""

    def __init__(self, vocab: int, fails_after: int | None = None) -> None:
        self._vocab = vocab
        self._fails_after = fails_after
        self._tokens: list[int] = []

    def restart(self) -> None:
        self._tokens = []

    def mask(self) -> TokenMask | None:
        if self._fails_after is not None and len(self._tokens) >= self._fails_after:
            raise InvalidRequestError(
                "response_format: can't be enforced any further", param="response_format"
            )
        ids = np.arange(self._vocab)
        allowed = (ids >= 16) & (ids % 5 == self._residue())
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def advance(self, token: int) -> None:
        assert token >= 16, f"{token} was forbidden"
        assert token % 5 == self._residue(), f"{token} was forbidden"
        self._tokens.append(token)

    def rollback(self, tokens: int) -> None:
        del self._tokens[-tokens:]

    def _residue(self) -> int:
        return (sum(self._tokens) + len(self._tokens)) % 5


class Rule:
    """What `Grammar` is to the worker; counts its matchers."""

    def __init__(self, vocab: int = 512, fails_after: int | None = None) -> None:
        self._made_of = vocab, fails_after
        self.matchers = 0

    def matcher(self) -> Residues:
        self.matchers += 1
        return Residues(*self._made_of)


def cold_under_rule(s: Serving, prompt: Prompt, most: int) -> list[int]:
    engine = FakeEngine(s.engine.limits)
    engine.extend(prompt.tokens)
    engine.begin(SAMPLING, prompt.tokens, None, Rule().matcher())
    said: list[int] = []
    while len(said) < most:
        said += engine.step(most - len(said)).tokens
    return said


def keeps_to_the_rule(tokens: list[int]) -> bool:
    rule = Rule().matcher()
    for token in tokens:
        rule.advance(token)
    return True


@pytest.mark.parametrize("at", [1, 9])
def test_a_turn_that_was_parked_goes_on_under_its_grammar(at: int) -> None:
    with serving(min_slice_ms=0.0) as s:
        gate = s.engine.hold("step", at)
        grammar = Rule()
        _, long = s.submit(LONG, max_tokens=MOST, sampling=SAMPLING, grammar=grammar)
        gate.wait_arrived()
        _, short = s.submit(SHORT, max_tokens=4, sampling=SAMPLING)
        gate.open()
        assert finished(long.wait()).metrics.parks == 1
        assert long.tokens == cold_under_rule(s, LONG, MOST)
        assert keeps_to_the_rule(long.tokens)
        assert grammar.matchers == 1, "one for the turn, whatever it went through"
        # The turn in between has no part in it.
        finished(short.wait())
        assert short.tokens == cold_reply(s.engine.limits, SHORT, SAMPLING, 4)


def test_turns_that_share_a_grammar_do_not_share_where_they_are_in_it() -> None:
    with serving() as s:
        grammar = Rule()
        sinks = [
            s.submit(prompt, max_tokens=20, sampling=SAMPLING, grammar=grammar)[1]
            for prompt in (LONG, SHORT, LONG)
        ]
        for sink, prompt in zip(sinks, (LONG, SHORT, LONG), strict=True):
            finished(sink.wait())
            assert sink.tokens == cold_under_rule(s, prompt, 20)
        assert grammar.matchers == 3


@pytest.mark.parametrize("fails_after", [0, 1, 7])
def test_a_grammar_that_gives_up_ends_its_turn_with_the_clients_error_and_nobody_elses(
    fails_after: int,
) -> None:
    with serving() as s:
        finished(s.ask(LONG, sampling=SAMPLING)[0])  # there is a state to go on from
        end, sink = s.ask(
            LONG, max_tokens=20, sampling=SAMPLING, grammar=Rule(fails_after=fails_after)
        )
        error = failed(end)
        assert (error.status, error.param) == (400, "response_format")
        assert len(sink.tokens) <= fails_after
        assert keeps_to_the_rule(sink.tokens)
        assert s.worker.health()["status"] == "ok"
        assert s.worker.health()["faults"] == 0
        assert not any(session.busy for session in s.sessions.all())
        for prompt in (LONG, SHORT):
            end, sink = s.ask(prompt, max_tokens=20, sampling=SAMPLING)
            finished(end)
            assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 20)
