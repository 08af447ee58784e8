"""What of a draft survives the target's verdict?

Row 0 holds the pending token, row i the draft i; row i's logits decide the token after it. A draft
is accepted when it equals the token that the target decides at its place, so the output is the
target's own whatever was drafted (E5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from capserve.engine.sampling import Sampler
from capserve.engine.seam import TokenLogprob


@dataclass(frozen=True, slots=True)
class Verdict:
    tokens: tuple[int, ...]
    """Decided tokens; as many rows are part of the state from now on."""
    stop: int | None
    logprobs: tuple[TokenLogprob, ...]


def judge(logits: Tensor, drafts: Sequence[int], sampler: Sampler, position: int) -> Verdict:
    """logits [len(drafts) + 1, V] f32; row i decides the token at `position + i`.

    Walks the rows until a draft disagrees or an end token is decided, and commits what it decides
    to the sampler: each row is judged under the mask of its own place.
    """
    ends = sampler.sampling.end_tokens
    with_logprobs = sampler.sampling.top_logprobs is not None
    greedy = logits.argmax(-1).tolist() if sampler.plain_greedy else None
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for i in range(len(drafts) + 1):
        if greedy is not None:
            token = greedy[i]
        elif with_logprobs:
            token, logprob = sampler.choose_with_logprobs(logits[i], position + i)
            logprobs.append(logprob)
        else:
            token = sampler.choose(logits[i], position + i)
        sampler.commit(token)
        tokens.append(token)
        if token in ends:
            return Verdict(tuple(tokens), token, tuple(logprobs))
        if i < len(drafts) and token != drafts[i]:
            break
    return Verdict(tuple(tokens), None, tuple(logprobs))
