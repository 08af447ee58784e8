"""What does it cost to choose the tokens of a step, and to accept its drafts?

Logits are what a head has just written, so they are in the L2 cache, and two input sets stay there;
the case `from memory` reads more sets than the cache holds. Scores have the shape of a language
model's: a few likely ids close together, a long tail. `flat` has thousands of likely ids and goes
the slow way. The peer is torch's own argmax, or the usual top-k, top-p, multinomial chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels import Case, Launch, sets_for
from capserve.engine.cursor import Cursor
from capserve.engine.kernels.sampling import triton as card
from capserve.engine.kernels.sampling.buffers import MAX_ROWS, SamplingBuffers
from capserve.engine.seam import Sampling

VOCAB, COLUMNS = 248_077, 248_320
ROWS = 1, 4, 9
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, seed=1),
    "top-k 20, top-p 0.95": Sampling(temperature=0.6, top_k=20, top_p=0.95, seed=2),
    "top-k 20, penalties": Sampling(
        temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5, seed=3
    ),
    "top-p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=4),
    "min-p 0.05": Sampling(temperature=1.0, min_p=0.05, seed=5),
    "flat top-p 0.99": Sampling(temperature=4.0, top_p=0.99, seed=6),
}
TUNED = "greedy", "top-k 20, top-p 0.95", "top-p 0.95"
CONFIGS = [
    card.DEFAULT,
    *(
        card.Config(block=block, warps=warps, gather=gather, row_warps=row_warps, few=few)
        for block, warps, gather, row_warps, few in (
            (1024, 4, 8, 8, 128),
            (4096, 8, 8, 8, 128),
            (2048, 8, 8, 8, 128),
            (2048, 4, 8, 8, 64),
            (2048, 4, 16, 8, 128),
            (2048, 4, 8, 4, 64),
            (2048, 4, 16, 16, 128),
            (1024, 4, 8, 4, 64),
        )
    ),
]


def model_like(rows: int, device: torch.device) -> Tensor:
    logits = torch.randn(rows, COLUMNS, device=device) * 2.0
    logits[:, 1000:1040] += torch.linspace(12, 2, 40, device=device)
    logits[:, 30_000:230_000:5000] += 6.0
    logits[:, VOCAB:] = 0.0
    return logits


def chosen_by(
    sampling: Sampling, rows: int, sets: int, device: torch.device, config: card.Config | None
) -> Sequence[Launch]:
    settings = SamplingBuffers.make(VOCAB, device)
    settings.load(sampling, np.arange(2000, dtype=np.int32), list(range(500)))
    scratch = card.scratch(VOCAB, device, config or card.DEFAULT)
    words = torch.zeros(3, 16, dtype=torch.int32, device=device)
    drafts, start, chosen = words[0], words[1, :1], words[2]
    scores = torch.empty(MAX_ROWS, VOCAB, device=device)
    return [
        partial(
            card.choose,
            model_like(rows, device),
            settings,
            drafts,
            start,
            1,
            rows,
            chosen,
            scores,
            scratch,
        )
        for _ in range(sets)
    ]


def torch_chain(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits / sampling.temperature
    if sampling.top_k:
        scores, ids = torch.topk(scores, sampling.top_k)
    elif sampling.top_p < 1:
        scores, ids = torch.sort(scores, descending=True)
    else:
        ids = None
    probs = torch.softmax(scores, -1)
    if sampling.top_p < 1:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, 0.0)
    picked = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    return picked if ids is None else ids.gather(-1, picked)


def by_torch(sampling: Sampling, rows: int, device: torch.device) -> Sequence[Launch]:
    return [partial(torch_chain, model_like(rows, device)[:, :VOCAB], sampling) for _ in range(2)]


def accepted(rows: int, device: torch.device) -> Sequence[Launch]:
    settings = SamplingBuffers.make(VOCAB, device)
    settings.load(Sampling(end_tokens=(5, 6)), np.arange(9, dtype=np.int32))
    words = torch.zeros(4, 16, dtype=torch.int32, device=device)
    cursor = Cursor(device)
    return [
        partial(
            card.accept,
            words[0],
            words[1],
            settings,
            cursor,
            words[2],
            words[3],
            rows,
            "verify",
        )
    ] * 2


def cases(device: torch.device) -> Iterable[Case]:
    for name, sampling in SETTINGS.items():
        for rows in ROWS:
            yield Case(
                name=name,
                rows=rows,
                floor_bytes=4 * VOCAB * rows,
                build=partial(chosen_by, sampling, rows, 2, device),
                peer=partial(by_torch, sampling, rows, device),
                configs=CONFIGS if rows == 4 and name in TUNED else (),
                table_key="DEFAULT",
            )
    for rows in ROWS:
        size = 4 * COLUMNS * rows
        yield Case(
            name="greedy, from memory",
            rows=rows,
            floor_bytes=4 * VOCAB * rows,
            build=partial(chosen_by, SETTINGS["greedy"], rows, sets_for(size), device),
        )
    yield Case(
        name="accept",
        rows=4,
        floor_bytes=4 * (4 + 3 + 8 + 9 + 16 + 16),
        build=lambda _: accepted(4, device),
    )
