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
    store.expire([key(1)])
    assert store.footprint().used_bytes == 60
    store.expire([key(2)])
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


def test_expiry_spares_pins() -> None:
    store = CapsuleStore(100)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), (), pin=True)
    assert store.expire([key(1), key(2), key(9)]) == 1
    assert store.holds(key(2))


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
        self.store = CapsuleStore(100)
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

    @rule(position=st.integers(1, 12))
    def expire(self, position: int) -> None:
        self.store.expire([key(position)])

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


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
