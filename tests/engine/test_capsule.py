"""Capsules cost what the formulas say, share what they can, and move only what differs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from capserve.engine.capsule import SEGMENT_TOKENS, TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.engine.state import StateBytes
from capserve.errors import CapsuleError
from capserve.testing.tiny import SHAPES, write_checkpoint
from tests.engine.helpers import assert_same_bits, generate, live_bits, tokens


def part_names(capsule: TorchCapsule) -> set[bytes]:
    return {part.name for part in capsule.parts}


@pytest.mark.parametrize("position", [1, 200, SEGMENT_TOKENS, 1300])
def test_capsule_bytes_equal_the_formula(nano: TorchEngine, position: int) -> None:
    nano.reset()
    nano.extend(tokens(position, nano.limits.vocab_size, seed=position))
    capsule = nano.snapshot()
    measured = sum(
        tensor.untyped_storage().nbytes()
        for part in capsule.parts
        for tensor in part.tensors.values()
    )
    assert measured == sum(part.nbytes for part in capsule.parts)
    assert measured == nano.limits.capsule_bytes(position)


def test_static_buffers_equal_the_formula(nano: TorchEngine, nano_bf16: TorchEngine) -> None:
    for engine in (nano, nano_bf16):
        config, dtype = engine._model.config, engine._model.dtype
        positions = engine.limits.max_positions
        formula = StateBytes.of(config, dtype).buffers(config, dtype, positions, on_card=False)
        assert engine._state.nbytes == formula


def test_capsules_of_one_lineage_share_their_full_segments(nano: TorchEngine) -> None:
    nano.reset()
    ids = tokens(1400, nano.limits.vocab_size)
    nano.extend(ids[:1100])
    first = nano.snapshot()
    nano.extend(ids[1100:])
    second = nano.snapshot()
    assert len(part_names(first) & part_names(second)) == 2
    both = {part.name: part.nbytes for capsule in (first, second) for part in capsule.parts}
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
        assert_same_bits(live_bits(nano), boundary)
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
    assert_same_bits(live_bits(nano), again)


def test_a_step_back_leaves_later_segments_to_be_found_again(nano: TorchEngine) -> None:
    nano.reset()
    ids = tokens(1300, nano.limits.vocab_size)
    nano.extend(ids[: 2 * SEGMENT_TOKENS])
    early = nano.snapshot()
    nano.extend(ids[2 * SEGMENT_TOKENS :])
    late = nano.snapshot()
    small, tail = late.parts[0].nbytes, late.parts[-1].nbytes
    assert nano.restore(early) == small
    assert nano.restore(late) == small + tail
    assert_same_bits(live_bits(nano), late)
    nano.reset()
    assert nano.restore(late) == small + tail, "a reset clears no KV"
    assert_same_bits(live_bits(nano), late)


@pytest.mark.parametrize("drafts", [0, 8])
def test_a_segment_that_waits_for_mtp_slots_is_not_taken_for_whole(
    nano: TorchEngine, drafts: int
) -> None:
    """Decode over the end of a segment, leave at every step, and come back to its end."""
    ids = tokens(SEGMENT_TOKENS - 6, nano.limits.vocab_size, seed=12)
    nano.reset()
    nano.extend(ids)
    start = nano.snapshot()
    nano.begin(Sampling(), ids)
    while nano.position < SEGMENT_TOKENS:
        nano.step(1)
    whole = live_bits(nano)
    for steps in (1, 2, 3, 4, 5, 6, 7, 9):
        for leave in (nano.reset, lambda: nano.restore(start)):
            nano.restore(start)
            nano._live.written_from(0)  # nothing of the rounds before
            nano.begin(Sampling(drafts=drafts), ids)
            for _ in range(steps):
                nano.step()
            leave()
            nano.restore(whole)
            assert_same_bits(live_bits(nano), whole)


@pytest.mark.parametrize("name", ["nano", "nano_bf16"])
def test_the_safetensors_library_reads_a_packed_part(
    name: str, request: pytest.FixtureRequest
) -> None:
    engine: TorchEngine = request.getfixturevalue(name)
    engine.reset()
    engine.extend(tokens(600, engine.limits.vocab_size))
    for part in engine.snapshot().parts:
        read = safetensors.torch.load(b"".join(part.pack()))
        assert read.keys() == part.tensors.keys()
        for key, tensor in part.tensors.items():
            assert read[key].dtype == tensor.dtype
            assert torch.equal(read[key], tensor)


def test_packing_hands_out_the_memory_itself(nano: TorchEngine) -> None:
    nano.reset()
    nano.extend(tokens(600, nano.limits.vocab_size))
    for part in nano.snapshot().parts:
        _, *pieces = part.pack()
        addresses = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces]
        assert addresses == [tensor.data_ptr() for tensor in part.tensors.values()]
        assert all(piece.readonly for piece in pieces)


def test_packed_memory_outlives_its_part(nano: TorchEngine) -> None:
    nano.reset()
    nano.extend(tokens(100, nano.limits.vocab_size))
    pieces = nano.snapshot().parts[1].pack()
    before = b"".join(pieces)
    gc.collect()
    nano.extend(tokens(600, nano.limits.vocab_size))
    nano.snapshot()
    assert b"".join(pieces) == before


def test_an_unpacked_capsule_refers_to_no_byte_that_it_was_made_of(nano: TorchEngine) -> None:
    nano.reset()
    nano.extend(tokens(600, nano.limits.vocab_size))
    files = [bytearray(b"".join(part.pack())) for part in nano.snapshot().parts]
    gc.collect()
    whole = live_bits(nano)
    capsule = nano.unpack(600, [memoryview(file) for file in files])
    for file in files:
        file[:] = bytes(len(file))
    nano.reset()
    nano.restore(capsule)
    assert_same_bits(live_bits(nano), whole)


def test_bytes_of_an_engine_with_other_weights_of_the_same_shape_are_refused(
    tmp_path: Path, tiny_dir: Callable[[str], Path]
) -> None:
    def load(path: Path, **options: object) -> TorchEngine:
        settings = {"max_model_len": 256, "prefill_chunk": 64} | options
        return TorchEngine.load(path, **settings)  # type: ignore[arg-type]

    own = load(tiny_dir("flat-tied"))
    own.extend(tokens(100, 320))
    files = [memoryview(b"".join(part.pack())) for part in own.snapshot().parts]
    same = load(tiny_dir("flat-tied"))
    assert same.limits.fingerprint == own.limits.fingerprint
    assert same.unpack(100, files).position == 100
    others = {
        "weights": load(write_checkpoint(tmp_path, SHAPES["flat-tied"], seed=1)),
        "grid": load(tiny_dir("flat-tied"), prefill_chunk=128),
        "dtype": load(tiny_dir("flat-tied"), dtype="bfloat16"),
        "shape": load(tiny_dir("no-mtp")),
    }
    for what, other in others.items():
        with pytest.raises(CapsuleError, match="fingerprint"):
            other.unpack(100, files)
        assert other.position == 0, what
