"""Which tokens may come next, so that the reply keeps what the request demands of its form?

`grammar_rules` says what is demanded; `GrammarCompiler` turns it into a `Grammar`, or refuses it in
bounded time; `Grammar.matcher` follows one reply token by token. The grammar is over the reply's
bytes: how they are cut into tokens is the model's business, save where only one text may follow;
there the tokenizer's own cut is demanded, so that the reply re-encodes to itself.

Reasoning is free until `</think>`, or until it makes a call. End tokens are allowed exactly where
the reply may end. Other control tokens are never allowed. A stop string or `max_tokens` may still
cut a reply in the middle: it is valid up to there, and its finish reason says so.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from capserve.errors import InvalidRequestError
from capserve.text.deep_call import DeepCalls, TookTooLongError
from capserve.text.grammar_rules import Constraint, Rules, refused
from capserve.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set when token t may come next."""

MEMO_GRAMMARS = 32
"""Compiled grammars that are kept: an agent has one tool list, its sub-agents a few more."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=500_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""At 50k units of fuel per ms, 20 ms for regular expressions at the start, and at 14k per ms, 36 ms
in a step; about 100 MB for states. With this many symbols, a third of a second."""

_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    r"[^<\x00-\x1F\x7F\\\"]{1,10}",
    r"[^<\x00-\x1F\x7F\\\"]{1,30}",
    r"[^<]{1,30}",
    r"[^<]+",
]
"""Classes of tokens that are allowed or refused together where a text takes them all: inside JSON
strings the first ones, in raw text all of them. Only the rest is looked at token by token."""


class GrammarCompiler:
    """Makes grammars for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
        assert end_tokens, "a reply under a grammar needs an end token"
        self._tokenizer = _for_library(tokenizer, tuple(end_tokens))
        self._words = (tokenizer.vocab_size + 31) // 32
        self._end_tokens = frozenset(end_tokens)
        self._memo: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._calls = DeepCalls()

    def compile(self, constraint: Constraint) -> Grammar | None:
        """The grammar of `constraint`, None when it demands nothing.

        Raises InvalidRequestError naming `response_format` or `tools[i]` for a schema that is
        broken, can't be satisfied, is too large, or says what can't be enforced.
        """
        rules = Rules(constraint, tolerant=False)
        try:
            return self._grammar(rules.build())
        except InvalidRequestError:
            if not rules.has_promised_more:
                raise
        # Nobody called these tools strict: a schema beyond the grammar still gets calls of its
        # function. All of them together, as asking the library for each would take too long.
        return self._grammar(Rules(constraint, tolerant=True).build())

    def _grammar(self, rules: list[tuple[str, str]] | None) -> Grammar | None:
        if rules is None:
            return None
        text = "\n".join(line for line, _ in rules)
        key = blake2b(text.encode("utf-8"), digest_size=16).digest()
        with self._lock:
            matcher = self._memo.get(key)
            if matcher is not None:
                self._memo.move_to_end(key)
        if matcher is None:
            matcher = self._compiled(text, rules)
            with self._lock:
                self._memo[key] = matcher
                while len(self._memo) > MEMO_GRAMMARS:
                    self._memo.popitem(last=False)
        return Grammar(matcher, self._words, self._end_tokens, rules[0][1])

    def _compiled(self, text: str, rules: list[tuple[str, str]]) -> LLMatcher:
        def call() -> LLMatcher:
            grammar = LLMatcher.grammar_from_lark(text)
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)

        try:
            matcher = self._calls.run(call)
        except TookTooLongError as late:
            raise refused(f"the grammar was given up: {late}", rules[0][1]) from None
        if error := matcher.get_error():
            raise _refusal(error, rules)
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise refused("no reply can satisfy it", rules[0][1])
        return matcher


class Grammar:
    """A compiled grammar; immutable."""

    def __init__(
        self, matcher: LLMatcher, words: int, end_tokens: frozenset[int], param: str
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._end_tokens = end_tokens
        self._param = param
        self._lock = threading.Lock()

    def matcher(self) -> Matcher:
        """A matcher at the start of a reply."""
        with self._lock:
            copy = self._matcher.deep_copy()
        return Matcher(copy, self._words, self._end_tokens, self._param)


class Matcher:
    """Follows one reply. One thread uses it."""

    def __init__(
        self, matcher: LLMatcher, words: int, end_tokens: frozenset[int], param: str
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._end_tokens = end_tokens
        self._param = param
        self._ended = 0
        """Tokens after the first end token, itself included: the library follows none of them."""

    @property
    def done(self) -> bool:
        """The reply may end here."""
        return self._ended > 0 or self._matcher.is_accepting()

    def restart(self) -> None:
        """Back to the start of the reply."""
        self._matcher.reset()
        self._ended = 0

    def mask(self) -> Mask | None:
        """What may come next; never empty. None allows everything.

        Raises InvalidRequestError when the grammar has become too complex to go on.
        """
        mask = np.zeros(self._words, dtype=np.int32)
        if self._ended:
            for token in self._end_tokens:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
            return mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def advance(self, token: int) -> None:
        """Go on by one token, which the mask allowed."""
        if self._ended or token in self._end_tokens:
            assert self.done, f"end token {token} where the reply can't end"
            self._ended += 1
            return
        accepted = self._matcher.consume_token(token)
        self._check()
        assert accepted, f"token {token} is not what the grammar allows"

    def rollback(self, tokens: int) -> None:
        """Take the last `tokens` back."""
        ended = min(tokens, self._ended)
        self._ended -= ended
        if tokens > ended:
            self._matcher.rollback(tokens - ended)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(_END.split(self._matcher.get_error())[0].split())[:200]
            raise refused(f"can't be enforced any further: {reason}", self._param)


_AT = re.compile(r"^at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")

_END = re.compile(r"\n\s*\d+ \| |\n\s*\n|<state>|\. Enable ")
"""Where the library stops telling the reason and shows the grammar or its own options."""


def _refusal(error: str, rules: list[tuple[str, str]]) -> InvalidRequestError:
    """The library's message without its picture of the grammar, at the field it is about."""
    param = rules[0][1]
    if found := _AT.match(error):
        line = int(found.group(1)) - 1
        if 0 <= line < len(rules):
            param = rules[line][1]
        error = error[found.end() :]
    reason = " ".join(_END.split(error)[0].split())
    if reason.startswith("panic:"):  # the library's own counters have run over
        reason = "schema too large"
    return refused(f"the schema can't be enforced: {reason[:300]}", param)


class _Vocabulary:
    """A tokenizer as the library wants to see it."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, end_tokens: tuple[int, ...]) -> None:
        self.eos_token_id = end_tokens[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids | set(end_tokens))
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        words = text.decode("utf-8") if isinstance(text, bytes) else text
        return [int(token) for token in self._encode(words)]


def _for_library(tokenizer: Tokenizer, end_tokens: tuple[int, ...]) -> LLTokenizer:
    vocabulary: Any = _Vocabulary(tokenizer, end_tokens)
    return LLTokenizer(
        vocabulary, n_vocab=tokenizer.vocab_size, eos_token=list(end_tokens), slices=_SLICES
    )
