"""A name is a digest of what was absorbed and how, whatever the calls were."""

from __future__ import annotations

import numpy as np
import pytest

from capserve.engine.history import ROOT, SEGMENT_TOKENS, History
from capserve.engine.seam import TokenArray


def some(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def names(history: History) -> list[bytes]:
    return [*history.names, history.name("kv"), history.name("small")]


def prefilled(*chunks: TokenArray) -> History:
    history = History()
    for chunk in chunks:
        history.prefilled(chunk)
    return history


def test_an_empty_history_starts_from_the_root() -> None:
    history = History()
    assert (history.position, history.names, history.after) == (0, [], ROOT)
    assert len(history.name("small")) == 16


def test_how_a_chunk_was_cut_is_in_every_name_from_there_on() -> None:
    ids = some(1200)
    whole = prefilled(*np.split(ids, [600]))
    for cuts in ([599], [601], [100, 600]):
        other = prefilled(*np.split(ids, cuts))
        assert other.position == whole.position == 1200
        assert not set(names(other)) & set(names(whole)), f"chunks cut at {cuts}"
    late = prefilled(*np.split(ids, [600, 1100]))
    same = [a == b for a, b in zip(names(late), names(whole), strict=True)]
    assert same == [True, False, False, False], "only the first segment ends before they differ"


@pytest.mark.parametrize("cuts", [[], [1], [3, 5, 6], [511, 512, 513]])
def test_decoded_rows_may_come_in_any_portions(cuts: list[int]) -> None:
    ids = some(1100)
    one, many = prefilled(ids[:500]), prefilled(ids[:500])
    for token in ids[500:]:
        one.decoded([int(token)])
    for portion in np.split(ids[500:], cuts):
        many.decoded(portion.tolist())
    assert names(one) == names(many)
    assert one.position == many.position == 1100
    assert len(one.names) == 2


def test_a_decoded_row_is_no_chunk_of_one() -> None:
    decoded, read = prefilled(some(10)), prefilled(some(10))
    decoded.decoded([7])
    read.prefilled(np.array([7], np.int32))
    assert decoded.name("small") != read.name("small")


def test_a_part_of_another_kind_or_place_has_another_name() -> None:
    zeros = np.zeros(3 * SEGMENT_TOKENS, np.int32)
    history = prefilled(*np.split(zeros, 3))
    assert len({*history.names, history.name("small"), ROOT}) == 5
    history.decoded([0])
    assert history.name("kv") != history.name("small")


def test_a_restored_history_goes_on_alike_and_shares_nothing() -> None:
    history = prefilled(some(700))
    kept = (list(history.names), history.tail.copy(), history.position, history.root)
    again = History()
    again.prefilled(some(900, seed=1))
    again.restore(*kept)
    history.decoded([1, 2, 3])
    assert np.array_equal(kept[1], again.tail)
    again.decoded([1, 2, 3])
    assert names(again) == names(history)
    again.reset()
    assert names(again) == names(History())


def test_tokens_beyond_the_position_leave_no_trace_in_the_tail() -> None:
    history = prefilled(some(SEGMENT_TOKENS + 3))
    assert not history.tail[:, 3:].any()
    history = prefilled(some(SEGMENT_TOKENS))
    assert not history.tail.any()
