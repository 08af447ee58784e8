"""The store's accounts, its order of eviction, its refusals and its memory of losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from capserve.engine.seam import CapsulePart
from capserve.serving.capsules import CapsuleKey, CapsuleStore, Loss


@dataclass(frozen=True)
class Parts:
    position: int
    parts: Sequence[CapsulePart]


def key(position: int, namespace: str = "k/a") -> CapsuleKey:
    return CapsuleKey(namespace, position, bytes([position]))


def capsule(position: int, *parts: tuple[int, int]) -> Parts:
    return Parts(position, [CapsulePart(name, nbytes) for name, nbytes in parts])


def small(position: int, nbytes: int = 10) -> Parts:
    return capsule(position, (1000 + position, nbytes))


def test_shared_parts_count_once_and_leave_with_their_last_capsule() -> None:
    store = CapsuleStore(100)
    store.put(key(1), capsule(1, (1, 10), (7, 50)), ())
    store.put(key(2), capsule(2, (2, 10), (7, 50)), ())
    assert store.footprint().used_bytes == 70
    store.evict_lru()
    assert store.footprint().used_bytes == 60
    store.evict_lru()
    assert store.footprint().used_bytes == 0
    store.check()


def test_the_least_recently_used_unpinned_capsule_leaves_first() -> None:
    store = CapsuleStore(30)
    for position in (1, 2, 3):
        assert store.put(key(position), small(position), ()) is None
    store.get(key(1))
    store.pin(key(2))
    assert store.put(key(4), small(4), ()) is None
    assert [store.holds(key(p)) for p in (1, 2, 3, 4)] == [True, True, False, True]
    assert store.loss(key(3)) is Loss.EVICTED
    store.unpin(key(2))
    assert store.evict_lru() == key(2)


def test_the_protected_capsule_is_spared_until_another_one_is() -> None:
    store = CapsuleStore(20)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), ())
    store.protect(key(1))
    store.put(key(3), small(3), ())
    assert (store.holds(key(1)), store.holds(key(2))) == (True, False)
    store.protect(None)
    assert store.evict_lru() == key(1)


def test_what_can_not_fit_is_refused_with_both_numbers_and_evicts_nothing() -> None:
    store = CapsuleStore(30)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), ())
    refusal = store.put(key(3), small(3, nbytes=25), (), pin=True)
    assert refusal == "needs 35 bytes beside the pins, the budget is 30"
    assert store.holds(key(2)), "a refusal must not have emptied the store"
    assert store.loss(key(3)) is Loss.OVER_BUDGET
    assert store.lost_positions("k/a") == [3]
    assert store.footprint().refused == 1
    store.check()


def test_what_fits_only_in_place_of_the_protected_capsule_is_refused() -> None:
    store = CapsuleStore(30)
    store.put(key(1), small(1, nbytes=20), ())
    store.protect(key(1))
    refusal = store.put(key(2), small(2, nbytes=15), ())
    assert refusal == "needs 35 bytes beside the pins, the budget is 30"
    assert store.holds(key(1))


def test_a_capsule_that_comes_back_is_no_longer_lost() -> None:
    store = CapsuleStore(10)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), ())
    assert store.loss(key(1)) is Loss.EVICTED
    store.put(key(1), small(1), ())
    assert store.loss(key(1)) is None
    assert store.lost_positions("k/a") == [2]


def test_the_memory_of_losses_is_bounded() -> None:
    store = CapsuleStore(10, remembered=3)
    for position in range(1, 8):
        store.put(key(position), small(position), ())
    assert store.lost_positions("k/a") == [4, 5, 6]


def test_what_nobody_used_for_longer_than_the_ttl_expires_but_pins_and_the_protected_stay() -> None:
    now = 0.0
    store = CapsuleStore(100, clock=lambda: now)
    for position in (1, 2, 3, 4):
        store.put(key(position), small(position), (), pin=position == 2)
    store.protect(key(3))
    now = 5.0
    store.get(key(4))
    now = 10.0
    assert store.expire(10.0) == 0
    now = 12.0
    assert store.expire(10.0) == 1
    assert [store.holds(key(p)) for p in (1, 2, 3, 4)] == [False, True, True, True]
    assert store.loss(key(1)) is Loss.EVICTED
    store.check()


def test_pins_take_half_of_the_budget_and_what_is_beyond_is_kept_unpinned() -> None:
    store = CapsuleStore(100)
    assert store.put(key(1), capsule(1, (1, 20), (7, 20)), (), pin=True) is None
    # 10 more, and the shared 20 once: just the half.
    assert store.put(key(2), capsule(2, (2, 10), (7, 20)), (), pin=True) is None
    refusal = store.put(key(3), small(3, nbytes=1), (), pin=True)
    assert refusal == "needs 51 bytes beside the pins, the budget for pins is 50"
    assert store.holds(key(3))
    assert store.footprint().pinned == 2
    assert store.pin(key(3)) == refusal
    assert store.pin(key(2)) is None, "it is pinned already"
    store.unpin(key(1))
    assert store.pin(key(3)) is None
    store.check()


def test_a_refused_pin_that_leaves_is_remembered_as_one_without_room() -> None:
    store = CapsuleStore(100)
    store.put(key(1), small(1, nbytes=60), (), pin=True)
    store.evict_lru()
    assert store.loss(key(1)) is Loss.OVER_BUDGET


def test_room_that_is_made_ahead_spares_what_stays_and_is_not_made_in_vain() -> None:
    store = CapsuleStore(100)
    for position in (1, 2, 3):
        store.put(key(position), small(position, nbytes=30), (), pin=position == 1)
    store.protect(key(2))
    store.spare(41)
    assert store.footprint().capsules == 3, "no eviction makes room for so much"
    store.spare(40)
    assert [store.holds(key(p)) for p in (1, 2, 3)] == [True, True, False]
    store.check()


def test_a_store_is_right_again_once_it_was_emptied() -> None:
    store = CapsuleStore(100)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), ())
    store._used_bytes += 1
    store.clear()
    store.check()
    assert store.footprint().capsules == store.footprint().used_bytes == 0
    assert store.positions("k/a") == []
    assert store.lost_positions("k/a") == [1, 2]
    assert store.put(key(1), small(1), ()) is None
    store.check()


def test_a_drifted_counter_is_noticed() -> None:
    store = CapsuleStore(100)
    store.put(key(1), small(1), ())
    store._used_bytes += 1
    with pytest.raises(AssertionError, match="counter 11 bytes, parts 10"):
        store.check()


class StoreMachine(RuleBasedStateMachine):
    """Random use against the two promises: the account is right, a pin stays."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = CapsuleStore(100, clock=lambda: self.now)
        self.pins: set[CapsuleKey] = set()

    @rule(
        position=st.integers(1, 12),
        namespace=st.sampled_from(["k/a", "k/b"]),
        parts=st.sets(st.integers(1, 8), max_size=4),
        pin=st.booleans(),
    )
    def put(self, position: int, namespace: str, parts: set[int], pin: bool) -> None:
        own = 100 + position + (50 if namespace == "k/b" else 0)
        pieces = [(own, 5), *((part, 4 * part) for part in parts)]
        name = key(position, namespace)
        self.now += 1.0
        if self.store.put(name, capsule(position, *pieces), (), pin=pin) is None:
            assert self.store.holds(name)
            if pin:
                self.pins.add(name)

    @rule()
    def evict(self) -> None:
        self.store.evict_lru()

    @rule(position=st.integers(1, 12))
    def protect(self, position: int) -> None:
        self.store.protect(key(position))

    @rule(idle_ttl_s=st.floats(0.0, 10.0))
    def expire(self, idle_ttl_s: float) -> None:
        self.store.expire(idle_ttl_s)

    @rule(nbytes=st.integers(0, 120))
    def spare(self, nbytes: int) -> None:
        self.store.spare(nbytes)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.pins.clear()

    @rule(position=st.integers(1, 12))
    def unpin(self, position: int) -> None:
        if self.store.holds(key(position)):
            self.store.unpin(key(position))
            self.pins.discard(key(position))

    @invariant()
    def accounts_are_right(self) -> None:
        self.store.check()

    @invariant()
    def pins_stay(self) -> None:
        assert all(self.store.holds(pin) for pin in self.pins)

    @invariant()
    def pins_keep_to_their_share(self) -> None:
        pinned = [e.capsule for e in self.store._entries.values() if e.pinned]
        parts = {part.key: part.nbytes for kept in pinned for part in kept.parts}
        assert sum(parts.values()) <= 50


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
