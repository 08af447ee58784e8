"""How are the tokens of a turn decided, one step after another?

The turn's half of an engine: the pending token, the sampler, the drafts, and what of the state is
deferred from one step to the next. `HostDecode` asks the device for each thing in turn, and is the
definition; `card_decode.py` has the same answers from one captured graph a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from capserve.engine.layers.linear import MAX_ROWS
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.sampling import Sampler
from capserve.engine.seam import Chunk, Sampling, TokenArray, TokenConstraint
from capserve.engine.speculate import judge
from capserve.engine.state import State


@dataclass(frozen=True, slots=True)
class Step:
    """What one step decided, and the tokens that the state absorbed on the way."""

    chunk: Chunk
    absorbed: tuple[int, ...]


class Decode(Protocol):
    """Steps over one `State`. The caller keeps the position, and says it with each call.

    Deferred between two calls, until `settle`: rows of the last verify that are decided but not
    folded into the state, and MTP slots of tokens before the position that are not built.
    """

    @property
    def pending(self) -> int | None:
        """The last decided token, not absorbed yet; None before a turn's first step."""
        ...

    @property
    def unbuilt_slots(self) -> int:
        """How many MTP slots before the position wait."""
        ...

    def forget(self) -> None:
        """The state was moved or went on by `extend`: it is settled, and no turn is under way."""
        ...

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        decided: Sequence[int],
        constraint: TokenConstraint | None,
    ) -> None:
        """A turn's start, or its continuation behind the tokens it `decided` before."""
        ...

    def settle(self, position: int) -> None:
        """Bring every deferred part of the state up to the position."""
        ...

    def step(self, position: int, most: int) -> Step:
        """Decide at most `most` tokens. Needs a `begin`, and room for `most` absorbed tokens unless
        none is pending."""
        ...


class HostDecode:
    """Decodes with one call a draft and one a verify, and judges on the host."""

    def __init__(self, model: Qwen35, state: State, vocab: int) -> None:
        self._model, self._state = model, state
        self._vocab, self._device = vocab, model.device
        self.pending: int | None = None
        self._sampler: Sampler | None = None
        self._waiting_tokens: list[int] = []
        """Absorbed tokens whose MTP slot is not built yet. Their hidden states are the rows of
        `state.hidden` but the last, which is that of position - 1."""

    @property
    def unbuilt_slots(self) -> int:
        return len(self._waiting_tokens)

    def forget(self) -> None:
        self.pending = self._sampler = None
        self._waiting_tokens = []
        self._state.accepted_rows = 0

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        decided: Sequence[int],
        constraint: TokenConstraint | None,
    ) -> None:
        self.pending = decided[-1] if decided else None
        self._sampler = Sampler(sampling, context, decided, self._vocab, self._device, constraint)

    def settle(self, position: int) -> None:
        self._state.settle()
        self._build_waiting_slots(position)

    def step(self, position: int, most: int) -> Step:
        sampler = self._sampler
        assert sampler is not None, "step needs a begin"
        if self.pending is None:
            last = self._state.hidden[len(self._waiting_tokens)].unsqueeze(0)
            verdict = judge(self._model.logits(last), (), sampler, position)
            self.pending = verdict.tokens[-1]
            return Step(Chunk(verdict.tokens, verdict.stop, 0, 0, verdict.logprobs), ())
        drafts = self._draft(min(sampler.sampling.drafts, most - 1), sampler, position)
        if not drafts and len(self._waiting_tokens) == MAX_ROWS - 1:
            self._build_waiting_slots(position)  # make room for one more hidden state
        rows = [self.pending, *drafts]
        self._state.settle()
        hidden = self._model.verify(self._ids(rows), self._state, position)
        verdict = judge(self._model.logits(hidden), drafts, sampler, position + 1)
        count = len(verdict.tokens)
        self._keep(rows, hidden, count, drafted=bool(drafts))
        self.pending = verdict.tokens[-1]
        chunk = Chunk(verdict.tokens, verdict.stop, len(drafts), count - 1, verdict.logprobs)
        return Step(chunk, tuple(rows[:count]))

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self._device)

    def _build_waiting_slots(self, position: int) -> None:
        waiting = len(self._waiting_tokens)
        if not waiting:
            return
        state = self._state
        self._model.draft(
            self._ids(self._waiting_tokens), state.hidden[:waiting], state, position - waiting
        )
        state.hidden[0] = state.hidden[waiting].clone()
        self._waiting_tokens = []

    def _draft(self, count: int, sampler: Sampler, position: int) -> list[int]:
        """Up to `count` draft tokens for the positions after the pending one."""
        if count < 1:
            return []
        assert self.pending is not None
        tokens = [*self._waiting_tokens, self.pending]
        hidden = self._state.hidden[: len(tokens)]
        slot = position - len(self._waiting_tokens)
        drafts: list[int] = []
        for i in range(count):
            y = self._model.draft(self._ids(tokens), hidden, self._state, slot)[-1:]
            draft = sampler.draft(self._model.logits(y)[0], position + 1 + i)
            drafts.append(draft)
            if draft in sampler.sampling.end_tokens:
                break  # nothing is decided behind it
            slot, tokens, hidden = position + 1 + i, [draft], y
        sampler.undo_drafts()
        return drafts

    def _keep(self, rows: list[int], hidden: Tensor, count: int, *, drafted: bool) -> None:
        """The first `count` verified rows become part of the state."""
        state = self._state
        state.accepted_rows = count
        if self._model.mtp is None:
            state.hidden[0] = hidden[count - 1]
            return
        if drafted:  # the draft built every slot up to the pending token's
            state.hidden[:count] = hidden[:count]
            self._waiting_tokens = rows[1:count]
            return
        self._waiting_tokens.append(rows[0])
        state.hidden[len(self._waiting_tokens)] = hidden[0]
