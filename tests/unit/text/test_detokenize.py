"""Text never breaks inside a character, and nothing that was generated is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capserve.text.detokenize import Detokenizer


class Vocabulary:
    """One token for each byte, and one special of each kind."""

    def __init__(self) -> None:
        self.specials = {"<|im_end|>": 256, "<think>": 257}
        self.control_ids = frozenset({256, 257})

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<think>" if token == 257 else b"<|im_end|>"


@given(
    data=st.binary() | st.text().map(lambda s: s.encode("utf-8", "surrogatepass")), cut=st.data()
)
def test_any_cut_of_any_bytes_equals_decoding_the_whole(data, cut):
    detokenizer = Detokenizer(Vocabulary())
    at, text = 0, ""
    while at < len(data):
        end = cut.draw(st.integers(at, len(data)))
        text += detokenizer.feed(data[at:end])
        at = max(end, at + (end == at and not cut.draw(st.booleans())))
        text += detokenizer.feed(data[end:at])
    assert text + detokenizer.flush() == data.decode("utf-8", errors="replace")


def test_half_a_character_waits_for_its_other_half():
    detokenizer = Detokenizer(Vocabulary())
    first, *rest = "🙂".encode()
    assert detokenizer.feed([first]) == ""
    assert detokenizer.feed(rest) == "🙂"
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.feed(b"ok") == "ok"


def test_control_tokens_are_dropped_and_marks_of_structure_are_not():
    detokenizer = Detokenizer(Vocabulary())
    assert detokenizer.feed([257, *b"a", 256]) == "<think>a"
