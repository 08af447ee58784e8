"""Live states become capsules and capsules become sessions' states again, token-exact."""

from __future__ import annotations

import numpy as np
import pytest
from store_harness import ManualDisk

from capserve.engine.seam import Sampling, TokenArray
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleLostError, CapsuleStore
from capserve.serving.journal import Journal, JournalView, Span, SpanKind
from capserve.serving.prefix import AutoPrefixPolicy, PrefixAction, PrefixPlan, Rates
from capserve.serving.sessions.registry import Session, SessionRegistry
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Conversation
from capserve.text.prompt import Prompt

LIMITS = fake_limits(tiers=("gpu", "host"), small_state_bytes=1000, kv_bytes_per_token=1)
TOKENS = np.random.default_rng(3).integers(0, 500, 3000, dtype=np.int32)
SAMPLING = Sampling(temperature=1.0, seed=7, drafts=3)


def prompt_of(tokens: TokenArray) -> Prompt:
    return Prompt(tokens, Conversation(()), (b"head",), 0, len(tokens))


class Bed:
    """An engine, a store, sessions, and the keeper between them."""

    def __init__(self, gpu: int = 1 << 20, host: int = 1 << 20) -> None:
        self.engine = FakeEngine(LIMITS)
        self.disk = ManualDisk()
        self.store = CapsuleStore(self.engine, {"gpu": gpu, "host": host}, self.disk)
        self.sessions = SessionRegistry(64, 3600.0)
        self.keeper = Keeper(self.engine, self.store, self.sessions)
        self.policy = AutoPrefixPolicy(LIMITS)

    def plan(self, tokens: TokenArray) -> PrefixPlan:
        views: list[JournalView] = self.sessions.views()
        hot = self.sessions.hot_view(LIMITS.grid)
        return self.policy.plan(prompt_of(tokens), "k/a", hot, views, self.store, Rates())

    def take_up(self, tokens: TokenArray, named: Session | None = None) -> tuple[Session, int]:
        return self.keeper.take_up(self.plan(tokens), "k/a", prompt_of(tokens), named)

    def read(self, session: Session, tokens: TokenArray) -> None:
        """Prefill up to the end of `tokens`."""
        rest = tokens[self.engine.position :]
        if len(rest):
            self.engine.extend(rest)
            session.journal.append(rest, SpanKind.PREFILL)

    def say(self, session: Session, steps: int) -> None:
        for _ in range(steps):
            session.journal.append(self.engine.step().tokens, SpanKind.DECODE)

    def turn(self, tokens: TokenArray, named: Session | None = None) -> Session:
        session, _ = self.take_up(tokens, named)
        self.read(session, tokens)
        assert self.keeper.keep(session) is None
        self.sessions.mark_hot(session, self.engine.position)
        return session

    def state_is(self, tokens: TokenArray) -> bool:
        return bytes(self.engine._tokens) == tokens.tobytes()


def test_a_capsule_is_based_on_the_boundary_before_it() -> None:
    bed = Bed()
    session = bed.turn(TOKENS[:600])
    first = session.newest
    session = bed.turn(TOKENS[:1100])
    assert session.newest is not None
    assert bed.store.entry(session.newest).based_on == first
    assert [key.position for key in bed.keeper.boundaries(session)] == [600, 1100]
    bed.keeper.expire(0.0)


def test_one_that_lies_on_disk_alone_is_copied_instead_of_read() -> None:
    bed = Bed()
    session = bed.turn(TOKENS[:600])
    bed.disk.write()
    bed.store.protect(None)
    bed.store.demote("gpu")
    bed.store.demote("host")
    assert bed.store.locate(bed.keeper.boundaries(session)[0]).tier == "disk"
    assert bed.keeper.keep(session) is None
    assert bed.store.locate(bed.keeper.boundaries(session)[0]).tier == "gpu"
    assert bed.disk.reads == []
    bed.store.check()


def test_a_state_comes_back_from_every_tier() -> None:
    bed = Bed()
    bed.turn(TOKENS[:1100])
    for tier, demotions in (("gpu", ()), ("host", ("gpu",)), ("disk", ("host",))):
        bed.disk.write()
        bed.store.protect(None)
        for lower in demotions:
            bed.store.demote(lower)
        bed.sessions.clear_hot()
        bed.engine.reset()
        plan = bed.plan(TOKENS[:1200])
        assert (plan.action, plan.position, plan.tier) == (PrefixAction.RESTORE, 1100, tier)
        session, moved = bed.take_up(TOKENS[:1200])
        assert bed.state_is(TOKENS[:1100])
        assert moved == 2100
        assert len(session.journal) == 1100
        bed.store.check()
    assert len(bed.sessions) == 1


def test_a_capsule_that_is_lost_changes_nothing_and_is_not_planned_for_again() -> None:
    bed = Bed()
    session = bed.turn(TOKENS[:600])
    bed.disk.write()
    bed.store.protect(None)
    bed.store.demote("gpu")
    bed.store.demote("host")
    bed.turn(TOKENS[1000:1400])
    bed.disk.torn.update(bed.disk.files)
    with pytest.raises(CapsuleLostError):
        bed.take_up(TOKENS[:700])
    assert bed.state_is(TOKENS[1000:1400])
    assert bed.sessions.hot is None
    assert len(session.journal) == 600
    plan = bed.plan(TOKENS[:700])
    assert (plan.action, str(plan.miss)) == (PrefixAction.REBUILD, "evicted")
    bed.store.check()


def test_a_named_session_gets_the_state_wherever_it_comes_from_and_keeps_its_id() -> None:
    bed = Bed()
    mine = bed.turn(TOKENS[:600])
    mine.journal.mark(590, 2)
    other = bed.turn(np.concatenate([TOKENS[:600], TOKENS[50:650]]))
    other_tokens = other.journal.tokens

    # From the other's hot state.
    session, _ = bed.take_up(np.concatenate([other_tokens, TOKENS[:9]]), named=mine)
    assert session is mine
    assert mine.journal.tokens.tolist() == other_tokens.tolist()
    assert mine.journal.spans == other.journal.spans
    assert bed.state_is(other_tokens)
    assert other.journal.tokens.tolist() == other_tokens.tolist()

    # From a boundary in the middle of its own journal.
    session, _ = bed.take_up(np.concatenate([TOKENS[:600], TOKENS[7:9]]), named=mine)
    assert session is mine
    assert (len(mine.journal), mine.journal.spans) == (600, (Span(SpanKind.PREFILL, 0, 600),))

    # From nothing.
    session, _ = bed.take_up(TOKENS[2000:2100], named=mine)
    assert (session, len(mine.journal), bed.engine.position) == (mine, 0, 0)
    assert mine.newest is None
    assert bed.sessions.get(mine.id) is mine
    bed.read(mine, TOKENS[2000:2100])
    assert bed.keeper.keep(mine) is None
    bed.store.check()


def test_a_named_session_that_goes_on_from_its_own_tip_keeps_its_marks() -> None:
    bed = Bed()
    mine = bed.turn(TOKENS[:600])
    mine.journal.mark(590, 2)
    session, _ = bed.take_up(TOKENS[:700], named=mine)
    assert session is mine
    assert [mark.position for mark in mine.journal.marks] == [590]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_parked_turn_goes_on_as_if_nothing_had_been(steps: int) -> None:
    alone = Bed()
    session, _ = alone.take_up(TOKENS[:900])
    alone.read(session, TOKENS[:900])
    alone.engine.begin(SAMPLING, TOKENS[:900])
    alone.say(session, steps + 6)
    expected = session.journal.tokens.tolist()

    bed = Bed()
    session, _ = bed.take_up(TOKENS[:900])
    session.busy = True
    bed.read(session, TOKENS[:900] if steps else TOKENS[:640])
    if steps:
        bed.engine.begin(SAMPLING, TOKENS[:900])
        bed.say(session, steps)
    key = bed.keeper.park(session)
    assert key is not None
    position = bed.engine.position
    guest = bed.turn(TOKENS[1000:1900])
    assert guest is not session
    bed.store.check()
    assert bed.keeper.unpark(session, key) > 0
    assert bed.engine.position == key.position == position
    bed.read(session, TOKENS[:900])
    output = session.journal.tokens[900:]
    bed.engine.begin(SAMPLING, TOKENS[:900], output if len(output) else None)
    while len(session.journal) < len(expected):
        bed.say(session, 1)
    assert session.journal.tokens.tolist()[: len(expected)] == expected
    bed.store.check()
    assert bed.store.footprint().capsules == 1, "the guest's; the parked state is gone"


def test_parking_holds_an_equal_capsule_instead_of_a_second_copy() -> None:
    bed = Bed()
    session = bed.turn(TOKENS[:600])
    before = bed.store.footprint()
    key = bed.keeper.park(session)
    assert key == session.newest
    assert bed.store.footprint() == before
    assert bed.engine.calls("snapshot") == 1
    bed.turn(TOKENS[1000:1500])
    assert key is not None
    bed.keeper.unpark(session, key)
    assert bed.store.holds(key), "it was there before, and stays"


def test_a_turn_is_not_parked_where_there_is_no_room_and_nothing_makes_way_for_it() -> None:
    bed = Bed(gpu=3200, host=0)
    bed.turn(TOKENS[:600])
    pinned = bed.store.entries_in("k/a")[0]
    assert bed.store.pin(pinned) is None
    session, _ = bed.take_up(TOKENS[1000:2200])
    bed.read(session, TOKENS[1000:2200])
    kept = bed.store.footprint().capsules
    assert bed.keeper.park(session) is None
    assert bed.store.footprint().capsules == kept
    assert bed.state_is(TOKENS[1000:2200])
    bed.store.check()


def test_a_turn_cancelled_while_it_was_parked_leaves_its_state_to_a_retry() -> None:
    bed = Bed()
    for keep, resumes_at in ((False, 0), (True, 640)):
        session, _ = bed.take_up(TOKENS[:900])
        bed.read(session, TOKENS[:640])
        key = bed.keeper.park(session)
        assert key is not None
        assert bed.plan(TOKENS[:900]).position == 0, "no plan starts from a parked state"
        bed.turn(TOKENS[1000:1100])
        bed.keeper.release(key, keep=keep)
        assert bed.plan(TOKENS[:900]).position == resumes_at
        bed.store.check()


def test_two_turns_parked_at_the_same_tokens_hold_one_state_between_them() -> None:
    bed = Bed()
    sessions = []
    keys = []
    for _ in range(2):
        session = bed.sessions.create("k/a", Journal(), 0.0)
        bed.engine.reset()
        bed.read(session, TOKENS[:640])
        sessions.append(session)
        keys.append(bed.keeper.park(session))
    assert keys[0] == keys[1]
    assert keys[0] is not None
    bed.keeper.unpark(sessions[0], keys[0])
    bed.engine.reset()
    bed.keeper.unpark(sessions[1], keys[0])
    assert bed.state_is(TOKENS[:640])
    assert bed.store.footprint().used_bytes == 0
    bed.store.check()


def test_idle_sessions_leave_with_their_memory_and_resume_from_disk() -> None:
    bed = Bed()
    session = bed.turn(TOKENS[:600])
    bed.disk.write()
    bed.sessions.idle_ttl_s = -1.0
    bed.keeper.expire(session.last_used_at)
    bed.sessions.idle_ttl_s = 3600.0
    assert len(bed.sessions) == 0
    assert bed.store.footprint().used_bytes == 0
    taken, moved = bed.take_up(TOKENS[:700])
    assert (bed.engine.position, moved) == (600, 1600)
    assert taken.id != session.id


def test_with_exact_a_pin_waits_for_a_state_that_exact_plans_may_start_from() -> None:
    bed = Bed()
    prompt = prompt_of(TOKENS[:640])
    session, _ = bed.take_up(TOKENS[:640])
    bed.read(session, TOKENS[:100])  # off the grid, so the state at 640 is not a cold run's
    bed.read(session, TOKENS[:640])
    assert bed.keeper.keep(session) is None
    assert bed.keeper.find_pin("k/a", prompt, 640, exact=True) is None
    assert bed.keeper.find_pin("k/a", prompt, 640, exact=False) == "pinned"

    bed = Bed()
    bed.turn(TOKENS[:640])
    assert bed.keeper.find_pin("k/a", prompt, 640, exact=True) == "pinned"


def test_what_a_crash_would_lose_is_shown() -> None:
    bed = Bed()
    bed.turn(TOKENS[:600])
    waiting = bed.disk.pending_bytes
    assert waiting > 0
    assert bed.store.footprint().tiers["disk"].pending_bytes == waiting
