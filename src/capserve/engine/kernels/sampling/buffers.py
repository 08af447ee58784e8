"""Where do the kernels of a captured graph read how a turn samples?

In static buffers on the device, filled where a turn begins. What a turn does not use is neither
uploaded nor read: a flag says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from capserve.engine.seam import MAX_DRAFTS, Sampling, TokenArray, TokenMask

MAX_ROWS = MAX_DRAFTS + 1
MAX_ENDS = 16

SAMPLED, FILTERED, NUCLEUS, PENALISED, BIASED, MASKED, KEPT = (1 << bit for bit in range(7))
"""Flags. FILTERED: top-k, top-p or min-p leave something out. NUCLEUS: top-p without top-k, which
needs the sum over the whole vocabulary. KEPT: `scores` are wanted after the step."""

FLAGS, TOP_K, TEMPERATURE, TOP_P, FLOOR, REPETITION, PRESENCE, FREQUENCY, SEED = range(9)
ENDS = 16
"""Places in `values`; SEED takes two words, the low one first, and ENDS the last 16."""


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """Of one engine. `vocab`: ids in [0, vocab) can be chosen."""

    vocab: int
    values: Tensor
    """[32] int32: flags, numbers (float32 ones as their bits), end tokens padded with -1."""
    counts: Tensor
    """[vocab] int32: how often this turn decided each id. Valid when PENALISED."""
    seen: Tensor
    """[vocab] int8: 1 for ids in context or output. Valid when PENALISED."""
    bias: Tensor
    """[vocab] f32. Valid when BIASED."""
    mask: Tensor
    """[MAX_ROWS, ceil(vocab / 32)] int32, `seam.TokenMask` of each row. Valid when MASKED."""

    @staticmethod
    def make(vocab: int, device: torch.device) -> SamplingBuffers:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def ids(dtype: torch.dtype) -> Tensor:
            """[vocab], of a buffer in which loads of 16 end."""
            return zeros((vocab + 15) // 16 * 16, dtype=dtype)[:vocab]

        return SamplingBuffers(
            vocab,
            values=zeros(32, dtype=torch.int32),
            counts=ids(torch.int32),
            seen=ids(torch.int8),
            bias=ids(torch.float32),
            mask=zeros(MAX_ROWS, (vocab + 31) // 32, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        parts = self.values, self.counts, self.seen, self.bias, self.mask
        return sum(part.nbytes for part in parts)

    @property
    def ends(self) -> Tensor:
        """[16] int32, a view."""
        return self.values[ENDS : ENDS + MAX_ENDS]

    def load(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: Sequence[int] = (),
        *,
        constrained: bool = False,
    ) -> None:
        """Upload a turn's settings, as `Sampler` takes them. A constrained turn needs `load_masks`
        before each step."""
        assert len(sampling.end_tokens) <= MAX_ENDS, f"{len(sampling.end_tokens)} end tokens"
        penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self.values.copy_(torch.from_numpy(self._packed(sampling, penalised, constrained)))
        if penalised:
            decided = np.asarray(output, np.int64)
            counts = np.bincount(decided, minlength=self.vocab)
            seen = np.zeros(self.vocab, np.int8)
            seen[context[context < self.vocab]] = 1
            seen[decided] = 1
            self.counts.copy_(torch.from_numpy(counts.astype(np.int32)))
            self.seen.copy_(torch.from_numpy(seen))
        if sampling.logit_bias:
            bias = np.zeros(self.vocab, np.float32)
            for token, value in sampling.logit_bias:
                bias[token] += np.float32(value)
            self.bias.copy_(torch.from_numpy(bias))

    def load_masks(self, masks: Sequence[TokenMask | None], first: int = 0) -> None:
        """What is allowed in rows first, first + 1, ...; None allows every id."""
        assert first + len(masks) <= MAX_ROWS
        words = np.full((len(masks), self.mask.shape[1]), -1, np.int32)
        for row, mask in zip(words, masks, strict=True):
            if mask is not None:
                row[:] = mask
        self.mask[first : first + len(masks)].copy_(torch.from_numpy(words))

    def _packed(self, sampling: Sampling, penalised: bool, constrained: bool) -> np.ndarray:
        top_k = sampling.top_k if sampling.top_k < self.vocab else 0
        sampled = sampling.temperature > 0
        flags = PENALISED * penalised | BIASED * bool(sampling.logit_bias) | MASKED * constrained
        flags |= SAMPLED * sampled | KEPT * (sampling.top_logprobs is not None)
        if sampled and (top_k or sampling.top_p < 1 or sampling.min_p > 0):
            flags |= FILTERED | NUCLEUS * (top_k == 0 and sampling.top_p < 1)
        values = np.zeros(32, np.int32)
        values[FLAGS], values[TOP_K] = flags, top_k
        floats = values.view(np.float32)
        floats[TEMPERATURE] = sampling.temperature
        floats[TOP_P] = sampling.top_p
        floats[FLOOR] = log_min_p(sampling.min_p)
        floats[REPETITION] = sampling.repetition_penalty
        floats[PRESENCE] = sampling.presence_penalty
        floats[FREQUENCY] = sampling.frequency_penalty
        words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32)
        values[SEED : SEED + 2] = words.view(np.int32)
        values[ENDS:] = -1
        values[ENDS : ENDS + len(sampling.end_tokens)] = sampling.end_tokens
        return values


def log_min_p(min_p: float) -> float:
    """A float32's value, the same for host and card; -inf keeps everything."""
    return float(torch.log(torch.tensor(min_p))) if min_p > 0 else -math.inf
