"""What the store does with a disk: copies at once, memory that comes and goes, torn files."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from store_harness import Clock, ManualDisk, capsule, key, make_store, small

from capserve.serving.capsules.catalog import Loss
from capserve.serving.capsules.footprint import Location
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.capsules.store import CapsuleLostError, CapsuleStore
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind
from capserve.testing.fake_engine import FakeEngine, fake_limits


def test_a_capsule_is_handed_to_the_disk_when_it_is_kept_and_says_when_it_is_durable() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    spans = (Span(SpanKind.PREFILL, 0, 2),)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), spans, based_on=key(1), pin=True)
    row, parts = disk.waiting[key(2)]
    assert (row.spans, row.based_on, row.pinned, row.used_at) == (spans, key(1), True, 1e9)
    assert [part.name for part in row.parts] == [part.name for part in parts]
    assert not store.describe(key(2)).durable
    disk.write()
    assert store.describe(key(2)).durable
    assert store.describe(key(2)).tier == "host"
    store.check()


def test_a_durable_capsule_leaves_memory_without_a_loss_and_is_read_back_whole() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), capsule(1, (1, 10), (7, 50)), ())
    store.put(key(2), capsule(2, (2, 10), (7, 50)), ())
    disk.write()
    assert store.demote("host") == key(1)
    assert store.holds(key(1))
    assert store.locate(key(1)) == Location("disk", 10), "what they share is still in memory"
    taken = store.get(key(1))
    assert (taken.read_bytes, len(disk.reads)) == (10, 1)
    assert store.in_memory(key(1))
    assert store.locate(key(1)) == Location("host", 60)
    assert store.get(key(1)).read_bytes is None
    assert store.footprint().evicted == 0
    store.check()


def test_what_is_not_durable_yet_leaves_last_and_can_be_taken_back_on_its_way() -> None:
    disk = ManualDisk()
    store = make_store(30, disk)
    for position in (1, 2, 3):
        store.put(key(position), small(position), ())
    disk.write(key(3))
    assert store.demote("host") == key(3), "the dearest, but it is safe"
    assert store.demote("host") == key(1)
    assert store.holds(key(1))
    store.check()
    assert store.locate(key(1)).tier == "host"
    assert store.get(key(1)).read_bytes is None
    assert store.in_memory(key(1))
    assert disk.reads == []
    store.check()


def test_one_that_left_memory_before_it_was_written_is_lost_when_the_writer_gives_it_up() -> None:
    disk = ManualDisk()
    store = make_store(30, disk)
    store.put(key(1), small(1), ())
    store.demote("host")
    disk.fail()
    store.note_disk()
    assert store.loss(key(1)) is Loss.EVICTED
    assert store.footprint().tiers["disk"].fault == "no space left on device"
    store.put(key(2), small(2), ())
    store.note_disk()
    assert store.demote("host") == key(2)
    assert store.loss(key(2)) is Loss.EVICTED, "with a faulty disk, memory is all there is"
    store.check()


def test_a_queue_that_went_without_a_word_is_a_loss_too() -> None:
    disk = ManualDisk()
    store = make_store(30, disk)
    store.put(key(1), small(1), ())
    store.demote("host")
    disk.waiting.clear()
    store.note_disk()
    assert store.loss(key(1)) is Loss.EVICTED
    store.check()


def test_what_the_disk_evicts_is_a_loss_only_when_it_lies_nowhere_else() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    for position in (1, 2):
        store.put(key(position), small(position), ())
    disk.write()
    store.demote("host")
    disk.evict(key(1))
    disk.evict(key(2))
    store.note_disk()
    assert [store.holds(key(p)) for p in (1, 2)] == [False, True]
    assert not store.describe(key(2)).durable
    assert store.loss(key(1)) is Loss.EVICTED
    store.demote("host")
    assert store.loss(key(2)) is Loss.EVICTED
    store.check()


def test_a_torn_part_takes_all_that_need_it_and_nothing_else() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    for position in (1, 2, 3):
        store.put(key(position), capsule(position, (position, 1), (7, 20)), ())
    disk.write()
    for _ in range(3):
        store.demote("host")
    torn = (7).to_bytes(16, "little")
    disk.torn.add(torn)
    with pytest.raises(CapsuleLostError):
        store.get(key(1))
    assert store.positions("k/a") == []
    assert store.lost_positions("k/a") == [1, 2, 3]
    store.check()

    for position in (1, 2):
        store.put(key(position), capsule(position, (position, 1), (7, 20)), ())
    disk.write()
    store.put(key(4), small(4, nbytes=100), ())  # all others leave
    disk.write()
    store.get(key(1))
    disk.torn.add((2).to_bytes(16, "little"))
    with pytest.raises(CapsuleLostError):
        store.get(key(2))
    assert store.holds(key(1))
    assert store.describe(key(1)).durable, "its own files are whole"
    with pytest.raises(KeyError):
        store.get(key(2))
    store.check()


def test_files_of_another_engine_are_lost_and_not_planned_for_again() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), small(1), ())
    disk.write()
    store.demote("host")
    name = next(iter(disk.files))
    disk.files[name] = b"foreign" + bytes(8)
    with pytest.raises(CapsuleLostError, match="another engine"):
        store.get(key(1))
    assert not store.holds(key(1))
    assert not disk.holds(key(1))
    store.check()


def test_what_has_no_room_in_memory_is_handed_out_and_stays_on_disk() -> None:
    disk = ManualDisk()
    store = make_store(20, disk)
    store.put(key(1), small(1, nbytes=15), ())
    disk.write()
    store.demote("host")
    store.put(key(2), small(2), (), pin=True)
    assert store.get(key(1)).read_bytes == 15
    assert not store.in_memory(key(1))
    assert store.locate(key(1)) == Location("disk", 15)
    store.check()


def test_an_idle_capsule_frees_its_memory_and_stays_on_disk() -> None:
    clock = Clock()
    disk = ManualDisk()
    store = make_store(100, disk, clock=clock)
    store.put(key(1), small(1), ())
    store.put(key(2), small(2), ())
    disk.write(key(1))
    clock.now = 11.0
    assert store.expire(10.0) == 1
    assert store.locate(key(1)).tier == "disk"
    assert store.in_memory(key(2)), "it waits for its writer"
    assert store.footprint().used_bytes == 10
    store.check()


def test_a_restart_knows_what_the_disk_holds_and_reads_it_when_it_is_asked_for() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    spans = (Span(SpanKind.PREFILL, 0, 2),)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), spans, based_on=key(1))
    disk.write()
    again = make_store(100, disk)
    assert again.adopt(reversed(disk.rows.values())) == 2
    assert again.positions("k/a") == [1, 2]
    assert again.footprint().pinned == 1
    assert again.describe(key(1)).pinned
    assert again.footprint().used_bytes == 0
    assert disk.reads == []
    taken = again.get(key(2))
    assert (taken.spans, taken.read_bytes) == (spans, 10)
    assert again.pin(key(1)) is None, "it is pinned already"
    again.check()


def test_a_drop_removes_it_everywhere_and_nobody_misses_it() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), small(1), (), pin=True)
    disk.write()
    assert store.drop(key(1))
    assert (disk.rows, disk.files) == ({}, {})
    assert not store.holds(key(1))
    assert store.lost_positions("k/a") == []
    assert store.footprint().used_bytes == 0
    store.check()


def test_pins_on_disk_have_a_share_and_what_is_beyond_is_pinned_in_memory_alone() -> None:
    disk = ManualDisk(budget_bytes=30)
    store = make_store(100, disk)
    for position in (1, 2):
        assert store.put(key(position), small(position), (), pin=True) is None
    assert [row.pinned for row, _ in disk.waiting.values()] == [True, False]
    disk.write()
    store.unpin(key(1))
    assert not disk.rows[key(1)].pinned
    store.demote("host")
    assert store.locate(key(1)).tier == "disk"
    assert store.pin(key(1)) is None
    assert disk.rows[key(1)].pinned


def test_a_state_computed_in_other_pieces_replaces_the_one_on_disk() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(5), capsule(5, (1, 10)), (Span(SpanKind.PREFILL, 0, 5),), pin=True)
    disk.write()
    other = make_store(100, disk)
    other.adopt(disk.rows.values())
    spans = (Span(SpanKind.PREFILL, 0, 3), Span(SpanKind.DECODE, 3, 5))
    other.put(key(5), capsule(5, (2, 10)), spans)
    disk.write()
    assert disk.rows[key(5)].spans == spans
    assert disk.rows[key(5)].pinned
    assert other.get(key(5)).spans == spans
    other.check()


def test_an_emptied_store_still_knows_what_is_durable() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), small(1), (), pin=True)
    disk.write()
    store.put(key(2), small(2), (), based_on=key(1))
    store.clear()
    assert store.positions("k/a") == [1]
    assert store.loss(key(2)) is Loss.EVICTED
    assert store.get(key(1)).read_bytes == 10
    store.check()


def test_ten_thousand_capsules_are_adopted_in_a_fraction_of_a_second() -> None:
    parts = tuple(PartRow(i.to_bytes(16, "little"), 100) for i in range(20))
    keys = [CapsuleKey(f"k/{i % 50}", i, i.to_bytes(16, "little")) for i in range(10_000)]
    rows = [
        CapsuleRow(name, (), parts, keys[i - 50] if i >= 50 else None, False, 1e9)
        for i, name in enumerate(keys)
    ]
    store = make_store(1, ManualDisk())
    began = time.process_time()  # others may have the cores
    assert store.adopt(rows) == 10_000
    assert time.process_time() - began < 0.3
    store.check()


def test_a_state_outlives_the_process_in_the_real_disk_tier(tmp_path: Path) -> None:
    limits = fake_limits(tiers=("gpu", "host"))
    budgets = {"gpu": 1 << 20, "host": 1 << 20}
    tokens = np.arange(1300, dtype=np.int32) % 500
    names = {position: CapsuleKey("k/a", position, bytes([1])) for position in (700, 1300)}

    engine, disk = FakeEngine(limits), DiskTier.open(tmp_path, limits.fingerprint, 1 << 20)
    store = CapsuleStore(engine, budgets, disk)
    engine.extend(tokens[:700])
    store.put(names[700], engine.snapshot(), (), pin=True)
    engine.extend(tokens[700:])
    store.put(names[1300], engine.snapshot(), (), based_on=names[700])
    assert disk.flush(10.0)
    assert store.describe(names[1300]).durable
    disk.close(10.0)

    engine, disk = FakeEngine(limits), DiskTier.open(tmp_path, limits.fingerprint, 1 << 20)
    store = CapsuleStore(engine, budgets, disk)
    assert store.adopt(disk.capsules()) == 2
    assert store.describe(names[700]).pinned
    assert store.entry(names[1300]).based_on == names[700]
    expected = store.locate(names[1300])
    assert expected.tier == "disk"
    taken = store.get(names[1300])
    assert taken.read_bytes == expected.move_bytes
    engine.restore(taken.capsule)
    assert bytes(engine._tokens) == tokens.tobytes()
    assert store.locate(names[1300]).tier == "host"
    assert store.drop(names[1300])
    assert disk.flush(10.0)
    assert not disk.holds(names[1300])
    store.check()
    disk.close(10.0)


def test_what_was_given_up_in_a_fault_is_handed_over_again_when_it_is_over() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), small(1), (), pin=True)
    store.put(key(2), small(2), ())
    disk.fail()
    store.put(key(3), small(3), ())
    store.note_disk()
    store.save_again()
    assert not disk.waiting
    store.drop(key(2))
    disk.fault = None
    store.save_again()
    assert set(disk.waiting) == {key(1), key(3)}
    disk.write()
    assert disk.rows[key(1)].pinned
    assert store.describe(key(1)).durable
    assert store.describe(key(3)).durable
    store.save_again()
    assert not disk.waiting
    store.check()


def test_what_the_disk_evicted_for_room_is_not_handed_over_again() -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(1), small(1), ())
    disk.write()
    disk.evict(key(1))
    store.note_disk()
    store.save_again()
    assert not disk.waiting


def test_no_more_is_handed_over_again_than_a_disk_writes_in_a_moment() -> None:
    disk = ManualDisk()
    store = make_store(1 << 30, disk)
    for position in range(1, 6):
        store.put(key(position), small(position, nbytes=40 << 20), ())
    disk.fail()
    store.note_disk()
    disk.fault = None
    store.save_again()
    assert list(disk.waiting) == [key(1), key(2)]
    store.save_again()
    assert len(disk.waiting) == 2, "the first ones are still being written"
    disk.write()
    store.save_again()
    assert list(disk.waiting) == [key(3), key(4)]


READ = (Span(SpanKind.PREFILL, 0, 64),)
SAID = (Span(SpanKind.PREFILL, 0, 60), Span(SpanKind.DECODE, 60, 64))


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_exact_state_takes_the_place_of_one_that_is_not_and_never_the_other_way(
    in_memory: bool,
) -> None:
    disk = ManualDisk()
    store = make_store(100, disk)
    store.put(key(64), capsule(64, (1, 10)), SAID, pin=True)
    disk.write()
    if not in_memory:
        store.unpin(key(64))
        store.demote("host")
    assert not store.exact(key(64))
    store.put(key(64), capsule(64, (2, 10)), READ)
    assert store.exact(key(64))
    assert store.describe(key(64)).pinned == in_memory
    disk.write()
    store.check()
    store.unpin(key(64))
    if not in_memory:
        store.demote("host")
    store.put(key(64), capsule(64, (3, 10)), SAID)
    assert store.exact(key(64))
    assert store.get(key(64)).capsule.parts[0].name == (2).to_bytes(16, "little")
    store.check()


def test_a_state_that_a_parked_turn_holds_is_not_replaced() -> None:
    store = make_store(100, ManualDisk())
    store.put(key(64), capsule(64, (1, 10)), SAID)
    store.hold(key(64))
    store.put(key(64), capsule(64, (2, 10)), READ)
    assert not store.exact(key(64))
    store.check()
