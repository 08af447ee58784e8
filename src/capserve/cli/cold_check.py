"""Did reuse change an answer?

Each reply is generated once more by a second engine that reuses nothing: reset, read the whole
prompt, sample the same way. The tokens must be the same. Where they are not, the cold engine's own
margin between the two tokens decides: below `NEAR_TIE` rounding may turn the choice, and the case
is counted and shown; above it the reuse was wrong. And since a server that takes parts of a prompt
from its own records could lose one, and answer the rest consistently, the prompt must hold every
text that the client sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from capserve.engine.margin import margin
from capserve.engine.seam import MAX_TOP_LOGPROBS, Engine, Sampling

NEAR_TIE = 1e-4
"""Of scores. States that were decoded and states that were prefilled differ by about 1e-6."""


class Outcome(StrEnum):
    EXACT = "exact"
    NEAR_TIE = "near tie"
    DIFFERS = "differs"
    LOST = "text lost"
    """The prompt lacks something that was sent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    at: int | None = None
    """Index in the output of the first token that differs."""
    margin: float | None = None
    """The cold engine's score of its own token there minus that of the served one; infinite when
    the served one is not among its most likely."""
    lost: str | None = None


def lost_text(prompt: str, sent: Iterable[str]) -> str | None:
    """The first of the `sent` texts that does not stand in `prompt`, in order; None when all do."""
    at = 0
    for text in sent:
        found = prompt.find(text, at)
        if found < 0:
            return text
        at = found + len(text)
    return None


def check(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], sampling: Sampling
) -> Verdict:
    """Compare `output` with what `engine`, cold, says to `prompt`. All of it, or up to the first
    difference: after one, the texts go different ways and say nothing about reuse."""
    tokens = np.asarray(prompt, dtype=np.int32)
    engine.reset()
    engine.extend(tokens)
    engine.begin(replace(sampling, top_logprobs=MAX_TOP_LOGPROBS), tokens)
    at = 0
    while at < len(output):
        chunk = engine.step()
        for i, token in enumerate(chunk.tokens[: len(output) - at]):
            if token != output[at + i]:
                index = at + i
                apart = margin(chunk.logprobs[i], output[index], len(prompt) + index, sampling)
                near = apart < NEAR_TIE
                return Verdict(Outcome.NEAR_TIE if near else Outcome.DIFFERS, index, apart)
        at += len(chunk.tokens)
        if chunk.stop is not None and at < len(output):
            return Verdict(Outcome.DIFFERS, at, None)
    return Verdict(Outcome.EXACT)
