"""Two renderings agree up to their first real difference."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capserve.text.markup import EMPTY_THINK
from capserve.text.splice import agree, common_prefix

HEADER = "<|im_start|>assistant\n"


@given(st.text("ab", max_size=300), st.text("ab", max_size=300), st.text("ab", max_size=300))
def test_the_common_prefix_is_what_a_loop_would_find(shared, a, b):
    a, b = shared + a, shared + b
    wanted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    assert common_prefix(a, 0, b, 0) == wanted
    assert common_prefix("xx" + a, 2, "y" + b, 1) == wanted


REPLIES = st.lists(st.sampled_from(("", "Hi", "<tool_call>\nx", "<think", "\n\n", EMPTY_THINK)))


@given(st.lists(st.tuples(REPLIES.map("".join), st.booleans(), st.booleans()), max_size=4))
def test_an_empty_think_block_in_one_of_two_texts_is_no_difference(turns):
    turns = [(reply, a, b) for reply, a, b in turns if not reply.startswith("<think>")]
    known = "".join(f"u{HEADER}{EMPTY_THINK * a}{reply}<|im_end|>\n" for reply, a, _ in turns)
    fresh = "".join(f"u{HEADER}{EMPTY_THINK * b}{reply}<|im_end|>\n" for reply, _, b in turns)
    common = agree(known, fresh + "more", HEADER)
    assert (common.known_chars, common.fresh_chars) == (len(known), len(fresh))
    assert common.complete


@pytest.mark.parametrize(
    ("known", "fresh"),
    [
        ("<think>\nreal\n</think>\n\nHi", "Hi"),
        ("Hi", "<think>\nreal\n</think>\n\nHi"),
        (EMPTY_THINK + "Hi", "<think>\nreal\n</think>\n\nHi"),
        (EMPTY_THINK + "Hi", EMPTY_THINK + "Ho"),
        (EMPTY_THINK + "Hi", "Ho"),
        ("Hi", "Ho"),
    ],
)
def test_any_other_difference_is_one(known, fresh):
    common = agree("a" + HEADER + known + "!", "a" + HEADER + fresh + "!", HEADER)
    assert not common.complete
    assert common.known_chars >= len("a" + HEADER)
