"""A card's step, one chain of kernels, decides what the host's step decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from capserve.engine import card_decode
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Chunk, Sampling, TokenArray, TokenMask
from capserve.testing.tiny import SHAPES, write_checkpoint
from tests.kernels.conftest import ON_CARD

POSITIONS, CHUNK = 96, 16
PROMPT = 21
VOCAB, NARROW = 96, 40


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[TorchEngine, TorchEngine]:
    """One model with the host's step and with the card's, in float32; drafts of the card are
    narrow where the text allows it."""
    path: Path = write_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPES["two-layers"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_decode, "DRAFT_IDS", NARROW)
        card = TorchEngine.load(
            path,
            device=str(device),
            dtype="float32",
            max_model_len=POSITIONS,
            prefill_chunk=CHUNK,
            max_drafts=3,
            card=True,
        )
    host = TorchEngine.load(
        path,
        device="cpu",
        dtype="float32",
        max_model_len=POSITIONS,
        prefill_chunk=CHUNK,
        max_drafts=3,
        card=False,
    )
    return host, card


def tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, VOCAB, count, dtype=np.int32)


def reply(
    engine: TorchEngine,
    sampling: Sampling,
    count: int,
    prompt: TokenArray | None = None,
    **begin: object,
) -> list[Chunk]:
    prompt = tokens(PROMPT) if prompt is None else prompt
    engine.reset()
    engine.extend(prompt)
    engine.begin(sampling, prompt, **begin)  # type: ignore[arg-type]
    chunks: list[Chunk] = []
    while sum(len(chunk.tokens) for chunk in chunks) < count:
        chunks.append(engine.step())
        if chunks[-1].stop is not None:
            break
    return chunks


def said(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=7),
    "nucleus": Sampling(temperature=1.1, top_p=0.8, min_p=0.02, seed=2**63 + 5),
    "penalised": Sampling(
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((5, 3.0), (9, -8.0)),
        seed=11,
    ),
}


CASES = [(name, drafts) for name in SETTINGS for drafts in (0, 1, 3)]
FEW = [("greedy", 0), ("nucleus", 1), ("penalised", 3)]  # the interpreter takes seconds a step
COUNT = 14 if ON_CARD else 7


@pytest.mark.parametrize(("name", "drafts"), CASES if ON_CARD else FEW)
def test_a_cards_step_decides_the_hosts_tokens_for_every_number_of_drafts(
    engines: tuple[TorchEngine, TorchEngine], name: str, drafts: int
) -> None:
    host, card = engines
    expected = said(reply(host, SETTINGS[name], COUNT))[:COUNT]
    found = said(reply(card, replace(SETTINGS[name], drafts=drafts), COUNT))[:COUNT]
    assert found == expected


def test_drafts_are_narrow_until_the_text_is_not(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    host, card = engines
    prompt = tokens(PROMPT) % NARROW
    expected = said(reply(host, SETTINGS["sampled"], 5, prompt))[:5]
    assert max(expected) >= NARROW, "the reply leaves the narrow ids"
    decode = card._card
    assert decode is not None
    card.reset()
    card.extend(prompt)
    card.begin(replace(SETTINGS["sampled"], drafts=2), prompt)
    assert decode._width == ""
    found: list[int] = []
    while len(found) < 5:
        found += card.step().tokens
    assert found[:5] == expected
    assert decode._width == card_decode.WIDE


def test_a_snapshot_between_two_steps_changes_no_token_and_restores(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    _, card = engines
    sampling = replace(SETTINGS["sampled"], drafts=3)
    expected = said(reply(card, sampling, 9))[:9]
    before = said(reply(card, sampling, 4))
    capsule = card.snapshot()
    after = list(before)
    while len(after) < 9:
        after += card.step().tokens
    assert after[:9] == expected
    card.restore(capsule)
    card.begin(sampling, tokens(PROMPT), np.array(before, np.int32))
    again = list(before)
    while len(again) < 9:
        again += card.step().tokens
    assert again[:9] == expected


def test_an_end_token_closes_the_chunk_and_is_not_absorbed(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    host, card = engines
    end = said(reply(host, Sampling(), 8))[5]
    chunks = reply(card, Sampling(drafts=3, end_tokens=(end,)), 20)
    assert said(chunks) == said(reply(host, Sampling(end_tokens=(end,)), 20))
    assert chunks[-1].stop == end
    assert card.position == PROMPT + len(said(chunks)) - 1


def test_log_probabilities_are_the_hosts(engines: tuple[TorchEngine, TorchEngine]) -> None:
    host, card = engines
    sampling = replace(SETTINGS["penalised"], top_logprobs=3)
    expected = [best for chunk in reply(host, sampling, 5) for best in chunk.logprobs]
    found = [b for chunk in reply(card, replace(sampling, drafts=3), 5) for b in chunk.logprobs]
    for ours, theirs in zip(found[:5], expected[:5], strict=True):
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


class Every:
    """Allows the ids with the parity of the number of tokens so far."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def restart(self) -> None:
        self.said = []

    def mask(self) -> TokenMask:
        bits = np.arange(VOCAB) % 2 == len(self.said) % 2
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> None:
        assert token % 2 == len(self.said) % 2, "not allowed"
        self.said.append(token)

    def rollback(self, tokens: int) -> None:
        if tokens:
            del self.said[-tokens:]


@pytest.mark.parametrize("drafts", [0, 2] if ON_CARD else [2])
def test_a_constraint_masks_every_row_where_it_stands(
    engines: tuple[TorchEngine, TorchEngine], drafts: int
) -> None:
    host, card = engines
    sampling = SETTINGS["sampled"]
    expected = said(reply(host, sampling, 5, constraint=Every()))[:5]
    found = said(reply(card, replace(sampling, drafts=drafts), 5, constraint=Every()))[:5]
    assert found == expected
    assert [token % 2 for token in found] == [i % 2 for i in range(5)]


def test_a_step_never_passes_the_end_of_the_context(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    host, card = engines
    prompt = tokens(POSITIONS - 5)
    replies = []
    for engine, drafts in ((host, 0), (card, 3)):
        engine.reset()
        engine.extend(prompt)
        engine.begin(Sampling(drafts=drafts), prompt)
        found: list[int] = []
        while engine.position < POSITIONS:
            found += engine.step().tokens
        replies.append(found[:6])
    assert replies[0] == replies[1]
