"""Capsules cost what the formulas say, share what they can, and move only what differs."""

from __future__ import annotations

import gc
import weakref

import pytest

from capserve.engine.capsule import SEGMENT_TOKENS, TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.engine.state import StateBytes
from tests.engine.helpers import assert_same_bits, generate, tokens


def part_keys(capsule: TorchCapsule) -> set[int]:
    return {part.key for part in capsule.parts}


@pytest.mark.parametrize("position", [1, 200, SEGMENT_TOKENS, 1300])
def test_capsule_bytes_equal_the_formula(nano: TorchEngine, position: int) -> None:
    nano.reset()
    nano.extend(tokens(position, nano.limits.vocab_size, seed=position))
    capsule = nano.snapshot()
    measured = sum(
        t.untyped_storage().nbytes()
        for t in (
            capsule.recurrent,
            capsule.conv,
            capsule.hidden,
            *(s.kv for s in capsule.segments),
        )
    )
    assert measured == sum(part.nbytes for part in capsule.parts)
    assert measured == nano.limits.capsule_bytes(position)


def test_static_buffers_equal_the_formula(nano: TorchEngine, nano_bf16: TorchEngine) -> None:
    for engine in (nano, nano_bf16):
        config, dtype = engine._model.config, engine._model.dtype
        formula = StateBytes.of(config, dtype).buffers(config, dtype, engine.limits.max_positions)
        assert engine._state.nbytes == formula


def test_capsules_of_one_lineage_share_their_full_segments(nano: TorchEngine) -> None:
    nano.reset()
    ids = tokens(1400, nano.limits.vocab_size)
    nano.extend(ids[:1100])
    first = nano.snapshot()
    nano.extend(ids[1100:])
    second = nano.snapshot()
    assert len(part_keys(first) & part_keys(second)) == 2
    both = {part.key: part.nbytes for capsule in (first, second) for part in capsule.parts}
    alone = sum(part.nbytes for part in first.parts) + sum(part.nbytes for part in second.parts)
    saved = 2 * SEGMENT_TOKENS * nano.limits.kv_bytes_per_token
    assert sum(both.values()) == alone - saved


def test_a_restore_moves_only_segments_that_differ(nano: TorchEngine) -> None:
    nano.reset()
    ids = tokens(1400, nano.limits.vocab_size)
    nano.extend(ids[:1300])
    boundary = nano.snapshot()
    tail = boundary.parts[-1].nbytes
    small = boundary.parts[0].nbytes
    generate(nano, ids[:1300], 20, Sampling(drafts=3))
    assert nano.restore(boundary) == small + tail  # undo inside the hot session
    nano.extend(ids[1300:])
    other_branch = nano.snapshot()
    assert nano.restore(boundary) == small + tail  # a sibling that shares both full segments
    nano.reset()
    nano.extend(tokens(600, nano.limits.vocab_size, seed=1))
    assert nano.restore(other_branch) == sum(part.nbytes for part in other_branch.parts)


def test_a_capsule_outlives_everything_that_happens_after_it(nano: TorchEngine) -> None:
    nano.reset()
    ids = tokens(700, nano.limits.vocab_size)
    nano.extend(ids)
    boundary = nano.snapshot()
    expected, _ = generate(nano, ids, 40, Sampling())
    for seed in range(3):
        nano.reset()
        other = tokens(900, nano.limits.vocab_size, seed=seed + 50)
        nano.extend(other)
        generate(nano, other, 20, Sampling(drafts=2))
        nano.restore(boundary)
        assert_same_bits(nano.snapshot(), boundary)
        again, _ = generate(nano, ids, 40, Sampling(drafts=seed))
        assert again == expected


def test_memory_that_no_capsule_keeps_is_given_back(nano: TorchEngine) -> None:
    nano.reset()
    nano.extend(tokens(1100, nano.limits.vocab_size))
    capsule = nano.snapshot()
    segments = [weakref.ref(segment) for segment in capsule.segments]
    del capsule
    gc.collect()
    assert [segment() for segment in segments] == [None] * 3
    again = nano.snapshot()  # and the live buffer can still be kept
    nano.reset()
    nano.restore(again)
    assert_same_bits(nano.snapshot(), again)
