"""A stop string ends the text wherever its pieces arrive, and holds back no more than it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capserve.text.markup import unfinished
from capserve.text.stops import StopFilter

SHORT = st.text("ab<", max_size=12)


@given(text=SHORT, stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_one_character_at_a_time_is_the_whole(text, stops):
    whole = StopFilter(stops)
    wanted = whole.feed(text)
    if whole.matched is None:
        wanted += whole.flush()
    single, said = StopFilter(stops), ""
    for char in text:
        said += single.feed(char)
        if single.matched is not None:
            break
    else:
        said += single.flush()
    assert (said, single.matched) == (wanted, whole.matched)
    assert all(stop not in said for stop in stops)


@given(text=SHORT, words=st.lists(st.text("ab<", min_size=1, max_size=5)))
def test_what_is_held_is_the_longest_head_of_a_word(text, words):
    heads = {word[:n] for word in words for n in range(1, len(word))}
    assert unfinished(text, words) == max((len(h) for h in heads if text.endswith(h)), default=0)


@pytest.mark.parametrize(
    ("stops", "parts", "said"),
    [
        (("END",), ["one E", "N", "D two"], ["one ", "", ""]),
        (("END",), ["one E", "x"], ["one ", "Ex"]),
        (("ab", "b"), ["xab"], ["x"]),
        (("abc", "b"), ["xa", "b"], ["x", "a"]),
        ((), ["anything"], ["anything"]),
        (("",), ["anything"], ["anything"]),
    ],
)
def test_text_before_the_stop_is_delivered_and_the_stop_is_not(stops, parts, said):
    filter_ = StopFilter(stops)
    assert [filter_.feed(part) for part in parts] == said
