"""Encoding by pieces equals encoding the whole, and reads only what is new."""

from __future__ import annotations

import threading
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from capserve.errors import CheckpointError, InvalidRequestError
from capserve.text.tokenizer import Tokenizer

MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
)
# Combining marks and Hangul letters are where NFC joins over a piece's border, if anything does.
AWKWARD = st.sampled_from(
    (*MARKS, "e\u0301", "\u0338", "\u1100\u1161", " ", "\n\n", "<", "<|im_", "x")
)
TEXTS = st.lists(AWKWARD | st.text(st.characters(exclude_categories=("Cs",)), max_size=8)).map(
    "".join
)


@pytest.fixture(scope="module")
def library(nano_dir):
    return tokenizers.Tokenizer.from_file(str(nano_dir / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_encoding_equals_the_librarys_encoding_of_the_whole(tokenizer, library, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == library.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_both_sides_of_a_border_encode_on_their_own(tokenizer, text):
    encoding = tokenizer.encode_with_borders(text)
    for char in encoding.chars.tolist():
        cut = encoding.token_offset(char)
        assert tokenizer.encode(text[:char]).tolist() == encoding.tokens[:cut].tolist()
        assert tokenizer.encode(text[char:]).tolist() == encoding.tokens[cut:].tolist()


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_token_bytes_are_the_exact_bytes_of_the_normalised_text(tokenizer, text):
    data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text).tolist()))
    pieces = tokenizer._border.split(text)
    assert data == "".join(unicodedata.normalize("NFC", p) for p in pieces).encode()


def test_borders_floor_to_added_tokens(tokenizer):
    text = "ab<think>cd</think>ef"
    encoding = tokenizer.encode_with_borders(text)
    assert encoding.floor(10) == text.index("cd")
    assert encoding.floor_start(10) == 2
    assert encoding.floor_start(1) == 0
    assert encoding.floor(len(text)) == len(text)
    with pytest.raises(AssertionError, match="no border"):
        encoding.token_offset(1)


def test_a_resent_history_reads_only_its_new_suffix(nano_dir):
    tokenizer = Tokenizer.from_dir(nano_dir)
    turns = [f"<|im_start|>user\nquestion number {i}<|im_end|>\n" for i in range(50)]
    tokenizer.encode("".join(turns))
    before = tokenizer.counters
    tokenizer.encode("".join(turns) + "<|im_start|>user\nsomething new<|im_end|>\n")
    after = tokenizer.counters
    assert after.segments_encoded - before.segments_encoded == 1
    assert after.bytes_encoded - before.bytes_encoded == len("user\nsomething new")
    assert after.bytes_reused - before.bytes_reused == before.bytes_encoded
    assert after.segments_reused - before.segments_reused == 51


def test_the_memo_stays_within_its_bytes(nano_dir):
    tokenizer = Tokenizer.from_dir(nano_dir, memo_bytes=4000)
    for i in range(200):
        tokenizer.encode(f"<think>{i}</think>" + "x" * (i % 50))
        assert tokenizer.memo_bytes <= 4000
    long = "word " * 2000  # alone larger than the memo
    assert tokenizer.encode(long).tolist() == tokenizer.encode(long).tolist()
    assert tokenizer.memo_bytes <= 4000


def test_threads_share_one_tokenizer(nano_dir, library):
    tokenizer = Tokenizer.from_dir(nano_dir, memo_bytes=6000)
    texts = [f"<|im_start|>user\nnumber {i % 7} of {i}<|im_end|>\n" for i in range(60)]
    wanted = [library.encode(text, add_special_tokens=False).ids for text in texts]
    wrong: list[int] = []

    def work() -> None:
        for i, text in enumerate(texts):
            if tokenizer.encode(text).tolist() != wanted[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_specials_and_ids(tokenizer):
    assert tokenizer.specials["<|im_end|>"] == 8185
    assert tokenizer.id_of("</think>") == 8191
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.vocab_size == 8192
    assert 8185 in tokenizer.control_ids
    assert 8190 not in tokenizer.control_ids
    assert tokenizer.token_bytes(8190) == b"<think>"
    assert tokenizer.token_bytes(99999) == b""


def test_a_lone_surrogate_is_refused_and_the_next_text_works(tokenizer):
    with pytest.raises(InvalidRequestError, match=r"U\+D800") as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.param == "messages"
    assert len(tokenizer.encode("ab"))


def test_a_missing_broken_or_foreign_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.from_dir(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        Tokenizer.from_dir(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(file))
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        Tokenizer.from_dir(tmp_path)
