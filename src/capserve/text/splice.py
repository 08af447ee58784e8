"""How far does a journal's own rendering agree with the new one, hidden control tokens apart?

A template may show an assistant's turn with an empty think block while it is the newest, and
without it later. Those tokens say nothing, so the journal keeps what it has (the continuation
contract); any other difference is a real one.
"""

from __future__ import annotations

from dataclasses import dataclass

from capserve.text.markup import EMPTY_THINK


@dataclass(frozen=True, slots=True)
class Agreement:
    """`known[:known_chars]` and `fresh[:fresh_chars]` say the same."""

    known_chars: int
    fresh_chars: int
    complete: bool
    """All of `known` was covered."""


def agree(known: str, fresh: str, header: str) -> Agreement:
    """Walk both texts as far as they agree, modulo empty think blocks right after `header`."""
    i = j = 0
    passed = -1  # where the last empty block was stepped over: each header gets one try
    while True:
        n = common_prefix(known, i, fresh, j)
        i, j = i + n, j + n
        if i == len(known):
            return Agreement(i, j, complete=True)
        # The texts may agree on a few characters of the block itself: "<t" starts a call, too.
        floor = max(i - len(EMPTY_THINK) - len(header), 0)
        at = known.rfind(header, floor, i) if header else -1
        body = at + len(header)
        back = i - body
        if at < 0 or body <= passed:
            return Agreement(i, j, complete=False)
        passed = body
        in_known = known.startswith(EMPTY_THINK, body)
        if in_known == fresh.startswith(EMPTY_THINK, j - back):
            return Agreement(i, j, complete=False)
        i, j = body, j - back
        if in_known:
            i += len(EMPTY_THINK)
        else:
            j += len(EMPTY_THINK)


def common_prefix(a: str, i: int, b: str, j: int) -> int:
    """Length of the longest common prefix of `a[i:]` and `b[j:]`.

    Slices of doubling size, then halves: every comparison is a memcmp, and the sum of all slices is
    linear in the answer.
    """
    limit = min(len(a) - i, len(b) - j)
    low, size = 0, 64
    while low < limit:
        end = min(low + size, limit)
        if a[i + low : i + end] != b[j + low : j + end]:
            break
        low, size = end, size * 2
    else:
        return limit
    high = end  # a difference lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle
    return low
