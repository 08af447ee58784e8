"""Which token does the target choose, given its logits, the turn's settings and the position?

One rule for greedy and sampling: after penalties, bias, mask and temperature, and among the ids
that top-k, top-p and min-p keep, the id with the largest logit plus Gumbel noise (Gumbel-max). The
noise is a function of (seed, position, id), so the choice is a function of logits and position
alone (E5): no generator is advanced, and a draft made with the same noise agrees more often.
What the filters keep is defined in `kernels/sampling/reference.py`, for host and card.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from capserve.engine.kernels.sampling.reference import logprobs, pick
from capserve.engine.seam import Sampling, TokenArray, TokenConstraint, TokenLogprob, TokenMask


class Masks:
    """What a turn's constraint allows, after what was decided and along a chain of drafts.

    Each mask is asked for once: the row that verifies a draft needs the mask under which it was
    drawn.
    """

    def __init__(self, constraint: TokenConstraint, vocab: int, device: torch.device) -> None:
        constraint.restart()
        self._constraint = constraint
        self._vocab = vocab
        self._shifts = torch.arange(32, dtype=torch.int32, device=device)
        self._drafts: list[int] = []
        self._known: list[Tensor | None] = []
        """The mask after i of the drafts, i = 0, 1, ..., as far as it was asked for."""

    def apply(self, scores: Tensor, drafts: int = 0) -> Tensor:
        """scores [V] f32 with -inf where nothing is allowed, behind `drafts` advanced drafts."""
        assert drafts <= len(self._known)
        if drafts == len(self._known):
            self._known.append(self._unpacked(self._constraint.mask()))
        allowed = self._known[drafts]
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def draft(self, token: int) -> None:
        self._constraint.advance(token)
        self._drafts.append(token)

    @property
    def drafted(self) -> int:
        return len(self._drafts)

    def undo_drafts(self) -> None:
        """Back to what was decided; the masks along the chain stay known."""
        if self._drafts:
            self._constraint.rollback(len(self._drafts))

    def commit(self, token: int) -> None:
        self._constraint.advance(token)
        if self._drafts and self._drafts[0] == token:
            del self._drafts[0], self._known[0]
        else:
            self._drafts, self._known = [], []

    def _unpacked(self, mask: TokenMask | None) -> Tensor | None:
        """[V] bool."""
        if mask is None:
            return None
        words = torch.from_numpy(mask).to(self._shifts.device).unsqueeze(-1)  # [V / 32, 1] i32
        return ((words >> self._shifts) & 1).view(-1)[: self._vocab].bool()


class Sampler:
    """One turn's chooser. Counts the turn's tokens for the penalties and leads its constraint."""

    def __init__(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: Sequence[int],
        vocab: int,
        device: torch.device,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.sampling = sampling
        self._device = device
        self._seen: Tensor | None = None  # [V] bool
        self._counts: Tensor | None = None  # [V] f32
        self._bias: Tensor | None = None  # [V] f32
        self._masks = None if constraint is None else Masks(constraint, vocab, device)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            ids = torch.from_numpy(context).to(device).long()
            self._seen[ids[ids < vocab]] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocab, device=device)
        if sampling.logit_bias:
            self._bias = torch.zeros(vocab, device=device)
            for token, bias in sampling.logit_bias:
                self._bias[token] += bias
        for token in output:
            self.commit(token)

    @property
    def plain_greedy(self) -> bool:
        """The choice is the argmax of the raw logits, and nothing else is asked."""
        return (
            self.sampling.temperature == 0
            and self._seen is None
            and self._counts is None
            and self._bias is None
            and self._masks is None
            and self.sampling.top_logprobs is None
        )

    def commit(self, token: int) -> None:
        """Count a token that the target decided."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self._masks is not None:
            self._masks.commit(token)

    def draft(self, logits: Tensor, position: int) -> int:
        """A guess at the token at `position`, behind the drafts drawn since the last token that
        was decided. `undo_drafts` ends the chain."""
        if self._masks is None:
            return self.choose(logits, position)
        masked = self._masks.apply(self._penalised(logits), self._masks.drafted)
        token = self._pick(masked, position)
        self._masks.draft(token)
        return token

    def undo_drafts(self) -> None:
        if self._masks is not None:
            self._masks.undo_drafts()

    def choose(self, logits: Tensor, position: int) -> int:
        """The token at `position` from logits [V] f32."""
        return self._pick(self._masked(logits), position)

    def choose_with_logprobs(self, logits: Tensor, position: int) -> tuple[int, TokenLogprob]:
        """The same token, with log probabilities after penalties, bias and mask, before
        temperature."""
        scores = self._masked(logits)
        token = self._pick(scores, position)
        (entry,) = logprobs(scores.unsqueeze(0), [token], self.sampling.top_logprobs or 0)
        return token, entry

    def _masked(self, logits: Tensor) -> Tensor:
        scores = self._penalised(logits)
        return scores if self._masks is None else self._masks.apply(scores)

    def _penalised(self, logits: Tensor) -> Tensor:
        s = self.sampling
        if self._seen is not None:
            scaled = torch.where(
                logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty
            )
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            logits = logits - s.frequency_penalty * self._counts
            logits = logits - s.presence_penalty * (self._counts > 0)
        if self._bias is not None:
            logits = logits + self._bias
        return logits

    def _pick(self, scores: Tensor, position: int) -> int:
        s = self.sampling
        return pick(
            scores,
            position,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            seed=s.seed,
        )
