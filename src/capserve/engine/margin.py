"""By how much did the engine prefer its choice to another token?

What was compared is the score: the log probability for a greedy choice; for a sampled one the log
probability over the temperature, plus the Gumbel noise of that id at that position. A difference
between two runs is rounding only where this margin is as small as rounding.
"""

from __future__ import annotations

import torch

from capserve.engine.kernels.philox.reference import gumbel
from capserve.engine.seam import Sampling, TokenLogprob


def margin(chosen: TokenLogprob, other: int, position: int, sampling: Sampling) -> float:
    """Score of `chosen` minus the score of `other`, both for the token at `position`.

    `chosen` brings the most likely ids of its position in `top`, as many as were asked for;
    infinite when `other` is not among them, since then it was no candidate.
    """
    known = dict(chosen.top)
    if other not in known:
        return float("inf")
    gap = chosen.logprob - known[other]
    if sampling.temperature == 0:
        return gap
    noise = gumbel(torch.tensor([chosen.token, other]), position, sampling.seed)
    return gap / sampling.temperature + float(noise[0] - noise[1])
