"""The store's accounts, its refusals, its pins and holds, and its memory of losses."""

from __future__ import annotations

import pytest
from store_harness import Clock, PlainEngine, capsule, key, make_store, small

from capserve.serving.capsules.catalog import Loss
from capserve.serving.journal import Span, SpanKind


def test_shared_parts_count_once_and_leave_with_their_last_capsule() -> None:
    store = make_store(100)
    store.put(key(1), capsule(1, (1, 10), (7, 50)), ())
    store.put(key(2), capsule(2, (2, 10), (7, 50)), ())
    assert store.footprint().used_bytes == 70
    assert store.describe(key(2)).exclusive_bytes == 10
    store.demote("host")
    assert store.footprint().used_bytes == 60
    assert store.describe(key(2)).exclusive_bytes == 60
    store.demote("host")
    assert store.footprint().used_bytes == 0
    store.check()


def test_what_costs_least_to_rebuild_per_byte_leaves_first() -> None:
    store = make_store(60)
    store.put(key(10), small(10, nbytes=10), ())
    store.put(key(50), small(50, nbytes=20), ())
    store.put(key(60), small(60, nbytes=10), (), based_on=key(50))
    # Tokens to read again per byte: 10 / 10, 50 / 20, (60 - 50) / 10; the older of equals goes.
    assert store.demote("host") == key(10)
    assert store.demote("host") == key(60)
    assert store.demote("host") == key(50)


def test_a_capsule_costs_more_once_the_boundary_before_it_is_gone() -> None:
    store = make_store(100)
    store.put(key(40), small(40, nbytes=40), ())
    store.put(key(50), small(50, nbytes=10), (), based_on=key(40))
    store.put(key(20), small(20, nbytes=8), ())
    assert store.demote("host") == key(40)  # 40 / 40, before 10 / 10: it is older
    assert store.demote("host") == key(20)  # 20 / 8, and 50 / 10 now
    assert store.demote("host") == key(50)


def test_a_capsule_based_on_a_lost_one_is_based_on_what_that_one_was() -> None:
    store = make_store(100)
    store.put(key(40), small(40, nbytes=1), ())
    store.put(key(50), small(50, nbytes=90), (), based_on=key(40))
    assert store.demote("host") == key(50)
    store.put(key(60), small(60, nbytes=1), (), based_on=key(50))
    store.put(key(25), small(25, nbytes=1), ())
    # 60 - 40 tokens are less than 25; without the way back over the lost one it would be 60.
    assert store.demote("host") == key(60)


def test_a_pin_and_what_is_protected_stay_until_they_are_let_go() -> None:
    store = make_store(40)
    for position in (1, 2, 3):
        store.put(key(position), small(position), (), pin=position == 1)
    store.protect(key(2))
    assert store.put(key(4), small(4, nbytes=20), ()) is None
    assert [store.holds(key(p)) for p in (1, 2, 3, 4)] == [True, True, False, True]
    assert store.loss(key(3)) is Loss.EVICTED
    store.protect(None)
    store.unpin(key(1))
    assert {store.demote("host"), store.demote("host"), store.demote("host")} == {
        key(1),
        key(2),
        key(4),
    }


def test_what_can_not_fit_is_refused_with_both_numbers_and_evicts_nothing() -> None:
    store = make_store(30)
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
    store = make_store(30)
    store.put(key(1), small(1, nbytes=20), ())
    store.protect(key(1))
    refusal = store.put(key(2), small(2, nbytes=15), ())
    assert refusal == "needs 35 bytes beside the pins, the budget is 30"
    assert store.holds(key(1))


def test_a_capsule_that_comes_back_is_no_longer_lost() -> None:
    store = make_store(10)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), ())
    assert store.loss(key(1)) is Loss.EVICTED
    store.put(key(1), small(1), ())
    assert store.loss(key(1)) is None
    assert store.lost_positions("k/a") == [2]


def test_the_memory_of_losses_is_bounded() -> None:
    store = make_store(10, remembered=3)
    for position in range(1, 8):
        store.put(key(position), small(position), ())
    assert store.lost_positions("k/a") == [4, 5, 6]


def test_what_nobody_used_for_longer_than_the_ttl_expires_but_pins_and_the_protected_stay() -> None:
    clock = Clock()
    store = make_store(100, clock=clock)
    for position in (1, 2, 3, 4):
        store.put(key(position), small(position), (), pin=position == 2)
    store.protect(key(3))
    clock.now = 5.0
    store.get(key(4))
    clock.now = 10.0
    assert store.expire(10.0) == 0
    clock.now = 12.0
    assert store.expire(10.0) == 1
    assert [store.holds(key(p)) for p in (1, 2, 3, 4)] == [False, True, True, True]
    assert store.loss(key(1)) is Loss.EVICTED
    store.check()


def test_pins_take_half_of_the_budget_and_what_is_beyond_is_kept_unpinned() -> None:
    store = make_store(100)
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
    store = make_store(100)
    store.put(key(1), small(1, nbytes=60), (), pin=True)
    store.demote("host")
    assert store.loss(key(1)) is Loss.OVER_BUDGET


def test_room_that_is_made_ahead_spares_what_stays_and_is_not_made_in_vain() -> None:
    store = make_store(100)
    for position in (1, 2, 3):
        store.put(key(position), small(position, nbytes=30), (), pin=position == 1)
    store.protect(key(2))
    store.spare(41)
    assert store.footprint().capsules == 3, "no eviction makes room for so much"
    store.spare(40)
    assert [store.holds(key(p)) for p in (1, 2, 3)] == [True, True, False]
    store.check()


def test_a_store_is_right_again_once_it_was_emptied() -> None:
    store = make_store(100)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), (), based_on=key(1))
    store._memory.tiers[0].used_bytes += 1
    store.clear()
    store.check()
    assert store.footprint().capsules == store.footprint().used_bytes == 0
    assert store.positions("k/a") == []
    assert store.lost_positions("k/a") == [1, 2]
    assert store.put(key(1), small(1), ()) is None
    store.check()


def test_a_drifted_counter_is_noticed() -> None:
    store = make_store(100)
    store.put(key(1), small(1), ())
    store._memory.tiers[0].used_bytes += 1
    with pytest.raises(AssertionError, match="host: counter 11 bytes, parts 10"):
        store.check()


# -- several memory tiers --------------------------------------------------------------------


def test_what_makes_way_in_the_nearest_tier_goes_to_the_next_and_is_lost_from_the_last() -> None:
    store = make_store({"gpu": 20, "host": 20})
    for position in (1, 2, 3, 4, 5):
        store.put(key(position), small(position, tier="gpu"), ())
        store.check()
    tiers = [store.locate(key(p)).tier for p in (2, 3, 4, 5)]
    assert sorted(tiers) == ["gpu", "gpu", "host", "host"]
    assert store.loss(key(1)) is Loss.EVICTED
    seen = store.footprint()
    assert (seen.used_bytes, seen.budget_bytes, seen.evicted, seen.demoted) == (40, 40, 1, 3)
    assert [seen.tiers[name].used_bytes for name in ("gpu", "host")] == [20, 20]


def test_a_demoted_capsule_shares_its_parts_in_the_tier_that_it_came_to() -> None:
    store = make_store({"gpu": 100, "host": 100})
    for position in (1, 2):
        store.put(key(position), capsule(position, (position, 10), (7, 50), tier="gpu"), ())
    store.demote("gpu")
    store.demote("gpu")
    assert store.footprint().tiers["host"].used_bytes == 70
    store.check()


def test_what_is_too_large_for_the_nearest_tier_is_kept_in_the_next() -> None:
    store = make_store({"gpu": 15, "host": 100})
    store.put(key(1), small(1, tier="gpu"), ())
    assert store.put(key(2), small(2, nbytes=40, tier="gpu"), ()) is None
    assert store.locate(key(2)).tier == "host"
    assert store.locate(key(1)).tier == "gpu", "nothing made way for what could not fit"
    store.check()


def test_a_tier_without_memory_is_passed_over() -> None:
    engine = PlainEngine(("gpu", "host"))
    engine.full.add("host")
    store = make_store({"gpu": 10, "host": 100}, engine=engine)
    store.put(key(1), small(1, tier="gpu"), ())
    assert store.put(key(2), small(2, tier="gpu"), ()) is None
    assert not store.holds(key(1))
    store.check()


def test_a_pin_lies_in_the_nearest_tier_in_which_pins_have_room() -> None:
    store = make_store({"gpu": 20, "host": 20})
    for position in (1, 2):
        assert store.put(key(position), small(position, tier="gpu"), (), pin=True) is None
    assert [store.locate(key(p)).tier for p in (1, 2)] == ["gpu", "host"]
    refusal = store.put(key(3), small(3, tier="gpu"), (), pin=True)
    assert refusal == "needs 20 bytes beside the pins, the budget for pins is 10"
    store.check()


# -- parked turns ----------------------------------------------------------------------------

SPANS = (Span(SpanKind.PREFILL, 0, 5),)


def test_a_held_capsule_stays_until_its_last_hold_ends() -> None:
    store = make_store(10)
    store.put(key(5), small(5), SPANS)
    assert store.hold_equal(key(5), SPANS)
    assert store.hold_equal(key(5), SPANS)
    assert not store.hold_equal(key(5), (Span(SpanKind.DECODE, 0, 5),)), "other pieces, other bits"
    assert store.put(key(6), small(6), ()) is not None
    assert not store.drop(key(5)), "a parked turn comes back to it"
    store.release(key(5), keep=False)
    assert store.demote("host") is None
    store.release(key(5), keep=False)
    assert store.put(key(6), small(6), ()) is None
    store.check()


def test_a_parked_state_is_found_by_no_plan_and_goes_with_its_hold() -> None:
    store = make_store(30)
    parked = key(99)
    assert store.put_parked(parked, key(5), small(5), SPANS) is None
    assert store.positions("k/a") == []
    assert not store.holds(parked)
    assert store.put(key(6), small(6, nbytes=25), ()) is not None, "it may not be evicted"
    store.check()
    assert store.get(parked).spans == SPANS
    store.release(parked, keep=False)
    assert store.footprint().used_bytes == 0
    store.release(parked, keep=False)
    store.check()


def test_a_parked_state_worth_keeping_becomes_a_capsule_like_any_other() -> None:
    store = make_store(30)
    store.put_parked(key(99), key(5), small(5), SPANS)
    store.release(key(99), keep=True)
    assert store.positions("k/a") == [5]
    assert store.get(key(5)).spans == SPANS
    assert store.demote("host") == key(5)


def test_a_parked_state_without_room_evicts_nothing_and_is_no_loss() -> None:
    store = make_store(30)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), ())
    assert store.put_parked(key(99), key(5), small(5, nbytes=25), SPANS) is not None
    assert store.holds(key(2))
    assert store.lost_positions("k/a") == []
    store.check()


def test_slices_of_the_check_come_to_every_capsule() -> None:
    store = make_store(1000)
    for position in range(1, 8):
        store.put(key(position), small(position), ())
    store.check_some(most_parts=3)
    entry = store.entry(key(6))
    tier = store._memory.tier("host")
    tier._shared[entry.parts[0].name].holders.clear()
    with pytest.raises(AssertionError, match="does not know its capsule"):
        store.check_some(most_parts=3)


def test_each_slice_sees_a_counter_that_has_drifted() -> None:
    store = make_store(1000)
    for position in range(1, 8):
        store.put(key(position), small(position), ())
    store._memory.tier("host").used_bytes += 1
    with pytest.raises(AssertionError, match="counter 71 bytes, parts 70"):
        store.check_some(most_parts=1)
