"""E10 and E11 of `capserve.engine.seam`: names, tiers and packed parts, on every engine there is.

Parts of equal name may be one object while they live, so a test that compares the bytes of equal
names packs each capsule and drops it before the next is made.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import safetensors
from contract_steps import (
    GREEDY,
    SAMPLED,
    absorb_own,
    decode,
    most_drafts,
    run_cold,
    some_tokens,
    with_drafts,
)

from capserve.engine.seam import Capsule, CapsulePart, Engine
from capserve.errors import CapsuleError


@dataclass(frozen=True)
class Packed:
    """A capsule of which nothing lives any more."""

    position: int
    names: tuple[bytes, ...]
    files: tuple[bytes, ...]


def file_of(part: CapsulePart) -> bytes:
    return b"".join(part.pack())


def packed(capsule: Capsule) -> Packed:
    parts = capsule.parts
    return Packed(capsule.position, tuple(p.name for p in parts), tuple(map(file_of, parts)))


def taken(engine: Engine) -> Packed:
    """The state as bytes; the capsule itself is gone, and so is what it alone kept alive."""
    return packed(engine.snapshot())


def views(files: Sequence[bytes]) -> list[CapsulePart | memoryview]:
    return [memoryview(file) for file in files]


def put_back(engine: Engine, kept: Packed) -> None:
    engine.restore(engine.unpack(kept.position, views(kept.files)))


# -- E10: names ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_e10_parts_of_equal_name_hold_equal_bytes(engine: Engine, seed: int) -> None:
    """Over programs of prefills, decodes and restores that often meet the same tokens again."""
    draw = np.random.default_rng(seed)
    stream = some_tokens(engine, 1000)
    files: dict[bytes, bytes] = {}
    made: Counter[bytes] = Counter()
    kept: list[Packed] = []
    room = 1000

    def look() -> None:
        now = taken(engine)
        kept.append(now)
        for name, file in zip(now.names, now.files, strict=True):
            assert len(name) == 16
            assert files.setdefault(name, file) == file, f"two contents of {name.hex()}"
            made[name] += 1

    for _ in range(25):
        match draw.integers(5):
            case 0:
                engine.reset()
            case 1 if kept:
                put_back(engine, kept[draw.integers(len(kept))])
            case 2 if 0 < engine.position < room - 20:
                drafts = int(draw.choice([0, 1, 3, most_drafts(engine)]))
                absorb_own(engine, stream[: engine.position], int(draw.choice([5, 13])), drafts)
            case _:
                count = int(draw.choice([1, 60, 64, 128, 192, 384, 512]))
                if engine.position + count > room:
                    engine.reset()
                engine.extend(stream[engine.position : engine.position + count])
        look()
    assert max(made.values()) > 1, "no part was made twice: nothing was compared"


def test_e10_states_of_other_bits_have_other_names(engine: Engine) -> None:
    """The same 600 tokens: read at once, in two ways of cutting, and one by one."""
    prompt = some_tokens(engine, 600)
    found: dict[tuple[int, bytes], bytes] = {}
    for cuts in ([], [100], [101], [100, 200], [590], [599], list(range(500, 600))):
        engine.reset()
        for piece in np.split(prompt, cuts):
            engine.extend(piece)
        now = taken(engine)
        for i, (name, file) in enumerate(zip(now.names, now.files, strict=True)):
            tensors = b"".join(data["data"] for _, data in sorted(safetensors.deserialize(file)))
            known = found.setdefault((i, name), tensors)
            assert known == tensors, f"cut at {cuts}: part {i}"


def test_e10_cuts_on_the_grid_change_no_name(engine: Engine) -> None:
    grid = engine.limits.grid
    prompt = some_tokens(engine, 3 * grid + 7)
    engine.extend(prompt)
    whole = taken(engine)
    engine.reset()
    for piece in np.split(prompt, [grid, 3 * grid]):
        engine.extend(piece)
    assert taken(engine) == whole


def test_e10_the_number_of_drafts_changes_no_name_and_no_byte(engine: Engine) -> None:
    prompt = some_tokens(engine, 500)
    states = []
    for drafts in (0, 1, 3, most_drafts(engine)):
        engine.reset()
        engine.extend(prompt)
        absorb_own(engine, prompt, 30, drafts)  # over the end of a segment
        assert engine.position == 530
        states.append(taken(engine))
    assert all(state == states[0] for state in states)


def test_e10_names_go_on_after_a_restore_as_if_nothing_had_happened(engine: Engine) -> None:
    prompt = some_tokens(engine, 900)
    engine.extend(prompt[:600])
    absorb_own(engine, prompt[:600], 9)
    half = taken(engine)
    engine.extend(prompt[609:])
    undisturbed = taken(engine)
    engine.reset()
    engine.extend(some_tokens(engine, 700, seed=3))
    put_back(engine, half)
    assert taken(engine) == half
    engine.extend(prompt[609:])
    assert taken(engine) == undisturbed


def test_e10_equal_histories_share_memory_even_when_the_state_was_rebuilt(engine: Engine) -> None:
    prompt = some_tokens(engine, 700)
    engine.extend(prompt)
    first = engine.snapshot()
    engine.reset()
    engine.extend(some_tokens(engine, 700, seed=1))
    other = engine.snapshot()
    engine.reset()
    engine.extend(prompt)
    second = engine.snapshot()
    assert [part is again for part, again in zip(first.parts, second.parts, strict=True)] == [
        True
    ] * 3
    assert not {part.name for part in first.parts} & {part.name for part in other.parts}


def test_a_capsule_that_nobody_keeps_is_gone_at_once(engine: Engine) -> None:
    """What `taken` relies on, and the budget of a store."""
    engine.extend(some_tokens(engine, 600))
    capsule = engine.snapshot()
    moved = engine.move(engine.unpack(600, views(packed(capsule).files)), engine.limits.tiers[0])
    parts = [weakref.ref(part) for part in (*capsule.parts, *moved.parts)]
    del capsule, moved
    assert [part() for part in parts] == [None] * 6


def test_e10_every_absorbed_token_is_in_the_names(engine: Engine) -> None:
    prompt = some_tokens(engine, 600)
    engine.extend(prompt)
    names = taken(engine).names
    for place in (0, 511, 512):
        changed = prompt.copy()
        changed[place] = (changed[place] + 1) % engine.limits.vocab_size
        engine.reset()
        engine.extend(changed)
        others = taken(engine).names
        same = [a == b for a, b in zip(names, others, strict=True)]
        assert same == [False, place >= 512, False]


# -- E11: packed parts ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 200, 512, 700])
def test_e11_an_unpacked_capsule_restores_every_bit(engine: Engine, length: int) -> None:
    prompt = some_tokens(engine, length)
    engine.extend(prompt)
    kept = taken(engine)
    engine.begin(SAMPLED, prompt)
    expected = decode(engine, 12)
    engine.reset()
    engine.extend(some_tokens(engine, 800, seed=2))
    capsule = engine.unpack(kept.position, views(kept.files))
    assert capsule.position == length
    assert packed(capsule) == kept
    assert {part.tier for part in capsule.parts} == {engine.limits.tiers[-1]}
    assert sum(part.nbytes for part in capsule.parts) == engine.limits.capsule_bytes(length)
    engine.restore(capsule)
    assert engine.position == length
    assert taken(engine) == kept
    engine.begin(SAMPLED, prompt)
    assert decode(engine, 12) == expected


def test_e11_living_parts_and_bytes_make_one_capsule(engine: Engine) -> None:
    prompt = some_tokens(engine, 600)
    engine.extend(prompt)
    living = engine.snapshot()
    kept = packed(living)
    engine.begin(SAMPLED, prompt)
    expected = decode(engine, 12)
    engine.extend(some_tokens(engine, 50, seed=4))
    for mask in range(8):
        mixed = [
            part if mask >> i & 1 else view
            for i, (part, view) in enumerate(zip(living.parts, views(kept.files), strict=True))
        ]
        capsule = engine.unpack(600, mixed)
        assert packed(capsule) == kept
        assert {part.tier for part in capsule.parts} == {engine.limits.tiers[-1]}
        engine.restore(capsule)
        engine.begin(SAMPLED, prompt)
        assert decode(engine, 12) == expected


def test_e11_a_packed_part_is_a_safetensors_file_that_says_what_it_is(engine: Engine) -> None:
    engine.extend(some_tokens(engine, 600))
    capsule = engine.snapshot()
    for part, (kind, start, end) in zip(
        capsule.parts, [("small", 0, 600), ("kv", 0, 512), ("kv", 512, 600)], strict=True
    ):
        file = file_of(part)
        tensors = safetensors.deserialize(file)
        assert sum(len(tensor["data"]) for _, tensor in tensors) == part.nbytes
        length = int.from_bytes(file[:8], "little")
        assert length % 8 == 0
        said = json.loads(file[8 : 8 + length])["__metadata__"]
        assert (said["kind"], said["start"], said["end"]) == (kind, str(start), str(end))
        assert said["name"] == part.name.hex()
        assert said["fingerprint"] == engine.limits.fingerprint


def test_e11_parts_are_packed_by_another_thread_while_the_engine_steps(engine: Engine) -> None:
    prompt = some_tokens(engine, 600)
    engine.extend(prompt)
    expected = taken(engine)
    capsule = engine.snapshot()
    with ThreadPoolExecutor(1) as pool:
        jobs = [pool.submit(packed, capsule) for _ in range(10)]
        engine.begin(with_drafts(GREEDY, most_drafts(engine)), prompt)
        decode(engine, 24)
        engine.extend(some_tokens(engine, 100, seed=5))
        assert all(job.result(timeout=60) == expected for job in jobs)


def test_a_capsule_moves_through_the_tiers_with_every_bit(engine: Engine) -> None:
    prompt = some_tokens(engine, 600)
    engine.extend(prompt)
    kept = taken(engine)
    for tier in (*engine.limits.tiers, *reversed(engine.limits.tiers)):
        capsule = engine.unpack(600, views(kept.files))
        engine.extend(some_tokens(engine, 90, seed=7))
        position = engine.position
        moved = engine.move(capsule, tier)
        assert engine.position == position
        assert packed(moved) == packed(capsule) == kept
        assert {part.tier for part in moved.parts} == {tier}
        engine.reset()
        engine.extend(some_tokens(engine, 700, seed=8))
        engine.restore(moved)
        del moved, capsule
        assert taken(engine) == kept


def test_a_move_shares_what_lives_in_the_other_tier(engine: Engine) -> None:
    engine.extend(some_tokens(engine, 600))
    first = engine.snapshot()
    engine.extend(some_tokens(engine, 60, seed=6))
    second = engine.snapshot()
    assert {part.tier for part in first.parts} == {engine.limits.tiers[0]}
    assert first.parts[1] is second.parts[1], "the full segment of both"
    for tier in engine.limits.tiers:
        moved = engine.move(first, tier), engine.move(second, tier)
        assert moved[0].parts[1] is moved[1].parts[1]
        for part, again in zip(engine.move(first, tier).parts, moved[0].parts, strict=True):
            assert part is again
        assert engine.move(moved[0], tier) is moved[0]


# -- refusals --------------------------------------------------------------------------------


def refuses(
    engine: Engine, position: int, parts: Sequence[CapsulePart | memoryview], *words: str
) -> None:
    """A CapsuleError that says these words, and a state that is as it was."""
    before = engine.position
    with pytest.raises(CapsuleError) as caught:
        engine.unpack(position, parts)
    assert caught.value.status == 400
    for word in words:
        assert word in caught.value.message
    assert engine.position == before


@pytest.fixture
def kept(engine: Engine) -> Packed:
    """A capsule at 600, of an engine that went on to 640 since."""
    engine.extend(some_tokens(engine, 600))
    kept = taken(engine)
    engine.extend(some_tokens(engine, 40, seed=8))
    return kept


def replaced(kept: Packed, i: int, file: bytes) -> list[CapsulePart | memoryview]:
    return views([file if n == i else own for n, own in enumerate(kept.files)])


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_flipped_byte_of_a_header_is_noticed(
    engine: Engine, kept: Packed, part: int, bit: int
) -> None:
    file = bytearray(kept.files[part])
    for place in range(8 + int.from_bytes(file[:8], "little")):
        file[place] ^= bit
        refuses(engine, 600, replaced(kept, part, bytes(file)))
        file[place] ^= bit
    assert packed(engine.unpack(600, replaced(kept, part, bytes(file)))) == kept


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_file_that_ends_too_soon_or_too_late_is_refused(
    engine: Engine, kept: Packed, part: int
) -> None:
    file = kept.files[part]
    for length in (0, 1, 7, 8, 100, len(file) // 2, len(file) - 1):
        refuses(engine, 600, replaced(kept, part, file[:length]))
    refuses(engine, 600, replaced(kept, part, file + b"\0"), str(len(file)), str(len(file) + 1))


def test_parts_at_another_position_or_of_another_number_are_refused(
    engine: Engine, kept: Packed
) -> None:
    refuses(engine, 601, views(kept.files), "600", "601")
    refuses(engine, 600, views(kept.files[:-1]), "2 parts", "3")
    refuses(engine, 512, views(kept.files), "3 parts", "2")
    refuses(engine, -1, views(kept.files), "-1", str(engine.limits.max_positions))
    beyond = engine.limits.max_positions + 1
    refuses(engine, beyond, views(kept.files), str(beyond))
    small, full, tail = kept.files
    refuses(engine, 600, views([full, small, tail]), "kv", "small")
    refuses(engine, 600, views([small, tail, full]), "start", "'512'", "'0'")


def test_parts_of_another_engine_are_refused(engine: Engine, kept: Packed) -> None:
    own = engine.limits.fingerprint
    other = own[::-1]
    assert other != own
    for part in range(3):
        file = kept.files[part].replace(own.encode(), other.encode())
        refuses(engine, 600, replaced(kept, part, file), own, other)


def test_parts_of_two_histories_make_no_capsule(engine: Engine, kept: Packed) -> None:
    changed = some_tokens(engine, 600)
    for place in (100, 550):
        engine.reset()
        tokens = changed.copy()
        tokens[place] = (tokens[place] + 1) % engine.limits.vocab_size
        engine.extend(tokens)
        living = engine.snapshot()
        files = packed(living).files
        for mask in range(1, 7):
            chosen = [own if mask >> i & 1 else new for i, (own, new) in enumerate(
                zip(kept.files, files, strict=True)
            )]  # fmt: skip
            if chosen in ([*kept.files], [*files]):
                continue  # their first 512 tokens are the same
            refuses(engine, 600, views(chosen))
            parts = [view if mask >> i & 1 else part for i, (view, part) in enumerate(
                zip(views(kept.files), living.parts, strict=True)
            )]  # fmt: skip
            refuses(engine, 600, parts)


@dataclass(frozen=True)
class Stranger:
    """A part that no engine made."""

    name: bytes = bytes(16)
    nbytes: int = 1
    tier: str = "host"

    def pack(self) -> list[memoryview]:
        return []


def test_a_living_part_must_be_one_of_the_engines_own_at_its_place(
    engine: Engine, kept: Packed
) -> None:
    capsule = engine.unpack(600, views(kept.files))
    small, full, tail = capsule.parts
    refuses(engine, 600, [Stranger(), full, tail], "Stranger")
    refuses(engine, 600, [small, tail, full])
    refuses(engine, 600, [full, small, tail])
    refuses(engine, 601, [small, full, tail], "600", "601")


HEADERS: dict[str, Callable[[dict[str, object]], object]] = {
    "a list": lambda header: [],
    "no metadata": lambda header: {k: v for k, v in header.items() if k != "__metadata__"},
    "metadata of a wrong type": lambda header: header | {"__metadata__": 3},
    "one tensor more": lambda header: (
        header | {"more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    ),
    "a tensor that is a number": lambda header: {
        name: entry if name == "__metadata__" else 7 for name, entry in header.items()
    },
    "no tensors": lambda header: {"__metadata__": header["__metadata__"]},
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_another_content_is_refused(engine: Engine, kept: Packed, case: str) -> None:
    for part in range(3):
        file = kept.files[part]
        length = int.from_bytes(file[:8], "little")
        text = json.dumps(HEADERS[case](json.loads(file[8 : 8 + length]))).encode()
        changed = len(text).to_bytes(8, "little") + text + file[8 + length :]
        refuses(engine, 600, replaced(kept, part, changed))


def test_a_refused_unpack_does_not_disturb_a_turn(engine: Engine) -> None:
    prompt = some_tokens(engine, 600)
    expected = run_cold(engine, prompt, SAMPLED, 20)
    engine.reset()
    engine.extend(prompt)
    kept = taken(engine)
    engine.begin(SAMPLED, prompt)
    said = decode(engine, 8)
    refuses(engine, 600, replaced(kept, 0, kept.files[0][:-1]))
    engine.move(engine.unpack(600, views(kept.files)), engine.limits.tiers[0])
    assert said + decode(engine, 12) == expected


@pytest.mark.parametrize("position", [300, 600, 512])
def test_foreign_bytes_never_share_a_name_with_what_was_computed_here(
    engine: Engine, position: int
) -> None:
    prompt = some_tokens(engine, position)
    expected = run_cold(engine, prompt, SAMPLED, 12)
    engine.reset()
    engine.extend(prompt)
    own = engine.snapshot()
    files = [file_of(part) for part in own.parts]
    apart = bytes(range(16))
    foreign = engine.unpack(position, views(files), apart)
    mine = {part.name for part in own.parts}
    assert mine.isdisjoint(part.name for part in foreign.parts)
    # Nor does what is absorbed after it: the tail becomes full, and more follows.
    engine.restore(foreign)
    engine.begin(SAMPLED, prompt)
    assert decode(engine, 12) == expected
    more = some_tokens(engine, 400, seed=1)
    engine.restore(foreign)
    engine.extend(more)
    grown = engine.snapshot()
    # Packed again it is a capsule like any other, under its new names.
    again = engine.unpack(grown.position, [memoryview(file_of(part)) for part in grown.parts])
    assert [part.name for part in again.parts] == [part.name for part in grown.parts]
    engine.restore(own)
    engine.extend(more)
    assert {part.name for part in engine.snapshot().parts}.isdisjoint(
        part.name for part in grown.parts
    )
