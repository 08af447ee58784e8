"""The card chooses what the host would choose, and accepts what the host would accept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capserve.engine.cursor import Cursor
from capserve.engine.kernels.philox import reference as philox
from capserve.engine.kernels.philox import triton as noise
from capserve.engine.kernels.sampling import reference
from capserve.engine.kernels.sampling import triton as card
from capserve.engine.kernels.sampling.buffers import MAX_ROWS, SamplingBuffers
from capserve.engine.sampling import Sampler
from capserve.engine.seam import Sampling, TokenMask
from capserve.engine.speculate import judge
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_same_bits, poisoned

SMALL = card.Config(block=512, tile=32, gather=16, few=32, most=128, guess=4)
"""Every path of the kernels within a few hundred ids."""

VOCAB = 700
REAL_VOCAB = 248_077
CONTEXT = np.arange(0, 60, 3, dtype=np.int32)
OUTPUT = [5, 9, 9, 300]
FEW_EXAMPLES = 60 if ON_CARD else 8


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Turn:
    """One turn's settings where the kernels read them and where the reference does."""

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        vocab: int = VOCAB,
        config: card.Config = SMALL,
        masks: list[TokenMask | None] | None = None,
    ) -> None:
        self.sampling, self.device, self.vocab = sampling, device, vocab
        self.card = SamplingBuffers.make(vocab, device)
        self.host = SamplingBuffers.make(vocab, torch.device("cpu"))
        self.scratch = card.scratch(vocab, device, config)
        self.load(sampling, masks)

    def load(self, sampling: Sampling, masks: list[TokenMask | None] | None = None) -> None:
        self.sampling = sampling
        for buffers in (self.card, self.host):
            buffers.load(sampling, CONTEXT, OUTPUT, constrained=masks is not None)
            if masks is not None:
                buffers.load_masks(masks)

    def choose(
        self, logits: Tensor, drafts: list[int], start: int, rows: int, place: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(chosen [9], scores [9, V]) on the host; what was not written is -7 and NaN."""
        chosen = torch.full((MAX_ROWS,), -7, dtype=torch.int32, device=self.device)
        scores = poisoned(MAX_ROWS, self.vocab, dtype=torch.float32, device=self.device)
        card.choose(
            logits.to(self.device),
            self.card,
            ints(drafts, self.device),
            ints([start - 3], self.device),
            3,
            rows,
            chosen,
            scores,
            self.scratch,
            place=place,
        )
        return chosen.cpu(), scores.cpu()

    def expected(
        self, logits: Tensor, drafts: list[int], start: int, rows: int, place: int = 0
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.full((MAX_ROWS,), -7, dtype=torch.int32)
        scores = torch.full((MAX_ROWS, self.vocab), float("nan"))
        reference.choose(
            logits,
            self.host,
            ints(drafts, chosen.device),
            ints([start - 3], chosen.device),
            3,
            rows,
            chosen,
            scores,
            place=place,
        )
        return chosen, scores

    def near_tie(
        self, logits: Tensor, drafts: list[int], position: int, row: int, got: int
    ) -> bool:
        """Is `got` what the definition gives when masses or noisy scores differ by a rounding?"""
        own = reference.processed(logits[: self.vocab], self.host, drafts[:row], row)
        s = self.sampling
        if s.temperature == 0:
            return False
        for top_p in {s.top_p, min(1.0, s.top_p * (1 + 1e-5)), s.top_p * (1 - 1e-5)}:
            likely, ids = reference.kept(own / s.temperature, s.top_k, top_p, s.min_p)
            noisy = likely + philox.gumbel(ids, position, s.seed)
            mine = noisy[ids == got]
            if len(mine) and mine.item() > noisy.max() - 2e-5 * max(1.0, noisy.abs().max().item()):
                return True
        return False

    def check(
        self, logits: Tensor, drafts: list[int], start: int, rows: int, place: int = 0
    ) -> int:
        """Kernel against definition; returns how many rows differed, each at a near tie."""
        chosen, scores = self.choose(logits, drafts, start, rows, place)
        wanted, wanted_scores = self.expected(logits, drafts, start, rows, place)
        assert_same_bits(scores, wanted_scores, "scores")
        assert torch.equal(chosen[rows:], wanted[rows:])
        differ = (chosen != wanted).nonzero().flatten().tolist()
        for row in differ:
            token = int(chosen[row])
            assert self.near_tie(logits[row], drafts, start + row, place + row, token), (
                f"row {row}: {token} for {int(wanted[row])} under {self.sampling}"
            )
        return len(differ)


def some_logits(seed: int, rows: int = MAX_ROWS, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """NaN where nothing may be read: padding of the head, unused rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((MAX_ROWS, vocab + 13), float("nan"))
    logits[:rows, :vocab] = torch.randn(rows, vocab, generator=generator) * scale
    return logits


def random_masks(seed: int, vocab: int = VOCAB, least: int = 1) -> list[TokenMask | None]:
    """From `least` allowed ids to all but some; one row is free."""
    generator = np.random.default_rng(seed)
    masks: list[TokenMask | None] = []
    for row in range(MAX_ROWS):
        allowed = np.zeros((vocab + 31) // 32 * 32, bool)
        share = generator.choice([0.0, 0.02, 0.9])
        allowed[:vocab] = generator.random(vocab) < share
        allowed[generator.integers(0, vocab, least)] = True
        words = np.packbits(allowed, bitorder="little").view(np.int32)
        masks.append(None if row == 1 else words)
    return masks


@triton.jit
def _noise_of_words(words, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    word = tl.load(words + lane).to(tl.uint32, bitcast=True)
    tl.store(out + lane, noise.standard_gumbel(word))


@triton.jit
def _noise_of_ids(ids, position, low, high, first, out, of_range, N: tl.constexpr):
    lane = tl.arange(0, N)
    at = tl.load(position)
    key_low = tl.load(low).to(tl.uint32, bitcast=True)
    key_high = tl.load(high).to(tl.uint32, bitcast=True)
    tl.store(out + lane, noise.gumbel(tl.load(ids + lane), at, key_low, key_high))
    tl.store(of_range + lane, noise.gumbel_range(first, at, key_low, key_high, N))


def test_noise_is_the_double_precision_one_within_float_rounding(device: torch.device) -> None:
    """Also of the words at both ends, and where the two forms of the logarithm meet."""
    generator = np.random.default_rng(1)
    edges = [0, 1, 2, 2**23, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**24, 2**32 - 257]
    edges += [2**32 - 3, 2**32 - 2, 2**32 - 1, *(2**32 - 2**bit for bit in range(1, 31))]
    words = generator.integers(0, 2**32, 4096, dtype=np.uint32)
    words[: len(edges)] = np.array(edges, np.uint32)
    out = poisoned(4096, dtype=torch.float32, device=device)
    _noise_of_words[(1,)](torch.from_numpy(words.view(np.int32)).to(device), out, N=4096)
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    exact = -np.log(-np.log(u))
    error = np.abs(out.cpu().double().numpy() - exact)
    assert (error <= 1.5e-6 * np.maximum(1.0, np.abs(exact))).all(), error.max()


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 12345, 2**64 - 1])
def test_noise_of_an_id_is_that_of_seed_position_and_id(device: torch.device, seed: int) -> None:
    count, first, position = 256, 512, 262_143
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    keys = torch.from_numpy(words).to(device)
    ids = torch.randperm(REAL_VOCAB)[:count].int()
    out = poisoned(count, dtype=torch.float32, device=device)
    of_range = poisoned(count, dtype=torch.float32, device=device)
    _noise_of_ids[(1,)](
        ids.to(device), ints([position], device), keys, keys[1:], first, out, of_range, N=count
    )
    for got, of in ((out, ids.long()), (of_range, torch.arange(first, first + count))):
        assert (got.cpu() - philox.gumbel(of, position, seed)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=2**63 + 5),
        Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=1),
        Sampling(temperature=1.0, top_k=100, top_p=0.8, min_p=0.02, seed=2),
        Sampling(temperature=0.6, top_p=0.9, seed=3),
        Sampling(temperature=0.3, top_p=0.05, seed=3),
        Sampling(temperature=1.0, min_p=0.1, seed=4),
        Sampling(top_logprobs=3, repetition_penalty=1.3),
        Sampling(top_logprobs=0, presence_penalty=0.5, frequency_penalty=-0.7),
        Sampling(top_logprobs=0, logit_bias=((4, 2.5), (7, -100.0), (8, -float("inf")))),
    ],
    ids=lambda sampling: repr(sampling)[9:60],
)
def test_the_card_chooses_what_the_definition_chooses(
    device: torch.device, sampling: Sampling
) -> None:
    turn = Turn(sampling, device)
    assert turn.check(some_logits(0, 2), [9, 5, 9], 1000, 2) == 0
    unpadded = some_logits(1, 9)[:, :VOCAB].contiguous()
    assert turn.check(unpadded, [9, 5, 9], 1000, 1) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=300, top_p=0.9, min_p=1e-5, seed=5),
        Sampling(temperature=9.0, top_p=0.97, seed=6),
        Sampling(temperature=9.0, min_p=0.001, seed=7),
        Sampling(temperature=5.0, top_k=VOCAB - 1, seed=8),
    ],
    ids=lambda sampling: repr(sampling)[9:60],
)
def test_filters_that_keep_more_than_fits_go_the_slow_way_to_the_same_choice(
    device: torch.device, sampling: Sampling
) -> None:
    turn = Turn(sampling, device, config=replace(SMALL, most=64))
    assert turn.check(some_logits(3, 1), [], 77, 1) == 0


@settings(max_examples=FEW_EXAMPLES, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 50, VOCAB, VOCAB + 9]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition=st.sampled_from([1.0, 1.0, 1.2]),
    frequency=st.sampled_from([0.0, 0.4]),
    biased=st.booleans(),
    masked=st.booleans(),
    grain=st.sampled_from([0.0, 0.25, 4.0]),
    place=st.integers(0, 3),
)
def test_any_settings_choose_alike_on_card_and_host(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    frequency: float,
    biased: bool,
    masked: bool,
    grain: float,
    place: int,
) -> None:
    """Coarse scores have many ties; penalties count the drafts in front of a row."""
    device = torch.device("cuda" if ON_CARD else "cpu")
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        logit_bias=((3, 1.5), (690, -2.0)) if biased else (),
        seed=seed,
        top_logprobs=0,
    )
    logits = some_logits(seed % 1000, 2)
    if grain:
        logits = (logits / grain).round() * grain
    turn = Turn(sampling, device, masks=random_masks(seed % 997) if masked else None)
    turn.check(logits, [9, 3, 3, 9], 500, 2, place)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_mask_that_allows_few_ids_is_chosen_from_at_any_top_k(device: torch.device) -> None:
    """Fewer allowed ids than k, and one alone: forbidden ids never fill up the k."""
    for sampling in (
        Sampling(temperature=1.0, top_k=20, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=0.7),
        Sampling(),
    ):
        allowed = np.zeros(VOCAB // 32 * 32 + 32, bool)
        allowed[[699, 31, 32]] = True
        three = np.packbits(allowed, bitorder="little").view(np.int32)
        allowed[[31, 32]] = False
        one = np.packbits(allowed, bitorder="little").view(np.int32)
        turn = Turn(sampling, device, masks=[three, one])
        chosen, _ = turn.choose(some_logits(1, 2), [0] * 8, 9, 2)
        assert int(chosen[0]) in (31, 32, 699)
        assert int(chosen[1]) == 699
        assert turn.check(some_logits(1, 2), [0] * 8, 9, 2) == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_holds_no_number_still_chooses_an_id_of_the_vocabulary(
    device: torch.device,
) -> None:
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=20, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.95),
    ):
        turn = Turn(sampling, device)
        chosen, _ = turn.choose(torch.full((1, VOCAB + 13), float("nan")), [], 9, 1)
        assert 0 <= int(chosen[0]) < VOCAB


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=0.5, top_logprobs=0),
        Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.1, top_logprobs=0),
        Sampling(temperature=0.9),
    ],
    ids=["greedy", "filtered", "plain"],
)
def test_a_row_has_the_same_bits_in_any_company_and_at_any_place(
    device: torch.device, sampling: Sampling
) -> None:
    turn = Turn(sampling, device)
    logits = some_logits(4)
    drafts = [9, 5, 9, 600, 1, 2, 3, 4]
    together, scores = turn.choose(logits, drafts, 900, 4)
    for row in (0, 2, 3):
        alone, own = turn.choose(logits[row:], drafts, 900 + row, 1, place=row)
        assert int(alone[0]) == int(together[row])
        assert_same_bits(own[0], scores[row])


def test_a_verify_decides_what_the_host_judges(device: torch.device) -> None:
    """Drafts that the target agrees with for a while, penalties that count them, end tokens."""
    for sampling, agreed in (
        (Sampling(frequency_penalty=0.9, repetition_penalty=1.2), 2),
        (Sampling(temperature=0.8, top_k=20, top_p=0.9, presence_penalty=0.8, seed=3), 3),
        (Sampling(temperature=0.9, seed=4), 0),
    ):
        logits = some_logits(11, 4)
        first = logits[0, :VOCAB].clone()
        logits[1:4, :VOCAB] = first + logits[1:4, :VOCAB] * 0.01  # penalties make the difference
        drafts: list[int] = []
        for _ in range(agreed):
            sampler = Sampler(sampling, CONTEXT, OUTPUT, VOCAB, torch.device("cpu"))
            verdict = judge(logits[: len(drafts) + 1, :VOCAB], drafts, sampler, 50)
            assert len(verdict.tokens) == len(drafts) + 1
            drafts.append(verdict.tokens[-1])
        drafts += [1] * (3 - agreed)
        for ends in ((), (drafts[1],), tuple(drafts)):
            turn = Turn(replace(sampling, end_tokens=ends), device)
            sampler = Sampler(turn.sampling, CONTEXT, OUTPUT, VOCAB, torch.device("cpu"))
            verdict = judge(logits[:4, :VOCAB], drafts, sampler, 50)
            chosen, _ = turn.choose(logits, drafts, 50, 4)
            cursor, decided, result = Cursor(device), ints([-9] * 9, device), ints([9] * 16, device)
            cursor.put(position=49)
            card.accept(
                chosen.to(device), ints(drafts, device), turn.card, cursor, decided, result, 4,
                "verify",
            )  # fmt: skip
            count, stop, *tokens = result.tolist()
            assert tuple(tokens[:count]) == verdict.tokens
            assert stop == (-1 if verdict.stop is None else verdict.stop)
            assert cursor.words.tolist() == [49 + count, count, count, stop, 0, 0, 0, 0]
            if sampler._counts is not None:
                assert torch.equal(turn.card.counts.cpu().float(), sampler._counts)
            if sampler._seen is not None:
                assert torch.equal(turn.card.seen.cpu().bool(), sampler._seen)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, MAX_ROWS),
    chosen=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    drafts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    ends=st.sets(st.integers(2, 5), max_size=3),
    mode=st.sampled_from(["verify", "append", "first"]),
    held=st.integers(0, 8),
    penalised=st.booleans(),
)
def test_accepting_does_to_every_buffer_what_its_definition_does(
    rows: int,
    chosen: list[int],
    drafts: list[int],
    ends: set[int],
    mode: str,
    held: int,
    penalised: bool,
) -> None:
    sampling = Sampling(end_tokens=tuple(ends), presence_penalty=0.5 if penalised else 0.0)
    rows = rows if mode == "verify" else 1
    ended: list[list[int]] = []
    for accept, device in (
        (reference.accept, torch.device("cpu")),
        (card.accept, torch.device("cuda" if ON_CARD else "cpu")),
    ):
        buffers = SamplingBuffers.make(VOCAB, device)
        buffers.load(sampling, CONTEXT, OUTPUT)
        cursor, decided, result = Cursor(device), ints([-9] * 9, device), ints([7] * 16, device)
        cursor.put(position=100, count=held, accepted=4)
        chosen_rows = [*chosen[:rows], *[5] * (9 - rows)]  # nothing of the rows behind
        accept(
            ints(chosen_rows, device), ints(drafts, device), buffers, cursor, decided, result,
            rows, mode,
        )  # fmt: skip
        tensors = cursor.words, decided, result, buffers.counts, buffers.seen
        ended.append([value for tensor in tensors for value in tensor.tolist()])
    assert ended[0] == ended[1]


def test_log_probabilities_of_kept_scores_are_the_samplers_own(device: torch.device) -> None:
    sampling = Sampling(temperature=0.9, seed=8, repetition_penalty=1.2, top_logprobs=5)
    allowed = np.zeros(VOCAB // 32 * 32 + 32, bool)
    allowed[[4, 5, 9]] = True
    masks: list[TokenMask | None] = [None, np.packbits(allowed, bitorder="little").view(np.int32)]
    turn = Turn(sampling, device, masks=masks)
    logits = some_logits(2, 2)
    chosen, scores = turn.choose(logits, [9], 30, 2)
    free, bound = reference.logprobs(scores[:2], chosen[:2].tolist(), 5)
    sampler = Sampler(sampling, CONTEXT, OUTPUT, VOCAB, torch.device("cpu"))
    assert (int(chosen[0]), free) == sampler.choose_with_logprobs(logits[0, :VOCAB], 30)
    assert len(free.top) == 5
    assert {token for token, _ in bound.top} == {4, 5, 9}


class RealTurn:
    """The real vocabulary, in a padded head, as a step of a 27B model has it."""

    def __init__(self, device: torch.device) -> None:
        self.turn = Turn(Sampling(), device, REAL_VOCAB, card.DEFAULT)
        generator = torch.Generator(device).manual_seed(5)
        self.logits = torch.full((MAX_ROWS, 248_320), float("nan"), device=device)
        self.logits[:, :REAL_VOCAB] = torch.randn(
            MAX_ROWS, REAL_VOCAB, generator=generator, device=device
        )
        self.logits[:, :REAL_VOCAB] *= 2.5
        self.logits[:, 1000:1040] += 6  # likely ids lie close together, as common words do
        self.start = ints([0], device)
        self.drafts = ints([1, 2, 3, 1000, 1001, 6, 7, 8], device)
        self.chosen = ints([-7] * MAX_ROWS, device)
        self.scores = torch.empty(MAX_ROWS, REAL_VOCAB, device=device)

    def run(self, rows: int = MAX_ROWS) -> None:
        turn = self.turn
        card.choose(
            self.logits, turn.card, self.drafts, self.start, 0, rows, self.chosen, self.scores,
            turn.scratch,
        )  # fmt: skip


REAL_SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, top_k=20, top_p=0.95, seed=2),
    Sampling(temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5, seed=3),
    Sampling(temperature=1.0, top_p=0.95, seed=4),
    Sampling(temperature=0.8, top_p=0.5, min_p=0.05, seed=5),
    Sampling(temperature=1.0, min_p=0.02, seed=6),
    Sampling(temperature=2.5, top_p=0.99, seed=7),
    Sampling(temperature=1.0, top_k=5000, top_p=0.999, seed=8),
    Sampling(repetition_penalty=1.1, frequency_penalty=0.2, top_logprobs=5),
]


@pytest.mark.gpu
def test_one_graph_serves_every_turn_and_chooses_as_the_host_does(device: torch.device) -> None:
    real = RealTurn(device)
    real.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        real.run()
    host = real.logits.cpu()
    rows, ties = 0, 0
    for sampling in REAL_SETTINGS:
        real.turn.load(sampling)
        real.start.fill_(1234)
        real.chosen.fill_(-7)
        graph.replay()
        replayed = real.chosen.clone()
        real.chosen.fill_(-7)
        real.run()
        assert torch.equal(replayed, real.chosen), f"graph and eager differ under {sampling}"
        ties += real.turn.check(host, real.drafts.tolist(), 1234, MAX_ROWS)
        rows += MAX_ROWS
    assert ties <= rows // 50, f"{ties} of {rows} choices differ at near ties"


@pytest.mark.gpu
@pytest.mark.parametrize("index", [1, 2, 4])
def test_512_positions_choose_as_the_host_does(device: torch.device, index: int) -> None:
    real = RealTurn(device)
    sampling = REAL_SETTINGS[index]
    real.turn.load(sampling)
    got = []
    for position in range(512):
        real.start.fill_(position)
        real.run(1)
        got.append(real.chosen[:1].clone())
    tokens = torch.cat(got).tolist()
    scores = real.logits[0, :REAL_VOCAB].cpu() / sampling.temperature
    likely, ids = reference.kept(scores, sampling.top_k, sampling.top_p, sampling.min_p)
    differ = 0
    for position, token in enumerate(tokens):
        noisy = likely + philox.gumbel(ids, position, sampling.seed)
        if token != int(ids[noisy.argmax()]):
            differ += 1
            assert real.turn.near_tie(real.logits[0].cpu(), [], position, 0, token)
    assert differ <= 2, f"{differ} of 512 choices differ at near ties"
    assert len(set(tokens)) > 5


@pytest.mark.gpu
def test_repeated_runs_have_the_same_bits(device: torch.device) -> None:
    """Order of arrival changes nothing: what is summed is summed in one order or in integers."""
    real = RealTurn(device)
    for sampling in REAL_SETTINGS:
        real.turn.load(sampling)
        real.run()
        first = real.chosen.clone()
        for _ in range(20):
            real.chosen.fill_(-7)
            real.run()
            assert torch.equal(first, real.chosen), str(sampling)
