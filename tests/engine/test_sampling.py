"""The chosen token follows the stated distribution, and filters keep what their names say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capserve.engine.kernels.philox.reference import gumbel, philox
from capserve.engine.kernels.sampling.reference import kept
from capserve.engine.runtime import TorchEngine
from capserve.engine.sampling import Sampler
from capserve.engine.seam import Sampling
from tests.engine.helpers import tokens

VOCAB = 50
HEAT, KEPT = 4.0, 12
"""Temperature and top-k at which the trained model has a dozen likely tokens."""
NONE = np.empty(0, dtype=np.int32)


def sampler(
    context: np.ndarray = NONE, output: list[int] | None = None, **fields: object
) -> Sampler:
    return Sampler(Sampling(**fields), context, output or [], VOCAB, torch.device("cpu"))  # type: ignore[arg-type]


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """(statistic - degrees of freedom) / its standard deviation, over cells of at least 5."""
    expected = probs * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    want = np.append(expected[big], expected[~big].sum())
    seen, want = seen[want > 0], want[want > 0]
    statistic = ((seen - want) ** 2 / want).sum()
    freedom = len(want) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def expected_probs(
    scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The target distribution by brute force, in float64, in the documented order."""
    scaled = (scores.double() / temperature).numpy()
    order = np.argsort(-scaled, kind="stable")
    keep = order[:top_k] if top_k else order
    probs = np.exp(scaled[keep] - scaled[keep].max())
    probs /= probs.sum()
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(probs), top_p) + 1)
        keep, probs = keep[:count], probs[:count]
    if min_p:
        big = probs >= min_p * probs.max()
        keep, probs = keep[big], probs[big]
    out = np.zeros(len(scaled))
    out[keep] = probs / probs.sum()
    return out


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_sampled_frequencies_match_the_target_distribution(fields: dict[str, float]) -> None:
    scores = logits() / 2
    draws = 8_000
    chooser = sampler(seed=11, **fields)
    counts = np.bincount([chooser.choose(scores, p) for p in range(draws)], minlength=VOCAB)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
    probs = expected_probs(scores, **full)  # type: ignore[arg-type]
    assert counts[probs == 0].sum() == 0
    assert abs(chi_square(counts, probs)) < 5


@pytest.mark.parametrize("drafts", [0, 3])
def test_sampling_through_the_engine_matches_the_target_distribution(
    nano: TorchEngine, drafts: int
) -> None:
    """Second sampled token of a turn over many seeds: with drafts it comes out of a verify."""
    ids = tokens(64, nano.limits.vocab_size, seed=4)
    nano.reset()
    nano.extend(ids)
    start = nano.snapshot()
    top = int(nano._model.logits(nano._state.hidden[:1])[0].argmax())
    nano.extend(np.array([top], dtype=np.int32))
    scores = nano._model.logits(nano._state.hidden[:1])[0]
    probs = expected_probs(scores, HEAT, KEPT, 1.0, 0.0)
    counts = np.zeros(len(probs))
    for seed in range(600):
        nano.restore(start)
        sampling = Sampling(temperature=HEAT, top_k=KEPT, seed=seed, drafts=drafts)
        nano.begin(sampling, ids, np.array([], dtype=np.int32))
        nano._decode.pending = top  # every seed continues the same first token
        counts[nano.step().tokens[0]] += 1
    assert counts[probs == 0].sum() == 0
    assert abs(chi_square(counts, probs)) < 5


def test_noise_differs_by_seed_position_and_token_and_is_standard_gumbel() -> None:
    ids = torch.arange(40_000)
    noise = gumbel(ids, 17, 123)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.03
    assert abs(noise.std().item() - math.pi / math.sqrt(6)) < 0.03
    assert len(noise.unique()) > 39_900
    for other in (gumbel(ids, 18, 123), gumbel(ids, 17, 124), gumbel(ids, 17 + 2**33, 123)):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1].item()) < 0.03
    assert torch.equal(gumbel(ids[[5, 900, 3]], 17, 123), noise[[5, 900, 3]])


def test_philox_gives_the_published_known_answers() -> None:
    """Vectors of the Random123 distribution for philox4x32-10."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones << 32) | ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x299F31D0 << 32) | 0xA4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for (c0, *rest), seed, expected in cases:
        words = philox((torch.tensor([c0]), *rest), seed)
        assert tuple(int(word) for word in words) == expected


def kept_by_definition(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """One id after another, each against the strictly larger ones, in float64."""
    worth = scores.double().tolist()
    ids = [i for i in range(len(worth)) if not top_k or sum(w > worth[i] for w in worth) < top_k]
    mass = {i: math.exp(worth[i] - max(worth)) for i in ids}
    total = sum(mass.values())
    ids = [
        i
        for i in ids
        if top_p == 1 or sum(mass[j] for j in ids if worth[j] > worth[i]) < top_p * total - 1e-12
    ]
    floor = scores.max() + (torch.log(torch.tensor(min_p)) if min_p else -math.inf)
    return {i for i in ids if scores[i] >= floor}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
    grain=st.sampled_from([0.0, 0.5, 2.0]),
    forbidden=st.integers(0, VOCAB - 1),
)
def test_filters_keep_exactly_what_their_definition_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, grain: float, forbidden: int
) -> None:
    """Equal scores (a coarse grain makes many) are kept or dropped together; an id that a mask
    forbids may be kept but has no mass."""
    scores = logits(seed)
    if grain:
        scores = (scores / grain).round() * grain
    scores[
        torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:forbidden]
    ] = -torch.inf
    values, ids = kept(scores, top_k, top_p, min_p)
    assert torch.equal(ids, ids.sort().values)
    assert torch.equal(values, scores[ids])
    allowed = set(ids[values > -torch.inf].tolist())
    wanted = {i for i in kept_by_definition(scores, top_k, top_p, min_p) if scores[i] > -torch.inf}
    if allowed != wanted:  # a mass that ties with top_p but for rounding
        border = [float(scores[i]) for i in allowed ^ wanted]
        assert min(border) == max(border)
        floor = kept_by_definition(scores, top_k, 1.0, 0.0)
        mass = {i: math.exp(float(scores[i] - scores.max())) for i in floor}
        larger = sum(m for i, m in mass.items() if scores[i] > border[0])
        assert larger == pytest.approx(top_p * sum(mass.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("top_k", "top_p", "wanted"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3, 4]),
        (4, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.5, [1, 3, 4]),
        (0, 0.9, [0, 1, 2, 3, 4]),
        (2, 0.3, [1]),
    ],
)
def test_equal_scores_are_kept_or_dropped_together(
    top_k: int, top_p: float, wanted: list[int]
) -> None:
    """Masses 1, 4, 1, 3, 3: a sort would keep one of the two threes, whichever it put first."""
    scores = torch.log(torch.tensor([1.0, 4.0, 1.0, 3.0, 3.0]))
    assert kept(scores, top_k, top_p, 0.0)[1].tolist() == wanted


def test_penalties_and_bias_follow_their_definitions() -> None:
    scores = logits(3)
    chooser = sampler(
        context=np.array([1, 2], dtype=np.int32),
        output=[2, 4, 4],
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((7, -5.0), (4, 1.0)),
    )
    expected = scores.clone()
    for token in (1, 2, 4):
        expected[token] = scores[token] / 1.5 if scores[token] > 0 else scores[token] * 1.5
    expected[2] -= 0.2 + 0.3
    expected[4] -= 2 * 0.2 + 0.3
    expected[7] -= 5.0
    expected[4] += 1.0
    assert torch.allclose(chooser._penalised(scores), expected, atol=1e-6)


def test_penalties_count_accepted_drafts_so_that_k_changes_nothing(nano: TorchEngine) -> None:
    ids = tokens(100, nano.limits.vocab_size, seed=6)
    outputs = []
    for drafts in (0, 3):
        nano.reset()
        nano.extend(ids)
        nano.begin(
            Sampling(drafts=drafts, frequency_penalty=0.7, repetition_penalty=1.2, top_logprobs=2),
            ids,
        )
        out: list[int] = []
        logprobs = []
        while len(out) < 60:
            chunk = nano.step()
            assert len(chunk.logprobs) == len(chunk.tokens)
            out += chunk.tokens
            logprobs += chunk.logprobs
        outputs.append((out[:60], logprobs[:60]))
    assert outputs[0] == outputs[1]


def test_logprobs_are_those_of_the_full_distribution(nano: TorchEngine) -> None:
    ids = tokens(50, nano.limits.vocab_size, seed=7)
    nano.reset()
    nano.extend(ids)
    expected = torch.log_softmax(nano._model.logits(nano._state.hidden[:1])[0], -1)
    nano.begin(Sampling(temperature=1.0, seed=3, top_logprobs=20), ids)
    chunk = nano.step()
    (entry,) = chunk.logprobs
    assert entry.token == chunk.tokens[0]
    assert entry.logprob == pytest.approx(expected[entry.token].item(), abs=1e-6)
    values, best = expected.topk(20)
    assert [token for token, _ in entry.top] == best.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_an_end_token_ends_the_chunk_and_is_not_absorbed(nano: TorchEngine) -> None:
    ids = tokens(100, nano.limits.vocab_size, seed=6)
    nano.reset()
    nano.extend(ids)
    start = nano.snapshot()
    nano.begin(Sampling(drafts=4), ids)
    free: list[int] = []
    while len(free) < 30:
        free += nano.step().tokens
    for drafts in (0, 4):
        for end in set(free[:20]):
            first = free.index(end)
            nano.restore(start)
            nano.begin(Sampling(drafts=drafts, end_tokens=(end,)), ids)
            out: list[int] = []
            stop = None
            while stop is None:
                chunk = nano.step()
                out += chunk.tokens
                stop = chunk.stop
            assert stop == end
            assert out == free[: first + 1]
            assert nano.position == len(ids) + first
