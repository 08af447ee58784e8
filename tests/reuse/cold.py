"""What would an engine that reuses nothing have said?

The cold run resets, reads the whole prompt, samples with the same settings and without drafts. It
is led along the hot output token by token, so that everything after a near tie is compared too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from capserve.engine.capsule import TorchCapsule
from capserve.engine.margin import margin
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import MAX_TOP_LOGPROBS, Sampling, TokenArray, TokenLogprob
from capserve.text.thinking import BudgetRule, ThinkingBudget
from tests.engine.helpers import live_bits
from tests.reuse.ledger import MOST_DRIFT, NEAR_TIE, Ledger, NearTie


class ColdRun:
    """A second engine on the same checkpoint, for one thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._prompt: TokenArray = np.empty(0, dtype=np.int32)
        self._sampling = Sampling()
        self._said: list[int] = []
        self._own: list[TokenLogprob] = []
        self._rule: BudgetRule | None = None
        self._known: dict[tuple[object, ...], list[TokenLogprob]] = {}
        """What it said after a prompt, where nobody led it elsewhere."""

    def compare(
        self,
        prompt: TokenArray,
        sampling: Sampling,
        hot: Sequence[int],
        logs: list[TokenLogprob],
        thinking: ThinkingBudget | None = None,
    ) -> Ledger:
        """`start` and `follow`; what it has said before is not computed again."""
        budget = None if thinking is None else (thinking.most_tokens, bool(thinking.spec.tools))
        key = (prompt.tobytes(), _alone(sampling), budget)
        known = self._known.get(key, [])
        if len(known) >= len(hot) and all(k.token == t for k, t in zip(known, hot, strict=False)):
            seen = Ledger(tokens=len(hot), logprobs=len(logs), remembered=len(hot))
            pairs = zip(logs, known, strict=False)
            seen.drift = max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0)
            assert seen.drift <= MOST_DRIFT, f"a log probability is off by {seen.drift}"
            return seen
        self.start(prompt, sampling, thinking)
        seen = self.follow(hot, logs, strict=False)
        if not seen.near_ties:
            self._known[key] = self._own
        return seen

    def start(
        self, prompt: TokenArray, sampling: Sampling, thinking: ThinkingBudget | None = None
    ) -> None:
        """From nothing: read the whole prompt."""
        self._rule = None if thinking is None else thinking.follow(None)
        self._sampling = _alone(sampling)
        self._prompt, self._said, self._own = prompt, [], []
        self._engine.reset()
        self._engine.extend(prompt)
        self._engine.begin(self._sampling, prompt, None, self._rule)

    def follow(
        self, hot: Sequence[int], logprobs: Sequence[TokenLogprob], *, strict: bool
    ) -> Ledger:
        """Compare `hot`, the tokens that come next, with those of the cold run; and their log
        probabilities, when there are any.

        AssertionError when a token differs by more than a near tie, or, if `strict`, when any token
        or log probability differs at all.
        """
        seen = Ledger(tokens=len(hot), logprobs=len(logprobs))
        for token, known in itertools.zip_longest(hot, logprobs):
            chunk = self._engine.step()
            [chosen] = chunk.tokens
            self._said.append(token)
            self._own.append(chunk.logprobs[0])
            if chosen == token:
                if known is not None:
                    seen.drift = max(seen.drift, abs(known.logprob - chunk.logprobs[0].logprob))
                continue
            index = len(self._said) - 1
            position = len(self._prompt) + index
            gap = margin(chunk.logprobs[0], token, position, self._sampling)
            tie = NearTie(index, token, chosen, gap)
            assert gap < NEAR_TIE, f"the cold run decides otherwise: {tie}"
            assert not strict, f"no near tie is allowed here: {tie}"
            seen.near_ties.append(tie)
            said = np.array(self._said, dtype=np.int32)
            self._engine.begin(self._sampling, self._prompt, said, self._rule)
        most = 0.0 if strict else MOST_DRIFT
        assert seen.drift <= most, f"a log probability is off by {seen.drift}: a wrong state"
        return seen

    def state(self) -> TorchCapsule:
        """The bits now: of all of the prompt and of what was followed but the last token."""
        return live_bits(self._engine)


def _alone(sampling: Sampling) -> Sampling:
    # The end token is left out: it changes where a reply ends, never what is chosen.
    return replace(sampling, drafts=0, end_tokens=(), top_logprobs=MAX_TOP_LOGPROBS)
