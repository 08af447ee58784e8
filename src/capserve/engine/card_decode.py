"""How does a card decide a whole step with one launch?

Draft chain, verify, choice, acceptance and the bookkeeping of the state run on the device, captured
as one graph for each number of drafts; the host learns what was decided from one small copy. Only a
constrained turn makes a second stop: the masks of a verify need its drafts, and the host has them.

What a step left behind (`decided`, the cursor, `state.hidden`) is what the next one starts from:

    decided[0 .. count)        tokens since the last MTP slot that is built; the last is pending
    hidden[0 .. count)         the hidden states of the positions before them
    cursor.accepted            rows of the last verify that are not folded yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from capserve.engine.cursor import Cursor
from capserve.engine.decode import Step
from capserve.engine.graphs import Graphs
from capserve.engine.kernels.sampling.buffers import SamplingBuffers
from capserve.engine.kernels.sampling.reference import logprobs
from capserve.engine.kernels.sampling.triton import accept, choose, scratch
from capserve.engine.layers.linear import MAX_ROWS
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.models.qwen3_5_card import Place, StepNetwork
from capserve.engine.seam import (
    Chunk,
    Sampling,
    TokenArray,
    TokenConstraint,
    TokenLogprob,
    TokenMask,
)
from capserve.engine.state import State

Told = Callable[[int, int], None]
"""Called with (pieces recorded, pieces in all)."""

DRAFT_IDS = 98_304
"""Drafts are guessed among the ids below this, unless the text needs others: a byte-pair vocabulary
numbers its tokens in the order it learned them. Of the family's 248,077 ids those beyond make 0.05
to 0.25 % of source code and of English, and half of a Chinese or Russian text. The head's rows for
them are 1.5 of the 3.4 GB that a draft of the 27B shape reads (docs/log.md)."""

WIDE_SHARE = 0.02
"""With a larger share of ids beyond `DRAFT_IDS` in the last `SEEN` tokens, drafts take all ids."""

SEEN = 128

WIDE = " wide"

_RESULT_TOKENS = 2
"""Where the tokens begin in the result: behind their number and the stop token."""


class CardDecode:
    """Implements `decode.Decode`. Greedy, sampled, penalised and constrained turns replay the same
    graphs: how a turn samples lies in device memory."""

    def __init__(
        self,
        model: Qwen35,
        state: State,
        vocab: int,
        *,
        max_drafts: int,
        capture: bool,
    ) -> None:
        device = model.device
        self._draft_ids = DRAFT_IDS if vocab >= 2 * DRAFT_IDS else vocab
        self._state, self._has_mtp = state, model.mtp is not None
        self._network = StepNetwork(model, state)
        self._graphs = Graphs(device, capture=capture)
        self._max_drafts = max_drafts if self._has_mtp else 0

        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._cursor = Cursor(device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        """Where in `decided` the pending token stands, count - 1."""
        self._slot = words(1)
        """The position that decided[0] belongs to."""
        self._decided = words(MAX_ROWS)
        self._rows = words(MAX_ROWS)
        """Row 0 the pending token, then the drafts."""
        self._chosen = words(MAX_ROWS)
        self._result = words(16)
        self._told = torch.zeros(16, dtype=torch.int32, pin_memory=device.type == "cuda")
        width = model.config.hidden_size
        self._drafted = torch.zeros(MAX_ROWS, width, dtype=model.dtype, device=device)
        """MTP outputs: of the first call's rows, then of the draft before."""
        self._draft = self._drafted[:1].clone()
        self._logits = torch.zeros(MAX_ROWS, vocab, device=device)
        self._guesses = torch.full((1, vocab), -torch.inf, device=device)
        """Logits of a draft among the first ids; those of the others stay -inf."""
        self._scores = torch.zeros(MAX_ROWS, vocab, device=device)
        self._settings = SamplingBuffers.make(vocab, device)
        self._choice = scratch(vocab, device)

        self.pending: int | None = None
        self._count = 0
        self._accepted = 0
        """The host's knowledge of the cursor."""
        self._sampling: Sampling | None = None
        self._constraint: TokenConstraint | None = None
        self._recent: deque[bool] = deque(maxlen=SEEN)
        """Of the last tokens, which are beyond `draft_ids`."""

    @property
    def captured(self) -> int:
        """Graphs captured so far."""
        return self._graphs.captured

    @property
    def unbuilt_slots(self) -> int:
        return max(0, self._count - 1)

    # ---- what the host does between steps -----------------------------------------------------

    def forget(self) -> None:
        self.pending = self._sampling = self._constraint = None
        self._count = self._accepted = 0

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        decided: Sequence[int],
        constraint: TokenConstraint | None,
    ) -> None:
        self.pending = decided[-1] if decided else None
        self._sampling, self._constraint = sampling, constraint
        self._settings.load(sampling, context, decided, constrained=constraint is not None)
        if constraint is not None:
            constraint.restart()
            for token in decided:
                constraint.advance(token)
        self._recent.clear()
        self._note(context[-SEEN:].tolist())
        self._note(decided)
        self._count = 0  # the state is settled; the first step tells the device

    def settle(self, position: int) -> None:
        if self._accepted:
            self._network.fold(self._cursor)
        if self._count > 1:
            self._launch_slots()
        self._accepted = 0
        self._count = min(1, self._count)
        self._cursor.put(position=position, count=self._count)

    def step(self, position: int, most: int) -> Step:
        sampling = self._sampling
        assert sampling is not None, "step needs a begin"
        if self._count == 0:
            self._enter(position)
        if self.pending is None:
            self._load_masks([self._mask()])
            self._graphs.run("first")
            return Step(self._decide(drafted=0), ())
        drafts = min(sampling.drafts, most - 1, self._max_drafts)
        if drafts == 0:
            return self._plain_step(position)
        absorbed = self.pending
        if self._constraint is None:
            self._graphs.run(f"step {drafts}{self._width}")
        else:
            self._load_masks([self._mask(), *[None] * drafts])
            self._graphs.run(f"draft {drafts}{self._width}")
            self._load_masks(self._masks_along(self._rows[1 : drafts + 1].tolist()))
            self._graphs.run(f"verify {drafts}")
        chunk = self._decide(drafted=drafts)
        self._count = self._accepted = len(chunk.tokens)
        return Step(chunk, (absorbed, *chunk.tokens[:-1]))

    def _plain_step(self, position: int) -> Step:
        if self._count == MAX_ROWS:  # no room for one more hidden state
            self.settle(position)
        absorbed = self.pending
        assert absorbed is not None
        self._load_masks([self._mask()])
        self._graphs.run("step 0")
        chunk = self._decide(drafted=0)
        self._count = self._count + 1 if self._has_mtp else 1
        self._accepted = 1
        return Step(chunk, (absorbed,))

    def _enter(self, position: int) -> None:
        """The state was settled elsewhere: tell the device where it stands, and what is pending."""
        self._count = 1
        self._cursor.put(position=position, count=1)
        if self.pending is not None:
            self._decided[0] = self.pending

    def _decide(self, drafted: int) -> Chunk:
        """What the step decided, the one thing that crosses to the host."""
        sampling = self._sampling
        assert sampling is not None
        self._told.copy_(self._result, non_blocking=True)
        if self._result.is_cuda:
            torch.cuda.current_stream().synchronize()
        told = self._told.tolist()
        count, stop = told[0], told[1]
        tokens = tuple(told[_RESULT_TOKENS : _RESULT_TOKENS + count])
        best: tuple[TokenLogprob, ...] = ()
        if sampling.top_logprobs is not None:
            best = logprobs(self._scores[:count], tokens, sampling.top_logprobs)
        if self._constraint is not None:
            for token in tokens:
                self._constraint.advance(token)
        self._note(tokens)
        self.pending = tokens[-1]
        return Chunk(tokens, None if stop < 0 else stop, drafted, max(0, count - 1), best)

    @property
    def _width(self) -> str:
        """Which drafts the text at hand calls for: part of a piece's name."""
        if self._draft_ids == self._settings.vocab:
            return ""
        return WIDE if sum(self._recent) > WIDE_SHARE * len(self._recent) else ""

    def _note(self, tokens: Sequence[int]) -> None:
        self._recent.extend(token >= self._draft_ids for token in tokens)

    def _mask(self) -> TokenMask | None:
        return None if self._constraint is None else self._constraint.mask()

    def _load_masks(self, masks: Sequence[TokenMask | None]) -> None:
        if self._constraint is not None:
            self._settings.load_masks(masks)

    def _masks_along(self, drafts: Sequence[int]) -> list[TokenMask | None]:
        """The mask of each row of a verify. Behind a draft that is not allowed, or that ends the
        reply, nothing is decided: those rows stay free."""
        constraint, sampling = self._constraint, self._sampling
        assert constraint is not None
        assert sampling is not None
        masks: list[TokenMask | None] = [constraint.mask()]
        for draft in drafts:
            if draft in sampling.end_tokens or not _allows(masks[-1], draft):
                break
            constraint.advance(draft)
            masks.append(constraint.mask())
        constraint.rollback(len(masks) - 1)
        return masks + [None] * (len(drafts) + 1 - len(masks))

    # ---- what is captured -----------------------------------------------------------------------

    def record(self, told: Told | None = None) -> None:
        """Run every piece once and capture it. Changes the state: reset it afterwards. Needs room
        for MAX_ROWS + max_drafts positions."""
        pieces: dict[str, Callable[[], None]] = {"first": self._launch_first}
        pieces["step 0"] = self._launch_plain
        widths = {"": self._draft_ids}
        if self._draft_ids < self._settings.vocab:
            widths[WIDE] = self._settings.vocab
        for drafts in range(1, self._max_drafts + 1):
            pieces[f"verify {drafts}"] = partial(self._launch_verify, drafts)
            for name, ids in widths.items():
                pieces[f"draft {drafts}{name}"] = partial(self._launch_drafts, drafts, ids)
                pieces[f"step {drafts}{name}"] = partial(self._launch_step, drafts, ids)
        told = told or (lambda done, total: None)
        told(0, len(pieces))
        for i, (name, launches) in enumerate(pieces.items()):
            self._cursor.put(position=1, count=1)
            self._graphs.record(name, launches)
            told(i + 1, len(pieces))
        if self._has_mtp:
            self._cursor.put(position=1, count=1)
            self._launch_slots()  # not captured: once in eight steps without drafts
        self.forget()

    def _launch_first(self) -> None:
        network, hidden = self._network, self._state.hidden
        network.logits(hidden, self._logits, 1)
        self._choose(self._chosen, self._logits, rows=1, offset=0)
        self._accept(1, "first")

    def _launch_step(self, drafts: int, ids: int) -> None:
        self._launch_drafts(drafts, ids)
        self._launch_verify(drafts)

    def _launch_drafts(self, drafts: int, ids: int) -> None:
        """The pending token and `drafts` guesses, among the first `ids`, at what follows go to
        `rows`."""
        network, cursor = self._network, self._cursor
        self._find_last()
        torch.index_select(self._decided, 0, self._last, out=self._rows[:1])
        network.draft(self._decided, self._state.hidden, Place(self._slot), MAX_ROWS, self._drafted)
        torch.index_select(self._drafted, 0, self._last, out=self._draft)
        for i in range(drafts):
            if i:
                place = Place(cursor.position, i)
                network.draft(self._rows[i:], self._draft, place, 1, self._draft)
            guesses = self._logits if ids == self._settings.vocab else self._guesses
            network.logits(self._draft, guesses[:, :ids], 1, ids)
            self._choose(self._rows[1 + i :], guesses, rows=1, offset=1 + i, place=i)

    def _launch_verify(self, drafts: int) -> None:
        network, cursor, rows = self._network, self._cursor, drafts + 1
        network.fold(cursor)
        network.verify(self._rows, Place(cursor.position), rows, self._state.hidden)
        network.logits(self._state.hidden, self._logits, rows)
        self._choose(self._chosen, self._logits, rows=rows, offset=1)
        self._accept(rows, "verify")

    def _launch_plain(self) -> None:
        """A step of one row; its hidden state goes behind those whose MTP slots wait."""
        network, cursor, state = self._network, self._cursor, self._state
        self._find_last()
        torch.index_select(self._decided, 0, self._last, out=self._rows[:1])
        network.fold(cursor)
        network.verify(self._rows, Place(cursor.position), 1, self._draft)
        network.logits(self._draft, self._logits, 1)
        if self._has_mtp:
            state.hidden.index_copy_(0, self._last + 1, self._draft)
        else:
            state.hidden[:1].copy_(self._draft)
            cursor.count.zero_()  # nothing waits for a slot: decided[0] is the pending token
        self._choose(self._chosen, self._logits, rows=1, offset=1)
        self._accept(1, "append")

    def _launch_slots(self) -> None:
        """Build the MTP slots that wait; the last hidden state and the pending token come first."""
        state = self._state
        self._find_last()
        if self._has_mtp:
            self._network.draft(
                self._decided, state.hidden, Place(self._slot), MAX_ROWS, self._drafted
            )
        state.hidden[:1] = state.hidden.index_select(0, self._last)
        self._decided[:1] = self._decided.index_select(0, self._last)

    def _find_last(self) -> None:
        torch.sub(self._cursor.count, 1, out=self._last)
        torch.sub(self._cursor.position, self._last, out=self._slot)

    def _choose(
        self,
        chosen: torch.Tensor,
        logits: torch.Tensor,
        *,
        rows: int,
        offset: int,
        place: int = 0,
    ) -> None:
        choose(
            logits, self._settings, self._rows[1:], self._cursor.position, offset, rows,
            chosen, self._scores, self._choice, place=place,
        )  # fmt: skip

    def _accept(self, rows: int, mode: str) -> None:
        accept(
            self._chosen, self._rows[1:], self._settings, self._cursor, self._decided,
            self._result, rows, mode,
        )  # fmt: skip


def _allows(mask: TokenMask | None, token: int) -> bool:
    return mask is None or bool(int(mask[token // 32]) >> (token % 32) & 1)
