"""What of a prompt is already known, and which state is the cheapest to start from?

`AutoPrefixPolicy` is pure: it reads the prompt, the hot journal, the other journals and the capsule
index, and returns a `PrefixPlan` value. It moves nothing.

The actions, by where the state comes from. Let p be the tokens that need no prefill:
  exact           the hot state holds the whole prompt: p == len(prompt).
  append          the hot state is a prefix of the prompt, by token ids alone.
  message_append  as append, but only because the prompt took over the journal's own tokens for
                  messages that mean the same (`prompt.spliced_tokens >= p`).
  truncate        a capsule inside the hot journal, which goes on after it: undo or edit.
  fork            a capsule inside the journal of a live session that is not hot, and that goes on
                  after it: a new branch starts there.
                  Also one at the tip of a busy session, whose own turn will go on there.
  restore         a capsule at the tip of a live session, which this turn continues; or one that no
                  live session contains (a pin that outlived its session).
  rebuild         nothing fits: p == 0.
A branch (truncate, fork) always gets a journal of its own, so nothing older is erased.

What a start costs is estimated in milliseconds: bytes that move, each at its tier's measured rate,
and tokens that are read. So the hot state is not preferred, it is cheap.

A capsule is matched by content: namespace, position, and a digest of the token bytes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from capserve.engine.seam import EngineLimits, TokenArray
from capserve.serving.capsules.catalog import Loss
from capserve.serving.capsules.footprint import Location
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.tiers import DISK
from capserve.serving.journal import JournalView, block_digests, prefix_digests
from capserve.serving.misses import Known, MissReason, explain
from capserve.text.prompt import Prompt


class PrefixAction(StrEnum):
    EXACT = "exact"
    APPEND = "append"
    MESSAGE_APPEND = "message_append"
    RESTORE = "restore"
    FORK = "fork"
    TRUNCATE = "truncate"
    REBUILD = "rebuild"


FIRST_RESTORE_RATES: Mapping[str, float] = MappingProxyType({"gpu": 1e-8, "host": 1e-6, DISK: 4e-6})
"""100 GB/s, 1 GB/s and 250 MB/s: below what the hardware does, so a first guess favours the hot."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What moving a state and reading a prompt cost now, as the worker measured them."""

    prefill_ms_per_token: float = 1.0
    decode_ms_per_token: float = 20.0
    restore_ms_per_byte: Mapping[str, float] = field(default_factory=lambda: FIRST_RESTORE_RATES)
    """By the tier that a state comes from."""

    def restore_rate(self, tier: str) -> float:
        """A tier that nobody guessed costs what the dearest one does."""
        return self.restore_ms_per_byte.get(tier, max(self.restore_ms_per_byte.values()))


@dataclass(frozen=True, slots=True)
class HotView:
    """The live state. Only made when it is valid; `position` is what it has absorbed."""

    journal: JournalView
    position: int
    bit_exact: bool
    """All of it was prefilled from grid points, so a cold run would give the same bits."""


class CapsuleIndex(Protocol):
    """The part of a capsule store that a plan reads."""

    def positions(self, namespace: str) -> Sequence[int]: ...
    def holds(self, key: CapsuleKey) -> bool: ...
    def exact(self, key: CapsuleKey) -> bool:
        """Was it prefilled from grid points alone, whoever kept it? KeyError when absent."""
        ...

    def lost_positions(self, namespace: str) -> Sequence[int]: ...
    def loss(self, key: CapsuleKey) -> Loss | None: ...
    def locate(self, key: CapsuleKey) -> Location: ...


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    action: PrefixAction
    position: int
    """p: tokens of the prompt that need no prefill."""
    capsule: CapsuleKey | None = None
    """What to restore; None for the hot state and for a rebuild."""
    session_id: str | None = None
    """The session that goes on; None starts a new one."""
    parent_id: str | None = None
    """For a new session: the one it branches from."""
    miss: MissReason | None = None
    """Why not more was reused; None when all that was known was."""
    estimated_ms: float = 0.0
    tier: str | None = None
    """Where `capsule` lies."""


MIN_DECODED_TOKENS = 64
"""A cancelled reply of fewer is decoded again sooner than a capsule of it is worth its bytes."""


@dataclass(frozen=True, slots=True)
class AutoPrefixPolicy:
    limits: EngineLimits
    exact: bool = False
    """Start at grid points only, from states that were prefilled: same bits as a cold run."""
    checkpoint_interval: int = 2048
    _step: int = field(init=False)

    def __post_init__(self) -> None:
        chunk = self.limits.prefill_chunk
        step = max(chunk, self.checkpoint_interval // chunk * chunk)
        object.__setattr__(self, "_step", step)

    def plan(
        self,
        prompt: Prompt,
        namespace: str,
        hot: HotView | None,
        journals: Sequence[JournalView],
        index: CapsuleIndex,
        rates: Rates,
        at_most: int | None = None,
    ) -> PrefixPlan:
        """The cheapest start for `prompt`, at position `at_most` or before it when that is given.

        `journals` are all live sessions' (the hot one's too), least recently used first. Journals
        of other namespaces are never matched; they only make a miss reason more precise.
        """
        tokens = prompt.tokens
        limit = len(tokens) if at_most is None else min(len(tokens), at_most)
        own = [journal for journal in journals if journal.namespace == namespace]
        blocks = block_digests(tokens)
        shared = {journal.session_id: journal.shares(tokens, blocks) for journal in own}
        usable_hot, hot_off_grid = self._hot_fits(hot, namespace, shared, limit)
        matches = self._match(tokens, namespace, index.positions(namespace), limit, index.holds)
        if self.exact:
            usable = [k for k in matches if not self._off_grid(k.position) and index.exact(k)]
        else:
            usable = matches

        best: PrefixPlan | None = None
        if hot is not None and usable_hot:
            best = self._from_hot(prompt, hot, rates)
        live = 0
        if hot is not None and hot.journal.namespace == namespace:
            live = min(hot.position, shared[hot.journal.session_id])
        for key in reversed(usable):
            unread_ms = (len(tokens) - key.position) * rates.prefill_ms_per_token
            if best is not None and unread_ms >= best.estimated_ms:
                break  # the earlier ones leave even more to read
            location = index.locate(key)
            cost = unread_ms + self._move_ms(key.position, location, live, rates)
            if best is None or cost < best.estimated_ms:
                action, session, parent = _place(key.position, own, shared, hot)
                best = PrefixPlan(
                    action, key.position, key, session, parent, None, cost, location.tier
                )
        if best is None:
            rebuild_ms = len(tokens) * rates.prefill_ms_per_token
            best = PrefixPlan(PrefixAction.REBUILD, 0, estimated_ms=rebuild_ms)
        off_grid = [k.position for k in matches if k not in usable] + hot_off_grid
        lost = self._lost(tokens, namespace, index, limit)
        known = Known(
            prompt, best.position, own, shared, journals, namespace, lost, off_grid, blocks
        )
        return replace(best, miss=explain(known))

    def boundaries(self, prompt: Prompt, start: int, pin: int | None = None) -> tuple[int, ...]:
        """Positions in `(start, len(prompt)]` to snapshot while this prompt is prefilled.

        The end of system and tools, the end of the prompt before the generation prompt, the end of
        a reply that is continued, the pin, the client's own breakpoints, and every
        `checkpoint_interval` tokens at multiples of the prefill chunk.
        """
        total = len(prompt.tokens)
        wanted = {prompt.system_end, prompt.prompt_end, pin or 0, *prompt.breakpoints}
        if prompt.continues_reply:
            wanted.add(total)
        wanted.update(range(self._step, total + 1, self._step))
        if self.exact:
            wanted = {self.limits.capsule_aligned_len(position) for position in wanted}
        return tuple(sorted(position for position in wanted if start < position <= total))

    def on_commit(
        self, position: int, *, bit_exact: bool, cancelled_after: int | None = None
    ) -> bool:
        """Is the state at the end of a turn, or of a cancelled prefill, worth a capsule?

        `bit_exact`: everything before `position` was prefilled from grid points. `cancelled_after`:
        the turn was cancelled when its reply had so many tokens. A client that goes on from what it
        has read of a long reply finds it; what it never read is never matched, since a capsule is
        matched by its tokens alone.
        """
        if cancelled_after is not None and cancelled_after < MIN_DECODED_TOKENS:
            return False
        return position > 0 and not (self._off_grid(position) or (self.exact and not bit_exact))

    def pin_position(self, prompt: Prompt, pin: int | bool) -> int | None:
        """Where a requested pin lies: True is the end of the prompt before the generation prompt.

        Floored to the grid in exact mode; 0 means that nothing is left to pin.
        """
        if pin is False:
            return None
        wanted = (prompt.prompt_end or len(prompt.tokens)) if pin is True else pin
        return self.limits.capsule_aligned_len(wanted) if self.exact else wanted

    def _move_ms(self, position: int, location: Location, live: int, rates: Rates) -> float:
        """From where it lies to the live buffers, whose first `live` tokens need not move."""
        limits = self.limits
        moved = limits.small_state_bytes + max(0, position - live) * limits.kv_bytes_per_token
        if location.tier == DISK:
            moved_ms = moved * rates.restore_rate(limits.tiers[-1])
            return moved_ms + location.move_bytes * rates.restore_rate(DISK)
        return moved * rates.restore_rate(location.tier)

    def _off_grid(self, position: int) -> bool:
        return self.exact and position % self.limits.grid != 0

    def _hot_fits(
        self, hot: HotView | None, namespace: str, shared: dict[str, int], limit: int
    ) -> tuple[bool, list[int]]:
        """Does the hot state start the prompt? And where, when only the grid forbids it."""
        if hot is None or hot.journal.namespace != namespace or hot.position == 0:
            return False, []
        if hot.journal.busy:
            return False, []
        # The pending token after `position` may differ: no state has absorbed it.
        if not min(shared[hot.journal.session_id], hot.position) == hot.position <= limit:
            return False, []
        if self._off_grid(hot.position) or (self.exact and not hot.bit_exact):
            return False, [hot.position]
        return True, []

    def _from_hot(self, prompt: Prompt, hot: HotView, rates: Rates) -> PrefixPlan:
        left = len(prompt.tokens) - hot.position
        if left == 0:
            action = PrefixAction.EXACT
        elif prompt.spliced_tokens >= hot.position:
            action = PrefixAction.MESSAGE_APPEND
        else:
            action = PrefixAction.APPEND
        cost = left * rates.prefill_ms_per_token
        return PrefixPlan(
            action, hot.position, session_id=hot.journal.session_id, estimated_ms=cost
        )

    def _match(
        self,
        tokens: TokenArray,
        namespace: str,
        positions: Iterable[int],
        limit: int,
        holds: _Holds,
    ) -> list[CapsuleKey]:
        candidates = [position for position in positions if position <= limit]
        digests = prefix_digests(tokens, candidates)
        keys = [
            CapsuleKey(namespace, position, digest)
            for position, digest in zip(candidates, digests, strict=True)
        ]
        return [key for key in keys if holds(key)]

    def _lost(
        self, tokens: TokenArray, namespace: str, index: CapsuleIndex, limit: int
    ) -> tuple[int, Loss] | None:
        positions = index.lost_positions(namespace)
        keys = self._match(
            tokens, namespace, positions, limit, lambda key: index.loss(key) is not None
        )
        if not keys:
            return None
        loss = index.loss(keys[-1])
        assert loss is not None
        return keys[-1].position, loss


class _Holds(Protocol):
    def __call__(self, key: CapsuleKey, /) -> bool: ...


def _place(
    position: int, own: Sequence[JournalView], shared: dict[str, int], hot: HotView | None
) -> tuple[PrefixAction, str | None, str | None]:
    """Action, session that goes on, and parent of a new one, for a capsule at `position`."""
    containing = [journal for journal in own if shared[journal.session_id] >= position]
    past = position + 1  # a tip lies here, but for a pending token
    for journal in containing:
        if hot is not None and journal.session_id == hot.journal.session_id:
            if len(journal.tokens) > past:
                return PrefixAction.TRUNCATE, None, journal.session_id
            break
    for journal in reversed(containing):
        if len(journal.tokens) <= past and not journal.busy:
            return PrefixAction.RESTORE, journal.session_id, None
    if containing:
        return PrefixAction.FORK, None, containing[-1].session_id
    return PrefixAction.RESTORE, None, None
