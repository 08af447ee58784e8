"""Who leaves when the disk budget is full: the cheapest to read again per byte, never a pin."""

from __future__ import annotations

from pathlib import Path

from disk_harness import FINGERPRINT, FakePart, key, save

from capserve.serving.disk.tier import DiskTier


def open_tier(path: Path, budget: int) -> DiskTier:
    return DiskTier.open(path / "d", FINGERPRINT, budget)


def test_the_cheapest_per_byte_leaves_first_and_the_files_stay_within_the_budget(
    tmp_path: Path,
) -> None:
    tier = open_tier(tmp_path, 10_000)
    dear = save(tier, "dear", [FakePart("dear", 3000)], position=9000)
    cheap = save(tier, "cheap", [FakePart("cheap", 3000)], position=30)
    large = save(tier, "large", [FakePart("large", 4000)], position=100)
    assert tier.flush(5)
    assert tier.used_bytes == 10_000
    new = save(tier, "new", [FakePart("new", 2500)], position=3000)
    tier.check()
    assert tier.take_evicted() == [cheap.key]
    newer = save(tier, "newer", [FakePart("newer", 2500)], position=3000)
    tier.check()
    assert tier.take_evicted() == [large.key]
    assert {r.key for r in tier.capsules()} == {dear.key, new.key, newer.key}
    assert tier.used_bytes == 8000
    tier.close(5)


def test_the_cost_is_counted_from_the_boundary_before(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 6000)
    near = save(tier, "near", [FakePart("n", 3000)], position=9000, based_on=key("before", 8990))
    save(tier, "far", [FakePart("f", 3000)], position=500)
    save(tier, "new", [FakePart("new", 3000)], position=500)
    tier.check()
    assert tier.take_evicted() == [near.key]
    tier.close(5)


def test_of_equal_ones_the_least_recently_used_leaves_and_a_dear_one_ages(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 3000)
    rows = [save(tier, str(n), [FakePart(str(n))], position=100) for n in range(3)]
    assert tier.flush(5)
    tier.touch(rows[0].key)
    save(tier, "3", [FakePart("3")], position=100)
    tier.check()
    assert tier.take_evicted() == [rows[1].key]
    tier.close(5)

    tier = DiskTier.open(tmp_path / "aging", FINGERPRINT, 3000)
    dear = save(tier, "dear", [FakePart("dear")], position=500)
    for n in range(20):
        save(tier, str(n), [FakePart(str(n))], position=100)
        assert tier.flush(5)
    assert not tier.holds(dear.key), "dear once, and never used since"
    tier.check()
    tier.close(5)


def test_what_shares_its_bytes_is_dear_to_drop_and_frees_only_its_own(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 11_000)
    prefix = FakePart("prefix", 8000)
    one = save(tier, "one", [FakePart("s1", 500), prefix], position=1000)
    two = save(tier, "two", [FakePart("s2", 500), prefix], position=1000)
    alone = save(tier, "alone", [FakePart("alone", 2000)], position=1000)
    assert tier.flush(5)
    # Two tokens a byte for those that share, half a token for the one that doesn't.
    save(tier, "new", [FakePart("new", 1000)], position=1000)
    tier.check()
    assert tier.take_evicted() == [alone.key]
    # Without the other, the shared prefix is this one's own: an eighth of a token a byte.
    tier.forget(one.key)
    save(tier, "newer", [FakePart("newer", 2000)], position=5000)
    tier.check()
    assert tier.take_evicted() == [two.key]
    tier.close(5)


def test_pins_are_never_evicted_and_what_does_not_fit_beside_them_is_refused(
    tmp_path: Path,
) -> None:
    tier = open_tier(tmp_path, 20_000)
    pin = save(tier, "pin", [FakePart("pin", 12_000)], position=1, pinned=True)
    other = save(tier, "other", [FakePart("other", 2000)], position=9000)
    assert tier.flush(5)
    refused = save(tier, "refused", [FakePart("refused", 9000)], position=9000)
    tier.check()
    assert tier.refused_saves == 1
    assert tier.take_evicted() == [refused.key]
    assert tier.holds(other.key), "evicted for one that could not fit anyway"
    tier.set_pinned(pin.key, False)
    fits = save(tier, "refused", [FakePart("refused", 9000)], position=9000)
    tier.check()
    assert tier.holds(fits.key)
    assert tier.take_evicted() == [pin.key]
    tier.close(5)


def test_many_saves_at_once_never_pass_the_budget(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 50_000)
    shared = FakePart("shared", 10_000)
    rows = [
        save(tier, str(n), [FakePart(str(n), 2000), shared], position=100 + n) for n in range(200)
    ]
    tier.check()
    assert tier.refused_saves == 0
    assert tier.used_bytes <= 50_000
    held = [r.key for r in rows if tier.holds(r.key)]
    assert rows[-1].key in held
    assert len(held) + len(tier.take_evicted()) == 200
    tier.close(5)


def test_a_lower_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 10_000)
    for n in range(10):
        save(tier, str(n), [FakePart(str(n))], position=100, used_at=float(n))
    tier.check()
    tier.close(5)
    tier = open_tier(tmp_path, 4000)
    tier.check()
    assert tier.used_bytes == 4000
    assert tier.take_evicted() == [key(str(n)) for n in range(6)]
    tier.close(5)
