"""How is a reply kept from thinking for longer than it may?

`ThinkingBudget` counts a reply's reasoning tokens as its reader does. When the budget is about to
run out, nothing may follow but what closes the think block, as the family's template writes it;
behind it the answer is free again, or its grammar's. What is allowed depends on the reply's own
tokens alone, so drafts, parks and restores change nothing.

The closing mark counts: a reply has at most as many reasoning tokens as its budget, unless that is
smaller than the mark. A call that was begun inside the block is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from capserve.text.channels import ChannelSplitter
from capserve.text.detokenize import Detokenizer
from capserve.text.markup import THINK_CLOSE, THINK_OPEN
from capserve.text.output import OutputSpec
from capserve.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]

_KEPT_PLACES = 64
"""Places that a roll-back finds again at once: more than any step drafts. Beyond them the reply is
followed anew."""

_WORD_BITS = 32
_MOST_LACKING = 3
"""Bytes that half a character of UTF-8 may lack."""


class Rule(Protocol):
    """What else a reply has to keep to, such as `grammar.Matcher`."""

    def restart(self) -> None: ...
    def mask(self) -> Mask | None: ...
    def advance(self, token: int) -> None: ...
    def rollback(self, tokens: int) -> None: ...


@dataclass(frozen=True)
class ThinkingBudget:
    """The reasoning of one reply, in tokens."""

    tokenizer: Tokenizer
    spec: OutputSpec
    """How the reply is read: this decides what is reasoning."""
    most_tokens: int
    """0 or more."""

    def __post_init__(self) -> None:
        _ = self.tokenizer.lacking  # counted once, here: not on the thread that follows the reply

    def follow(self, rule: Rule | None) -> BudgetRule:
        """The budget at the start of a reply that has to keep to `rule` as well."""
        return BudgetRule(self, rule)


class BudgetRule:
    """Follows one reply. One thread uses it."""

    def __init__(self, budget: ThinkingBudget, rule: Rule | None) -> None:
        tokenizer, spec = budget.tokenizer, budget.spec
        self._rule = rule
        self._tokenizer = tokenizer
        self._closings = {
            at_line_start: tuple(tokenizer.encode(f"{newline}{THINK_CLOSE}\n\n").tolist())
            for at_line_start, newline in ((False, "\n"), (True, ""))
        }
        mark = tokenizer.encode(f"\n{THINK_CLOSE}")
        self._free_tokens = max(0, budget.most_tokens - len(mark))
        """Reasoning tokens after which the closing begins."""
        self._start = _Place(
            ChannelSplitter(
                starts_in_reasoning=spec.starts_in_reasoning,
                calls=bool(spec.tools),
                plain=spec.plain,
            ),
            Detokenizer(tokenizer),
        )
        self._places = [self._start]
        """The last ones, up to where the reply is; the newest stays once no reasoning follows."""
        self._tokens: list[int] = []
        """Those that led there."""
        self._after = 0
        """Tokens behind the last place."""

    def restart(self) -> None:
        """Back to the start of the reply."""
        if self._rule is not None:
            self._rule.restart()
        self._places, self._tokens, self._after = [self._start], [], 0

    def mask(self) -> Mask | None:
        """What may come next; never empty. None allows everything."""
        other = None if self._rule is None else self._rule.mask()
        own = self._own_mask(self._places[-1])
        if own is None or other is None:
            return other if own is None else own
        both = own & other
        # The form stands above the budget: half a mark or half a character is written to its end.
        return both if both.any() else other

    def advance(self, token: int) -> None:
        """Go on by one token, which the mask allowed."""
        if self._rule is not None:
            self._rule.advance(token)
        if self._places[-1].is_last:
            self._after += 1
            return
        self._tokens.append(token)
        self._places.append(self._behind(self._places[-1], token))
        if len(self._places) > _KEPT_PLACES:
            del self._places[0]

    def rollback(self, tokens: int) -> None:
        """Take the last `tokens` back."""
        if self._rule is not None:
            self._rule.rollback(tokens)
        behind = min(tokens, self._after)
        self._after -= behind
        back = tokens - behind
        if not back:
            return
        del self._tokens[-back:]
        if back < len(self._places):
            del self._places[-back:]
            return
        self._places = [self._start]
        for token in self._tokens:
            self._places = [self._behind(self._places[-1], token)]

    def _behind(self, place: _Place, token: int) -> _Place:
        due = self._due(place)
        splitter, text = place.splitter.copy(), place.text.copy()
        counts = splitter.in_reasoning
        said = text.feed((token,))
        splitter.feed(said)
        return _Place(
            splitter,
            text,
            place.reasoning_tokens + counts,
            # What closes the block goes on to its end, once it is begun.
            due[1:] if due[:1] == (token,) else (),
            said.endswith("\n") if said else place.at_line_start,
        )

    def _due(self, place: _Place) -> Sequence[int]:
        """The tokens that have to come next."""
        if place.closing:
            return place.closing
        if place.splitter.in_reasoning and place.reasoning_tokens >= self._free_tokens:
            return self._closings[place.at_line_start]
        return ()

    def _own_mask(self, place: _Place) -> Mask | None:
        if due := self._due(place):
            return self._only(due[0])
        if place.is_last:
            return None
        left = self._free_tokens - place.reasoning_tokens
        if place.splitter.in_reasoning:
            # A character must be whole by then.
            return self._completing(place.text.lacking, left - 1) if left <= _MOST_LACKING else None
        mark = self._tokenizer.specials.get(THINK_OPEN)
        used_up = place.splitter.before_content and left <= 0
        return ~self._only(mark) if used_up and mark is not None else None

    def _only(self, token: int) -> Mask:
        words = np.zeros(-(-self._tokenizer.vocab_size // _WORD_BITS), dtype=np.uint32)
        words[token // _WORD_BITS] = 1 << token % _WORD_BITS
        return words.view(np.int32)

    def _completing(self, lacking: int, most: int) -> Mask:
        """Tokens behind which the last character lacks `most` bytes at the most, when now it lacks
        `lacking`."""
        behind = self._tokenizer.lacking
        # Below 0: so many bytes of a character that was begun before, and nothing else.
        allowed = np.where(behind < 0, np.maximum(lacking + behind, 0), behind) <= most
        allowed = np.concatenate([allowed, np.zeros(-len(allowed) % _WORD_BITS, dtype=bool)])
        return np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a reply is. Its machines are copied before they go on."""

    splitter: ChannelSplitter
    text: Detokenizer
    reasoning_tokens: int = 0
    closing: Sequence[int] = ()
    """What is left of the tokens that close the block, once they are begun."""
    at_line_start: bool = False
    """The last character that was written is a line break."""

    @property
    def is_last(self) -> bool:
        """No reasoning can follow."""
        return not self.closing and not self.splitter.may_reason
