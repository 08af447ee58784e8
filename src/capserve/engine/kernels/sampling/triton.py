"""How are tokens chosen and accepted on a card, in three launches?

`_blocks` reads every row once, many programs a row: each leaves its best id, or what the filters
start from. `_rows` has one program a row. For greedy and plain sampled turns it takes the best of
the blocks. For filtered turns it works on few ids: the k-th largest maximum of small tiles of the
row is a lower bound of the k-th largest score, and only tiles whose maximum reaches it hold ids
that can be kept. Those ids are copied together and the thresholds found among them, by counts and
by masses in fixed point, so that the order in which they lie does not matter. Top-p without top-k
guesses how many ids it needs, and the known sum of the row tells whether they were enough. What
does not fit is done by bisection over the whole row, slowly. `_accept` is one warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from capserve.engine import cursor as cursor_words
from capserve.engine.cursor import Cursor
from capserve.engine.kernels import launch
from capserve.engine.kernels.philox.triton import gumbel, gumbel_range
from capserve.engine.kernels.sampling import buffers as at
from capserve.engine.kernels.sampling.buffers import MAX_ENDS, MAX_ROWS, SamplingBuffers

_SAMPLED = tl.constexpr(at.SAMPLED)
_FILTERED = tl.constexpr(at.FILTERED)
_NUCLEUS = tl.constexpr(at.NUCLEUS)
_PENALISED = tl.constexpr(at.PENALISED)
_BIASED = tl.constexpr(at.BIASED)
_MASKED = tl.constexpr(at.MASKED)
_KEPT = tl.constexpr(at.KEPT)
_FLAGS = tl.constexpr(at.FLAGS)
_TOP_K = tl.constexpr(at.TOP_K)
_TEMPERATURE = tl.constexpr(at.TEMPERATURE)
_TOP_P = tl.constexpr(at.TOP_P)
_FLOOR = tl.constexpr(at.FLOOR)
_REPETITION = tl.constexpr(at.REPETITION)
_PRESENCE = tl.constexpr(at.PRESENCE)
_FREQUENCY = tl.constexpr(at.FREQUENCY)
_SEED = tl.constexpr(at.SEED)
_ENDS = tl.constexpr(at.ENDS)
_NOTHING = tl.constexpr(float("-inf"))
_NO_ID = tl.constexpr(2**31 - 1)
_ONE = tl.constexpr(float(2**40))
"""Fixed-point 1 of a mass: an int64 holds the sum of 2^22 of them, and a 2^-40th of the largest
score's mass is far below what float32 scores can tell."""
_VIEWS = ["drafts", "start", "chosen"]
"""Elements of larger tensors: whether one starts at 16 bytes makes no other kernel."""


@dataclass(frozen=True, slots=True)
class Config:
    block: int = 2048
    """Ids of one program of `_blocks`."""
    warps: int = 4
    tile: int = 256
    """Ids that share one maximum; divides `block`."""
    gather: int = 8
    """Tiles that `_rows` reads at a time."""
    row_warps: int = 8
    few: int = 128
    """Up to so many ids the thresholds come from comparing all pairs."""
    most: int = 2048
    """Ids that can be copied together; what needs more goes the slow way."""
    guess: int = 64
    """Tile maxima that top-p without top-k starts with; eight times as many in a second try."""


DEFAULT = Config()


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernels of `choose` hand to each other; static, of one engine."""

    config: Config
    best: Tensor
    """[MAX_ROWS, blocks] f32: each block's largest score, after temperature and noise if any."""
    best_id: Tensor
    """[MAX_ROWS, blocks] int32."""
    mass: Tensor
    """[MAX_ROWS, blocks] f32: sum of exp(t - the block's largest t), for NUCLEUS."""
    tile_max: Tensor
    """[MAX_ROWS, tiles] f32."""
    tile_list: Tensor
    """[MAX_ROWS, tiles] int32."""
    near: Tensor
    """[MAX_ROWS, config.most] f32: scores that may be kept."""
    near_id: Tensor
    """[MAX_ROWS, config.most] int32."""

    @property
    def nbytes(self) -> int:
        parts = self.best, self.best_id, self.mass, self.tile_max, self.tile_list
        return sum(part.nbytes for part in (*parts, self.near, self.near_id))


def scratch(vocab: int, device: torch.device, config: Config = DEFAULT) -> Scratch:
    """About 240 kB for 248,000 ids."""
    assert config.block % config.tile == 0

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(MAX_ROWS, width, dtype=dtype, device=device)

    blocks, tiles = triton.cdiv(vocab, config.block), triton.cdiv(vocab, config.tile)
    return Scratch(
        config,
        best=empty(blocks, torch.float32),
        best_id=empty(blocks, torch.int32),
        mass=empty(blocks, torch.float32),
        tile_max=empty(tiles, torch.float32),
        tile_list=empty(tiles, torch.int32),
        near=empty(config.most, torch.float32),
        near_id=empty(config.most, torch.int32),
    )


@triton.jit
def _float(values, place: tl.constexpr):
    return tl.load(values + place).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits, values, counts, seen, bias, mask, drafts, before, vocab, ids, live):
    """Penalised, biased, masked scores of `ids` (any shape) in one row; -inf where not live and
    from `vocab` on. What is live may reach beyond it, to where loads of 16 ids end."""
    flags = tl.load(values + _FLAGS)
    s = tl.load(logits + ids, mask=live, other=_NOTHING)
    s = tl.where(ids < vocab, s, _NOTHING)
    if (flags & _PENALISED) != 0:
        repetition = _float(values, _REPETITION)
        count = tl.load(counts + ids, mask=live, other=0)
        known = tl.load(seen + ids, mask=live, other=0).to(tl.int32)
        i = tl.full((), 0, tl.int32)
        while i < before:
            same = (ids == tl.load(drafts + i)).to(tl.int32)
            count += same
            known |= same
            i += 1
        scaled = tl.where(s > 0, tl.div_rn(s, repetition), s * repetition)
        s = tl.where(known != 0, scaled, s)
        s = s - _float(values, _FREQUENCY) * count.to(tl.float32)
        s = tl.where(count > 0, s - _float(values, _PRESENCE), s)
    if (flags & _BIASED) != 0:
        s += tl.load(bias + ids, mask=live, other=0.0)
    if (flags & _MASKED) != 0:
        word = tl.load(mask + (ids >> 5), mask=live, other=0)
        s = tl.where(((word >> (ids & 31)) & 1) != 0, s, _NOTHING)
    return s


@triton.jit(do_not_specialize=["offset", "place"], do_not_specialize_on_alignment=_VIEWS)
def _blocks(
    logits,
    logits_stride,
    scores,
    scores_stride,
    values,
    counts,
    seen,
    bias,
    mask,
    mask_stride,
    drafts,
    start,
    offset,
    place,
    vocab,
    width,
    best,
    best_id,
    mass,
    blocks,
    tile_max,
    tiles,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    row = tl.program_id(1)
    flags = tl.load(values + _FLAGS)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    own_mask = mask + (place + row) * mask_stride
    s = _scores(
        logits + row * logits_stride,
        values, counts, seen, bias, own_mask, drafts, place + row, vocab, ids, ids < width,
    )  # fmt: skip
    if (flags & _KEPT) != 0:
        tl.store(scores + row * scores_stride + ids, s, mask=ids < vocab)
    if (flags & _SAMPLED) != 0:
        s = tl.div_rn(s, _float(values, _TEMPERATURE))
        if (flags & _FILTERED) != 0:
            tile = block * (BLOCK // TILE) + tl.arange(0, BLOCK // TILE)
            largest = tl.max(tl.reshape(s, [BLOCK // TILE, TILE]), 1)
            tl.store(tile_max + row * tiles + tile, largest, mask=tile < tiles)
            if (flags & _NUCLEUS) != 0:
                below = tl.where(s > _NOTHING, s - tl.max(s, 0), _NOTHING)
                tl.store(mass + row * blocks + block, tl.sum(tl.exp(below), 0))
        else:
            low = tl.load(values + _SEED).to(tl.uint32, bitcast=True)
            high = tl.load(values + _SEED + 1).to(tl.uint32, bitcast=True)
            position = tl.load(start) + offset + row
            s += gumbel_range(block * BLOCK, position, low, high, BLOCK)
    top, index = tl.max(s, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * blocks + block, top)
    tl.store(best_id + row * blocks + block, block * BLOCK + index)


@triton.jit
def _lowest_best(score, ids):
    """The lowest of `ids` (1-D) at the largest score."""
    return tl.min(tl.where(score == tl.max(score, 0), ids, _NO_ID), 0)


@triton.jit
def _mass(t, top):
    """exp(t - top) in fixed point; t may be -inf, top not."""
    return (tl.exp(t - top) * _ONE).to(tl.int64)


@triton.jit
def _goal(top_p, total):
    """The least integer mass that is not below top_p of `total`."""
    return tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _at_least(maxima, want):
    """A bound that at least `want` of maxima [N] reach, near the `want`-th largest; -inf when so
    many are not above it. Any such bound is right: a lower one lets more ids in."""
    high = tl.max(maxima, 0)
    low = tl.min(tl.where(maxima > _NOTHING, maxima, high), 0)
    enough = tl.sum((maxima > _NOTHING).to(tl.int32), 0) >= want
    for _ in range(12):
        middle = low + (high - low) * 0.5
        reached = tl.sum((maxima >= middle).to(tl.int32), 0) >= want
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return tl.where(enough, low, _NOTHING)


@triton.jit
def _key(x):
    """Integers in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_of_few(t, weight, goal):
    """The smallest of t [N] whose strictly larger ones weigh less than `goal`, by all pairs."""
    larger = tl.sum(tl.where(t[None, :] > t[:, None], weight[None, :], 0), 1)
    return tl.min(tl.where(larger < goal, t, float("inf")), 0)


@triton.jit
def _least(t, weight, goal, top):
    """The same by bisection: a bound between the largest number dropped and the smallest kept."""
    low = _key(top + _NOTHING) - 1
    high = _key(top)
    while high - low > 1:
        middle = (low + high) >> 1
        larger = tl.sum(tl.where(t > _number(middle), weight, 0), 0)
        below = larger < goal
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
    return _number(high)


@triton.jit
def _among(
    near, near_id, found, top, top_k, top_p, floor, goal, position, low, high,
    N: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The choice among `found` <= N ids that hold all that are kept. goal: the mass that top-p
    without top-k asks for."""
    lane = tl.arange(0, N)
    t = tl.load(near + lane, mask=lane < found, other=_NOTHING)
    ids = tl.load(near_id + lane, mask=lane < found, other=0)
    mass = _mass(t, top)
    filter = tl.where(top_k > 0, 0, 1)
    filters = tl.where(top_p < 1.0, 2, 1)
    while filter < filters:  # 0 top-k, 1 top-p: one loop, as the code in it is long
        weight = tl.where(filter == 0, 1, tl.where(t > _NOTHING, mass, 0))
        if filter == 0:
            goal = top_k.to(tl.int64)
        elif top_k > 0:
            goal = _goal(top_p, tl.sum(weight, 0))
        if FEW:
            bound = _least_of_few(t, weight, goal)
        else:
            bound = _least(t, weight, goal, top)
        t = tl.where(t >= bound, t, _NOTHING)
        filter += 1
    t = tl.where(t >= floor, t, _NOTHING)
    return _lowest_best(t + gumbel(ids, position, low, high), ids)


@triton.jit
def _tile_scores(
    logits, values, counts, seen, bias, mask, drafts, before, vocab, width, tile, real,
    TILE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Scores over temperature and ids, both [G * TILE], of tiles `tile` [G], those that are
    `real` [G]."""
    ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    live = real[:, None] & (ids < width)
    s = _scores(logits, values, counts, seen, bias, mask, drafts, before, vocab, ids, live)
    t = tl.div_rn(s, _float(values, _TEMPERATURE))
    return tl.reshape(t, [G * TILE]), tl.reshape(ids, [G * TILE])


@triton.jit
def _in_whole_row(
    logits, values, counts, seen, bias, mask, drafts, before, vocab, width, tiles,
    top, top_k, top_p, floor, goal, position, key_low, key_high,
    TILE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The choice over the whole row: a pass for each of 32 steps of a bisection."""
    lowest = _key(top + _NOTHING) - 1
    low, high = lowest, _key(top)
    least = top + _NOTHING
    # What a pass is for: 0 the bound of top-k, 1 the mass that it leaves, 2 the bound of top-p,
    # 3 the choice.
    aim = tl.where(top_k > 0, 0, tl.where(top_p < 1.0, 2, 3))
    goal = tl.where(top_k > 0, top_k.to(tl.int64), goal)
    best = tl.full([G * TILE], _NOTHING, tl.float32)
    best_id = tl.full([G * TILE], _NO_ID, tl.int32)
    while aim < 4:
        middle = (low + high) >> 1
        above = tl.where(aim == 1, top + _NOTHING, _number(middle))
        least = tl.where(aim == 3, tl.maximum(least, floor), least)
        weights = tl.zeros([G * TILE], tl.int64)
        first = tl.full((), 0, tl.int32)
        while first < tiles:
            tile = first + tl.arange(0, G)
            t, ids = _tile_scores(
                logits, values, counts, seen, bias, mask, drafts, before, vocab, width,
                tile, tile < tiles, TILE, G,
            )  # fmt: skip
            if aim == 3:
                noisy = tl.where(t >= least, t + gumbel(ids, position, key_low, key_high), _NOTHING)
                better = noisy > best  # ids ascend: of equal ones the first stays
                best = tl.where(better, noisy, best)
                best_id = tl.where(better, ids, best_id)
            else:
                weight = tl.where(aim == 0, 1, _mass(t, top))
                weights += tl.where((t > above) & (t >= least), weight, 0)
            first += G
        total = tl.sum(weights, 0)
        if aim == 1:
            goal = _goal(top_p, total)
            aim += 1
        elif aim == 3:
            aim += 1
        else:
            below = total < goal
            high = tl.where(below, middle, high)
            low = tl.where(below, low, middle)
            if high - low <= 1:
                least = _number(high)
                aim = tl.where((aim == 0) & (top_p < 1.0), 1, 3)
                low = lowest
                high = _key(top)
    return _lowest_best(best, best_id)


@triton.jit(do_not_specialize=["offset", "place"], do_not_specialize_on_alignment=_VIEWS)
def _rows(
    logits,
    logits_stride,
    values,
    counts,
    seen,
    bias,
    mask,
    mask_stride,
    drafts,
    start,
    offset,
    place,
    vocab,
    width,
    best,
    best_id,
    mass,
    blocks,
    tile_max,
    tile_list,
    tiles,
    near,
    near_id,
    chosen,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    G: tl.constexpr,
    FEW: tl.constexpr,
    MOST: tl.constexpr,
    GUESS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    flags = tl.load(values + _FLAGS)
    lane = tl.arange(0, BLOCKS)
    block_best = tl.load(best + row * blocks + lane, mask=lane < blocks, other=_NOTHING)
    if (flags & _FILTERED) == 0:
        ids = tl.load(best_id + row * blocks + lane, mask=lane < blocks, other=_NO_ID)
        token = _lowest_best(block_best, ids)
    else:
        logits += row * logits_stride
        mask += (place + row) * mask_stride
        tile_list += row * tiles
        near += row * MOST
        near_id += row * MOST
        before = place + row
        position = tl.load(start) + offset + row
        key_low = tl.load(values + _SEED).to(tl.uint32, bitcast=True)
        key_high = tl.load(values + _SEED + 1).to(tl.uint32, bitcast=True)
        top_k = tl.load(values + _TOP_K)
        top_p = _float(values, _TOP_P)
        nucleus = (flags & _NUCLEUS) != 0
        top = tl.max(block_best, 0)
        floor = top + _float(values, _FLOOR)
        goal = tl.full((), 0, tl.int64)
        if nucleus:
            part = tl.load(mass + row * blocks + lane, mask=lane < blocks, other=0.0)
            total = tl.sum((part * tl.exp(block_best - top)).to(tl.float64), 0)
            goal = tl.ceil(top_p.to(tl.float64) * (total * _ONE)).to(tl.int64)

        tile = tl.arange(0, TILES)
        maxima = tl.load(tile_max + row * tiles + tile, mask=tile < tiles, other=_NOTHING)
        want = tl.where(nucleus, GUESS, top_k)
        found = tl.full((), 0, tl.int32)
        state = tl.full((), 0, tl.int32)  # 0 look, 1 all that matter are found, 2 too many
        while state == 0:
            bound = _at_least(maxima, want)
            if nucleus:
                bound = tl.maximum(bound, floor)
            if top_k + want == 0:
                bound = floor
            here = (maxima >= bound) & (maxima > _NOTHING)
            listing = here.to(tl.int32)
            tl.store(tile_list + tl.cumsum(listing, 0) - 1, tile, mask=here)
            listed = tl.sum(listing, 0)
            tl.debug_barrier()
            found = tl.full((), 0, tl.int32)
            held = tl.full((), 0, tl.int64)
            first = tl.full((), 0, tl.int32)
            while (first < listed) & (found <= MOST):
                slot = first + tl.arange(0, G)
                some = tl.load(tile_list + slot, mask=slot < listed, other=0)
                t, ids = _tile_scores(
                    logits, values, counts, seen, bias, mask, drafts, before, vocab, width,
                    some, slot < listed, TILE, G,
                )  # fmt: skip
                inside = (t >= bound) & (t > _NOTHING)
                count = inside.to(tl.int32)
                to = found + tl.cumsum(count, 0) - 1
                tl.store(near + to, t, mask=inside & (to < MOST))
                tl.store(near_id + to, ids, mask=inside & (to < MOST))
                found += tl.sum(count, 0)
                if nucleus:
                    held += tl.sum(tl.where(inside, _mass(t, top), 0), 0)
                first += G
            tl.debug_barrier()
            whole = (held >= goal) | (bound <= floor)
            if found > MOST:
                state = tl.full((), 2, tl.int32)
            elif (not nucleus) | whole:
                state = tl.full((), 1, tl.int32)
            elif want >= 8 * GUESS:
                state = tl.full((), 2, tl.int32)
            want *= 8
        if state == 1:
            if found <= FEW:
                token = _among(
                    near, near_id, found, top, top_k, top_p, floor, goal, position,
                    key_low, key_high, FEW, True,
                )  # fmt: skip
            else:
                token = _among(
                    near, near_id, found, top, top_k, top_p, floor, goal, position,
                    key_low, key_high, MOST, False,
                )  # fmt: skip
        else:
            token = _in_whole_row(
                logits, values, counts, seen, bias, mask, drafts, before, vocab, width, tiles,
                top, top_k, top_p, floor, goal, position, key_low, key_high, TILE, G,
            )  # fmt: skip
    # A row of NaN has no best id. The next step looks its token up in the embedding table.
    tl.store(chosen + row, tl.minimum(token, vocab - 1))


_POSITION = tl.constexpr(cursor_words.POSITION)
_COUNT = tl.constexpr(cursor_words.COUNT)
_ACCEPTED = tl.constexpr(cursor_words.ACCEPTED)
_STOP = tl.constexpr(cursor_words.STOP)
MODES = {"verify": 0, "append": 1, "first": 2}


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_VIEWS)
def _accept(
    chosen,
    drafts,
    values,
    counts,
    seen,
    words,
    decided,
    result,
    rows,
    MODE: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, 16)
    token = tl.load(chosen + row, mask=row < rows, other=-1)
    draft = tl.load(drafts + row, mask=row < rows - 1, other=-1)
    ends = tl.load(values + _ENDS + tl.arange(0, ENDS))
    is_end = tl.max(((token[:, None] == ends[None, :]) & (token >= 0)[:, None]).to(tl.int32), 1)
    halt = (is_end != 0) | (row >= rows - 1) | (token != draft)
    last = tl.min(tl.where(halt, row, 16), 0)
    count = last + 1
    mine = row < count
    stop = tl.max(tl.where((row == last) & (is_end != 0), token, -1), 0)
    first = tl.full((), 0, tl.int32)
    if MODE == 1:
        first = tl.load(words + _COUNT)
    if MODE != 2:
        position = tl.load(words + _POSITION)
        tl.store(words + _POSITION, position + count)
        tl.store(words + _ACCEPTED, count)
    tl.store(decided + first + row, token, mask=mine)
    tl.store(words + _COUNT, first + count)
    tl.store(words + _STOP, stop)
    tl.store(result + 2 + row, tl.where(mine, token, -1), mask=row < 14)
    tl.store(result, count)
    tl.store(result + 1, stop)
    if (tl.load(values + _FLAGS) & _PENALISED) != 0:
        one = tl.full([16], 1, tl.int32)
        tl.atomic_add(counts + token, one, mask=mine)
        tl.store(seen + token, one.to(tl.int8), mask=mine)


def _options(warps: int) -> dict[str, object]:
    # A product and a sum must round as two operations, as the definition's do.
    options: dict[str, object] = {"num_warps": warps, "enable_fp_fusion": False}
    if launch.PDL:
        options["launch_pdl"] = True
    return options


def choose(
    logits: Tensor,
    settings: SamplingBuffers,
    drafts: Tensor,
    start: Tensor,
    offset: int,
    rows: int,
    chosen: Tensor,
    scores: Tensor,
    scratch: Scratch,
    *,
    place: int = 0,
) -> None:
    """`reference.choose` on the card. Two launches; allocates nothing.

    logits [>= rows, >= vocab] f32, rows contiguous; chosen int32 [>= rows]; scores [>= rows,
    >= vocab] f32, written when the settings ask for log probabilities. For draft i of a chain:
    rows = 1, place = i, chosen = drafts[i:].
    """
    assert rows >= 1
    assert place + rows <= MAX_ROWS
    assert logits.dtype == scores.dtype == torch.float32
    assert logits.stride(-1) == scores.stride(-1) == 1
    assert min(logits.shape[-1], scores.shape[-1]) >= settings.vocab
    config, vocab = scratch.config, settings.vocab
    blocks, tiles = scratch.best.shape[1], scratch.tile_max.shape[1]
    row = (settings.values, settings.counts, settings.seen, settings.bias, settings.mask)
    aligned = triton.cdiv(vocab, 16) * 16
    width = aligned if aligned <= logits.shape[-1] else vocab
    shared = (*row, settings.mask.stride(0), drafts, start, offset, place, vocab, width)
    _blocks[(blocks, rows)](
        logits,
        logits.stride(0),
        scores,
        scores.stride(0),
        *shared,
        scratch.best,
        scratch.best_id,
        scratch.mass,
        blocks,
        scratch.tile_max,
        tiles,
        BLOCK=config.block,
        TILE=config.tile,
        PDL=launch.PDL,
        **_options(config.warps),
    )
    _rows[(rows,)](
        logits,
        logits.stride(0),
        *shared,
        scratch.best,
        scratch.best_id,
        scratch.mass,
        blocks,
        scratch.tile_max,
        scratch.tile_list,
        tiles,
        scratch.near,
        scratch.near_id,
        chosen,
        BLOCKS=triton.next_power_of_2(blocks),
        TILES=triton.next_power_of_2(tiles),
        TILE=config.tile,
        G=config.gather,
        FEW=config.few,
        MOST=config.most,
        GUESS=config.guess,
        PDL=launch.PDL,
        **_options(config.row_warps),
    )


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
    """`reference.accept` on the card: one launch of one warp; allocates nothing.

    chosen int32 [>= rows]; drafts int32 [8]; decided int32 [9]; result int32 [16].
    """
    assert 1 <= rows <= MAX_ROWS
    assert mode == "verify" or rows == 1
    _accept[(1,)](
        chosen,
        drafts,
        settings.values,
        settings.counts,
        settings.seen,
        cursor.words,
        decided,
        result,
        rows,
        MODE=MODES[mode],
        ENDS=MAX_ENDS,
        PDL=launch.PDL,
        **_options(1),
    )
