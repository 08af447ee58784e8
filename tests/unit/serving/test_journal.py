"""Committed tokens, their spans, and prefix work on arrays."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_harness import ids

from capserve.serving.journal import (
    Journal,
    JournalView,
    Span,
    SpanKind,
    TurnMark,
    block_digests,
    clip,
    lcp,
    prefix_digests,
)

TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(TOKENS, TOKENS, st.integers(0, 5000))
def test_lcp_equals_the_plain_loop_also_across_blocks(
    a: list[int], b: list[int], common: int
) -> None:
    whole_a, whole_b = ids([7] * common + a), ids([7] * common + b)
    expected = common
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        expected += 1
    assert lcp(whole_a, whole_b) == expected


@given(TOKENS, st.data())
def test_prefix_digests_equal_a_digest_of_each_prefix(
    tokens: list[int], data: st.DataObject
) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    array = ids(tokens)
    expected = [blake2b(array[:p].tobytes(), digest_size=16).digest() for p in positions]
    assert prefix_digests(array, positions) == expected
    strided = np.repeat(array, 2)[::2]
    assert prefix_digests(strided, positions) == expected, "a view hashes as its values"


def test_appending_grows_in_place_and_older_views_keep_what_they_showed() -> None:
    journal = Journal()
    journal.append(ids(range(1000)), SpanKind.PREFILL)
    early = journal.tokens
    for _ in range(40):
        journal.append([5] * 100, SpanKind.DECODE)
    assert len(journal) == 5000
    assert early.tolist() == list(range(1000))
    assert journal.tokens[:1000].tolist() == list(range(1000))
    assert set(journal.tokens[1000:].tolist()) == {5}
    with pytest.raises(ValueError, match="read-only"):
        early[0] = 1


def test_spans_say_how_each_part_was_computed() -> None:
    journal = Journal()
    journal.append([1] * 128, SpanKind.PREFILL)
    journal.append([1] * 10, SpanKind.PREFILL)
    journal.append([2], SpanKind.DECODE)
    journal.append([3, 4], SpanKind.DECODE)
    assert journal.spans == (
        Span(SpanKind.PREFILL, 0, 128),
        Span(SpanKind.PREFILL, 128, 138),
        Span(SpanKind.DECODE, 138, 141),
    )
    assert journal.bit_exact(138, grid=64), "the decoded part lies behind"
    assert not journal.bit_exact(140, grid=64)
    assert clip(journal.spans, 130)[-1] == Span(SpanKind.PREFILL, 128, 130)


def test_a_prefill_that_starts_off_the_grid_is_not_bit_exact() -> None:
    journal = Journal()
    journal.append([1] * 100, SpanKind.PREFILL)
    journal.append([1] * 28, SpanKind.PREFILL)
    assert journal.bit_exact(100, grid=64)
    assert not journal.bit_exact(128, grid=64)


def test_only_the_pending_token_can_be_dropped() -> None:
    journal = Journal()
    journal.append([1] * 10, SpanKind.PREFILL)
    journal.append([8, 9], SpanKind.DECODE)
    before = journal.tokens
    journal.drop_pending(11)
    journal.append([7], SpanKind.PREFILL)
    assert journal.tokens.tolist() == [1] * 10 + [8, 7]
    assert before.tolist() == [1] * 10 + [8, 9], "a view changed under its reader"
    assert journal.spans[-2:] == (Span(SpanKind.DECODE, 10, 11), Span(SpanKind.PREFILL, 11, 12))
    with pytest.raises(AssertionError, match="journal 12 tokens, state 10"):
        journal.drop_pending(10)


def test_a_state_that_leads_its_journal_is_refused() -> None:
    journal = Journal()
    journal.append([1] * 10, SpanKind.PREFILL)
    journal.assert_in_step(10)
    journal.assert_in_step(9)
    for position in (8, 11):
        with pytest.raises(AssertionError, match=f"journal 10 tokens, state {position}"):
            journal.assert_in_step(position)


def test_a_resumed_journal_must_know_how_all_of_it_was_computed() -> None:
    spans = [Span(SpanKind.PREFILL, 0, 4)]
    assert Journal(ids([1, 2, 3, 4]), spans).spans == tuple(spans)
    with pytest.raises(AssertionError, match="spans cover 4 of 5 tokens"):
        Journal(ids([1, 2, 3, 4, 5]), spans)


def test_marks_ascend_and_a_branch_takes_those_before_it() -> None:
    journal = Journal()
    for position, messages in ((10, 2), (10, 3), (25, 4)):
        journal.mark(position, messages)
    assert journal.marks == (TurnMark(10, 2), TurnMark(25, 4))
    branch = Journal()
    branch.keep_marks(journal.marks, 24)
    assert branch.marks == (TurnMark(10, 2),)


@given(
    common=st.integers(0, 4200),
    tails=st.tuples(st.integers(0, 1500), st.integers(0, 1500)),
    cuts=st.lists(st.integers(1, 3000), max_size=4),
)
def test_histories_compared_by_their_digests_share_what_their_tokens_share(
    common: int, tails: tuple[int, int], cuts: list[int]
) -> None:
    mine = ids([7] * common + [1] * tails[0])
    prompt = ids([7] * common + [2] * tails[1])
    journal = Journal()
    for cut in cuts:  # digests are made piece by piece, whenever somebody looks
        piece = mine[len(journal) : len(journal) + cut]
        if len(piece):
            journal.append(piece, SpanKind.PREFILL)
        assert list(journal.blocks) == block_digests(journal.tokens)
    view = JournalView("s", "k/a", journal.tokens, blocks=journal.blocks)
    expected = lcp(journal.tokens, prompt)
    assert view.shares(prompt, block_digests(prompt)) == expected
    bare = JournalView("s", "k/a", journal.tokens)
    assert bare.shares(prompt, block_digests(prompt)) == expected


def test_a_dropped_pending_token_takes_its_block_digest_with_it() -> None:
    journal = Journal()
    journal.append(ids([7] * 2048), SpanKind.PREFILL)
    before = journal.blocks
    assert len(before) == 2
    journal.drop_pending(2047)
    journal.append([9], SpanKind.DECODE)
    assert list(journal.blocks) == block_digests(journal.tokens)
    assert list(before) == block_digests(ids([7] * 2048)), "what a view had before does not change"
