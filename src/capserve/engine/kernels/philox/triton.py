"""The noise of `reference.py` inside a Triton kernel."""

import triton
import triton.language as tl


@triton.jit
def standard_gumbel(word):
    """-log(-log u), u = (word + 1/2) / 2^32, for uint32 words, in float32.

    The inner logarithm needs its relative error small also where u is near 1, and there the words
    in float32 have lost what tells 1 - u. So above u = 1/2 it is taken of v = 1 - u, which is
    (~word + 1/2) / 2^32: -log(1 - v) = 2 atanh(z), z = v / (2 - v) <= 1/3, as a series whose first
    dropped term is below 2^-26 of the sum. What is left is the rounding of float32: the result is
    within about 1e-6 of the double-precision one, over its whole range of -3.2 to 22.9.
    """
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    z = v / (2.0 - v)
    w = z * z
    series = 1.0 / 17.0 + w * (1.0 / 19.0)
    series = 1.0 / 15.0 + w * series
    series = 1.0 / 13.0 + w * series
    series = 1.0 / 11.0 + w * series
    series = 1.0 / 9.0 + w * series
    series = 1.0 / 7.0 + w * series
    series = 1.0 / 5.0 + w * series
    series = 1.0 / 3.0 + w * series
    near_one = 2.0 * (z + z * w * series)
    return -tl.log(tl.where(word < 0x80000000, -tl.log(u), near_one))


@triton.jit
def gumbel(ids, position, key_low, key_high):
    """Noise of each id (int32, any shape) at `position` (int32, not negative); one Philox block an
    id, of which one word is used: for few ids."""
    block = (ids >> 2).to(tl.uint32)
    zero = block ^ block
    w0, w1, w2, w3 = tl.philox_impl(
        block, zero + position.to(tl.uint32), zero, zero, key_low, key_high
    )
    lane = ids & 3
    low = tl.where(lane == 0, w0, w1)
    high = tl.where(lane == 2, w2, w3)
    return standard_gumbel(tl.where(lane < 2, low, high))


@triton.jit
def gumbel_range(first, position, key_low, key_high, LENGTH: tl.constexpr):
    """Noise [LENGTH] of ids first, first + 1, ...; `first` and LENGTH are multiples of 4."""
    block = (first // 4 + tl.arange(0, LENGTH // 4)).to(tl.uint32)
    zero = block ^ block
    w0, w1, w2, w3 = tl.philox_impl(
        block, zero + position.to(tl.uint32), zero, zero, key_low, key_high
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [LENGTH / 4, 2, 2]: w0 w1, w2 w3
    return standard_gumbel(tl.reshape(words, [LENGTH]))
