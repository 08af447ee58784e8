"""What `choose`, `accept` and the filters mean, in plain torch; runs on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from capserve.engine.cursor import ACCEPTED, COUNT, POSITION, STOP, Cursor
from capserve.engine.kernels.philox.reference import gumbel
from capserve.engine.kernels.sampling import buffers as at
from capserve.engine.kernels.sampling.buffers import MAX_ROWS, SamplingBuffers, log_min_p
from capserve.engine.seam import TokenLogprob


def kept(scores: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """The scores and ids (ascending) of scores [V] f32 that top-k, then top-p, then min-p keep.

    Each filter is a threshold: equal scores are kept or dropped together. At least one is kept.
    Ids at -inf have no mass and are never chosen; whether they are named here is left open.
    """
    if 0 < top_k < len(scores):
        ranked, ids = torch.topk(scores, top_k + 1)
        if ranked[-1] < ranked[-2]:
            ranked, ids = ranked[:-1], ids[:-1]
        else:  # as large as the k-th: there may be more of them
            bound = ranked[-1]
            ids = (scores >= bound if bound > -torch.inf else scores > bound).nonzero().view(-1)
            ranked, order = torch.sort(scores[ids], descending=True)
            ids = ids[order]
    elif top_p < 1.0:
        ranked, ids = torch.sort(scores, descending=True)
    else:
        ranked, ids = scores, torch.arange(len(scores), device=scores.device)
    if top_p < 1.0:
        total = (ranked.double() - ranked[0]).exp().cumsum(-1)
        # In front of the first of equal scores stand the strictly larger ones, and the first of
        # them decides for all.
        count = 1 + int((total[:-1] < top_p * total[-1]).sum())
        count = int((ranked >= ranked[count - 1]).sum())
        ranked, ids = ranked[:count], ids[:count]
    if min_p > 0.0:
        likely = ranked >= ranked.max() + log_min_p(min_p)
        ranked, ids = ranked[likely], ids[likely]
    if top_p == 1.0 and not 0 < top_k < len(scores):
        return ranked, ids
    ids, order = torch.sort(ids)
    return ranked[order], ids


def pick(
    scores: Tensor,
    position: int,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> int:
    """The token at `position` from scores [V] f32 after penalties, bias and mask."""
    if temperature == 0:
        return int(scores.argmax())
    likely, ids = kept(scores / temperature, top_k, top_p, min_p)
    return int(ids[(likely + gumbel(ids, position, seed)).argmax()])


def logprobs(scores: Tensor, chosen: Sequence[int], n: int) -> tuple[TokenLogprob, ...]:
    """For scores [rows, V] f32 (`choose` leaves them): the log probability of each row's choice and
    the n best ids that the row allows. Waits for the device."""
    logs = torch.log_softmax(scores, -1)
    own = logs.gather(-1, torch.tensor(chosen, device=logs.device).unsqueeze(-1)).squeeze(-1)
    values, ids = torch.topk(logs, min(n, logs.shape[-1]))
    entries = zip(chosen, own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token,
            value,
            tuple((i, v) for i, v in zip(best, worth, strict=True) if v > -torch.inf),
        )
        for token, value, best, worth in entries
    )


def processed(logits: Tensor, settings: SamplingBuffers, drafts: Sequence[int], row: int) -> Tensor:
    """logits [V] f32 after penalties, bias and the mask of `row`, behind those drafts."""
    values = settings.values.cpu().numpy()
    floats, flags = values.view(np.float32), int(values[at.FLAGS])
    scores = logits
    if flags & at.PENALISED:
        counts, seen = settings.counts.clone(), settings.seen.bool()
        for draft in drafts:
            counts[draft] += 1
            seen[draft] = True
        penalty = float(floats[at.REPETITION])
        scaled = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(seen, scaled, scores)
        scores = scores - float(floats[at.FREQUENCY]) * counts.float()
        scores = scores - float(floats[at.PRESENCE]) * (counts > 0)
    if flags & at.BIASED:
        scores = scores + settings.bias
    if flags & at.MASKED:
        shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
        bits = (settings.mask[row].unsqueeze(-1) >> shifts) & 1
        scores = scores.masked_fill(bits.view(-1)[: settings.vocab] == 0, -torch.inf)
    return scores


def choose(
    logits: Tensor,
    settings: SamplingBuffers,
    drafts: Tensor,
    start: Tensor,
    offset: int,
    rows: int,
    chosen: Tensor,
    scores: Tensor,
    *,
    place: int = 0,
) -> None:
    """See the package. Row r decides the token at start + offset + r, behind `place` + r drafts and
    under the mask of row `place` + r. `scores` are written when KEPT."""
    values = settings.values.cpu().numpy()
    floats, flags = values.view(np.float32), int(values[at.FLAGS])
    low, high = values[at.SEED : at.SEED + 2].view(np.uint32).tolist()
    least = float(floats[at.FLOOR])
    for row in range(rows):
        before = drafts[: place + row].tolist()
        own = processed(logits[row, : settings.vocab], settings, before, place + row)
        if flags & at.KEPT:
            scores[row, : settings.vocab] = own
        position = int(start) + offset + row
        if not flags & at.SAMPLED:
            chosen[row] = int(own.argmax())
            continue
        scaled = own / float(floats[at.TEMPERATURE])
        likely, ids = kept(scaled, int(values[at.TOP_K]), float(floats[at.TOP_P]), 0.0)
        near = likely >= likely.max() + least
        likely, ids = likely[near], ids[near]
        noise = gumbel(ids, position, high << 32 | low)
        chosen[row] = int(ids[(likely + noise).argmax()])


def accept(
    chosen: Tensor,
    drafts: Tensor,
    settings: SamplingBuffers,
    cursor: Cursor,
    decided: Tensor,
    result: Tensor,
    rows: int,
    mode: str,
) -> None:
    """Which of the chosen tokens are decided, and what follows for the state's bookkeeping.

    `verify`: rows are walked until one decides an end token or another token than its draft. The
    tokens so far go to decided[0..count); as many rows are part of the state: position += count,
    accepted = count. `append`: a step of one row without drafts behind earlier ones: its token goes
    to decided[count], position += 1, accepted = 1, count += 1 (the caller keeps count < 9).
    `first`: a token from the state as it stands, without a forward pass: decided[0], count = 1.
    result = (tokens of this step, stop or -1, the tokens, -1 ...).
    """
    ends = set(settings.ends.tolist()) - {-1}
    walk = chosen[:rows].tolist()
    tokens: list[int] = []
    stop = -1
    for row, token in enumerate(walk):
        tokens.append(token)
        if token in ends:
            stop = token
            break
        if row < rows - 1 and token != int(drafts[row]):
            break
    words = cursor.words
    count = len(tokens)
    first = int(words[COUNT]) if mode == "append" else 0
    decided[first : first + count] = torch.tensor(tokens, dtype=torch.int32)
    words[COUNT] = first + count
    words[STOP] = stop
    if mode != "first":
        words[POSITION] += count
        words[ACCEPTED] = count
    result.fill_(-1)
    result[0], result[1] = count, stop
    result[2 : 2 + count] = torch.tensor(tokens, dtype=torch.int32)
    if int(settings.values[at.FLAGS]) & at.PENALISED:
        for token in tokens:
            settings.counts[token] += 1
            settings.seen[token] = 1


__all__ = ["MAX_ROWS", "accept", "choose", "kept", "logprobs", "pick", "processed"]
