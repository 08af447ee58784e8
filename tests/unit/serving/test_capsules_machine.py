"""Random use of a store over two memory tiers and a disk, against a model that counts by hand.

The engine is the fake one, so that a capsule which comes back from anywhere is restored and must
hold exactly its own tokens. The model knows what was put where only by asking; bytes, shares,
budgets, pins, holds and the order of leaving it works out itself.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_harness import Clock, ManualDisk

from capserve.engine.seam import Capsule
from capserve.serving.capsules.catalog import Entry
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.store import CapsuleLostError, CapsuleStore
from capserve.serving.journal import Span, SpanKind, prefix_digests
from capserve.testing.fake_engine import FakeEngine, fake_limits

LIMITS = fake_limits(
    tiers=("gpu", "host"), small_state_bytes=400, kv_bytes_per_token=1, max_positions=4096
)
SIZES = (200, 512, 700, 1024, 1500)
BUDGETS = {"gpu": 4000, "host": 5000}
TALKS = st.integers(0, 2)
PLACES = st.integers(0, len(SIZES) - 1)


def tokens_of(talk: int) -> np.ndarray:  # type: ignore[type-arg]
    """The talks share their first 600 tokens."""
    tokens = np.arange(SIZES[-1], dtype=np.int32) % 500
    tokens[600:] = (tokens[600:] + 7 * talk) % 500
    return tokens


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(LIMITS)
        self.disk = ManualDisk(1 << 20)
        self.clock = Clock()
        self.store = self.opened()
        self.tokens: dict[CapsuleKey, bytes] = {}
        self.pins: set[CapsuleKey] = set()
        self.parked: dict[CapsuleKey, bytes] = {}
        self.held: dict[CapsuleKey, int] = {}
        self.protected: CapsuleKey | None = None

    def opened(self) -> CapsuleStore:
        return CapsuleStore(
            self.engine, BUDGETS, self.disk, clock=self.clock, unix_clock=lambda: self.clock() + 1e9
        )

    def key(self, talk: int, place: int) -> CapsuleKey:
        tokens, position = tokens_of(talk), SIZES[place]
        return CapsuleKey("k/a", position, prefix_digests(tokens, [position])[0])

    def made(self, talk: int, place: int) -> Capsule:
        self.engine.reset()
        self.engine.extend(tokens_of(talk)[: SIZES[place]])
        return self.engine.snapshot()

    def check_restored(self, capsule: Capsule, tokens: bytes) -> None:
        self.engine.restore(capsule)
        assert bytes(self.engine._tokens) == tokens

    def entries(self) -> list[Entry]:
        return [*self.store._catalog, *self.store._parked.values()]

    # -- what a server does --------------------------------------------------------------------

    @rule(talk=TALKS, place=PLACES, base=st.one_of(st.none(), PLACES), pin=st.booleans())
    def put(self, talk: int, place: int, base: int | None, pin: bool) -> None:
        self.clock.now += 1
        key = self.key(talk, place)
        based_on = None if base is None else self.key(talk, base)
        spans = (Span(SpanKind.PREFILL, 0, key.position),)
        before = {name: self.store.holds(name) for name in self.tokens}
        pin = pin and talk == 0
        refusal = self.store.put(key, self.made(talk, place), spans, based_on=based_on, pin=pin)
        if not self.store.holds(key):
            assert refusal is not None
            assert before == {name: self.store.holds(name) for name in self.tokens}, "in vain"
        else:
            self.tokens[key] = tokens_of(talk)[: key.position].tobytes()
            if pin and refusal is None and (self.store.in_memory(key) or self.disk.holds(key)):
                self.pins.add(key)

    @rule(talk=TALKS, place=PLACES)
    def get(self, talk: int, place: int) -> None:
        self.clock.now += 1
        key = self.key(talk, place)
        if not self.store.holds(key):
            return
        located = self.store.locate(key)
        try:
            taken = self.store.get(key)
        except CapsuleLostError:
            assert located.tier == "disk"
            assert not self.store.holds(key)
            return
        assert (taken.read_bytes is not None) == (located.tier == "disk")
        assert taken.read_bytes in (None, located.move_bytes)
        self.check_restored(taken.capsule, self.tokens[key])

    @rule(talk=TALKS, place=PLACES)
    def unpin(self, talk: int, place: int) -> None:
        key = self.key(talk, place)
        if self.store.holds(key):
            self.store.unpin(key)
            self.pins.discard(key)

    @rule(talk=TALKS, place=PLACES)
    def drop(self, talk: int, place: int) -> None:
        key = self.key(talk, place)
        if self.store.holds(key):
            dropped = self.store.drop(key)
            assert dropped == (key not in self.held)
            if dropped:
                assert not self.disk.holds(key)
                assert self.store.loss(key) is None
                self.pins.discard(key)

    @rule(talk=TALKS, place=PLACES)
    def protect(self, talk: int, place: int) -> None:
        self.protected = self.key(talk, place)
        self.store.protect(self.protected)

    @rule(talk=TALKS, place=PLACES)
    def park(self, talk: int, place: int) -> None:
        key = self.key(talk, place)
        parked = CapsuleKey(key.namespace, key.position, b"parked" + key.digest)
        spans = (Span(SpanKind.PREFILL, 0, key.position),)
        if self.store.hold_equal(key, spans):
            self.held[key] = self.held.get(key, 0) + 1
        elif parked not in self.parked:
            capsule = self.made(talk, place)
            if self.store.put_parked(parked, key, capsule, spans) is None:
                self.parked[parked] = tokens_of(talk)[: key.position].tobytes()

    @precondition(lambda self: self.parked)
    @rule(keep=st.booleans(), data=st.data())
    def release_parked(self, keep: bool, data: st.DataObject) -> None:
        parked = data.draw(st.sampled_from(sorted(self.parked, key=repr)))
        tokens = self.parked.pop(parked)
        self.check_restored(self.store.get(parked).capsule, tokens)
        self.store.release(parked, keep=keep)
        if keep:
            key = CapsuleKey(parked.namespace, parked.position, parked.digest[6:])
            assert self.store.holds(key)
            self.tokens[key] = tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held, key=repr)))
        self.held[key] -= 1
        if not self.held[key]:
            del self.held[key]
        self.store.release(key, keep=data.draw(st.booleans()))

    @rule(tier=st.sampled_from(["gpu", "host"]))
    def demote(self, tier: str) -> None:
        expected = self.lowest(tier)
        assert self.store.demote(tier) == expected

    @rule(nbytes=st.integers(0, 5000))
    def spare(self, nbytes: int) -> None:
        self.store.spare(nbytes)

    @rule(ttl=st.floats(0.0, 5.0))
    def expire(self, ttl: float) -> None:
        self.store.expire(ttl)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.pins = {key for key in self.pins if self.store.holds(key)}
        self.parked.clear()
        self.held.clear()
        self.protected = None

    # -- what a disk does ----------------------------------------------------------------------

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        if self.disk.waiting:
            waiting = sorted(self.disk.waiting, key=repr)
            self.disk.write(*data.draw(st.sets(st.sampled_from(waiting), min_size=1)))

    @rule(data=st.data())
    def disk_evicts(self, data: st.DataObject) -> None:
        loose = sorted((k for k, row in self.disk.rows.items() if not row.pinned), key=repr)
        if loose:
            self.disk.evict(data.draw(st.sampled_from(loose)))
            if data.draw(st.booleans()):
                self.store.note_disk()

    @rule(data=st.data())
    def tear(self, data: st.DataObject) -> None:
        if self.disk.files:
            self.disk.torn.add(data.draw(st.sampled_from(sorted(self.disk.files))))
            self.pins -= {key for key in self.pins if not self.store.in_memory(key)}

    @rule(fault=st.booleans())
    def fault(self, fault: bool) -> None:
        if fault:
            self.disk.fail()
        else:
            self.disk.fault = None
        self.store.note_disk()

    @rule()
    def restart(self) -> None:
        self.disk.waiting.clear()
        self.disk.take_evicted()
        durable = dict(self.disk.rows)
        self.store = self.opened()
        self.store.adopt(durable.values())
        assert {key for key in self.tokens if self.store.holds(key)} == set(durable)
        self.pins &= {key for key, row in durable.items() if row.pinned}
        self.parked.clear()
        self.held.clear()
        self.protected = None

    # -- what must hold ------------------------------------------------------------------------

    def lowest(self, tier: str) -> CapsuleKey | None:
        """GreedyDual by its definition, over what may go; from the last tier the durable first."""
        order = self.store._memory.tier(tier)._order
        here = [entry for entry in self.entries() if entry.tier == tier]
        loose = [
            entry
            for entry in here
            if not entry.pinned and not entry.holds and entry.key != self.protected
        ]
        settled = loose
        if tier == "host":
            settled = [
                entry
                for entry in loose
                if self.disk.fault is not None or not entry.on_disk or self.disk.holds(entry.key)
            ]

        def rank(entry: Entry) -> tuple[float, int]:
            others = {part.name for e in here if e is not entry for part in e.parts}
            alone = sum(part.nbytes for part in entry.parts if part.name not in others)
            base = 0 if entry.based_on is None else entry.based_on.position
            mine = order._ranks[entry.key]
            return mine.floor + (entry.key.position - base) / max(1, alone), mine.used

        lowest = min(settled or loose, key=rank, default=None)
        return None if lowest is None else lowest.key

    @invariant()
    def accounts_are_right(self) -> None:
        self.store.check()
        for name, budget in BUDGETS.items():
            sizes: dict[bytes, int] = {}
            for entry in self.entries():
                if entry.tier == name:
                    sizes |= {part.name: part.nbytes for part in entry.parts}
            seen = self.store.footprint().tiers[name]
            assert seen.used_bytes == sum(sizes.values()) <= budget

    @invariant()
    def pins_and_holds_stay(self) -> None:
        assert all(self.store.holds(pin) for pin in self.pins)
        assert all(self.store.in_memory(key) for key in [*self.parked, *self.held])
        for name, budget in BUDGETS.items():
            sizes = {}
            for entry in self.entries():
                if entry.pinned and entry.tier == name:
                    sizes |= {part.name: part.nbytes for part in entry.parts}
            assert sum(sizes.values()) <= budget // 2

    @invariant()
    def the_index_and_the_losses_never_overlap(self) -> None:
        kept = {entry.key for entry in self.store._catalog}
        assert self.store.positions("k/a") == sorted({key.position for key in kept})
        for key in kept:
            assert self.store.loss(key) is None


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
