"""Which tokens may come next, so that the reply keeps what the request demands of its form?

`Constraint` says what is demanded; `GrammarCompiler` turns it into a `Grammar`, or refuses it in
bounded time; `Grammar.matcher` follows one reply token by token. The grammar is over the reply's
bytes: how they are cut into tokens is the model's business, save where only one text may follow;
there the tokenizer's own cut is demanded, so that the reply re-encodes to itself.

Reasoning is free until `</think>`, or until it makes a call. End tokens are allowed exactly where
the reply may end. Other control tokens are never allowed. A stop string or `max_tokens` may still
cut a reply in the middle: it is valid up to there, and its finish reason says so.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from capserve.errors import InvalidRequestError
from capserve.text.grammar_calls import SHARED, loose_call, strict_call
from capserve.text.grammar_schema import (
    MOST_BYTES,
    MOST_FOLLOWED,
    Unsupported,
    check_finite,
    followed,
    size_of,
)
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

_JSON = {"whitespace_pattern": r"(\x20|\n\x20{0,32}|\n\t{0,16})"}
"""One space, or a new line with its indentation: room for compact and pretty forms, and no endless
blank for a model that has lost its way."""


@dataclass(frozen=True)
class Constraint:
    """What the request demands of the reply's form."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions as the request has them, `{"type": "function", "function": {...}}` or bare."""
    choice: Literal["none", "auto", "required"] = "auto"
    function: str | None = None
    """The reply is a call of this function; stands above `choice`."""
    parallel: bool = True
    """False: at most one call, and the reply ends with it."""
    response_format: Mapping[str, Any] | None = None
    """As OpenAI has it: type `text`, `json_object`, or `json_schema` with its `json_schema`."""
    starts_in_reasoning: bool = False


class GrammarCompiler:
    """Makes grammars for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
        assert end_tokens, "a reply under a grammar needs an end token"
        self._tokenizer = _for_library(tokenizer, tuple(end_tokens))
        self._words = (tokenizer.vocab_size + 31) // 32
        self._end_tokens = frozenset(end_tokens)
        self._memo: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Grammar | None:
        """The grammar of `constraint`, None when it demands nothing.

        Raises InvalidRequestError naming `response_format` or `tools[i]` for a schema that is
        broken, can't be satisfied, is too large, or says what can't be enforced.
        """
        rules = _Rules(constraint, tolerant=False)
        try:
            return self._grammar(rules.build())
        except InvalidRequestError:
            if not rules.has_promised_more:
                raise
        # Nobody called these tools strict: a schema beyond the grammar still gets calls of its
        # function. All of them together, as asking the library for each would take too long.
        return self._grammar(_Rules(constraint, tolerant=True).build())

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
        matcher = LLMatcher(
            self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=_LIMITS
        )
        if error := matcher.get_error():
            raise _refusal(error, rules)
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise _refused("no reply can satisfy it", rules[0][1])
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
            raise _refused(f"can't be enforced any further: {reason}", self._param)


class _Rules:
    """The grammar's text: lines, each with the request's field that it came from."""

    def __init__(self, constraint: Constraint, *, tolerant: bool) -> None:
        self._constraint = constraint
        self._tolerant = tolerant
        """Only what is called strict has to be kept."""
        self.has_promised_more = False
        """A schema is enforced that nobody called strict."""
        self._lines: list[tuple[str, str]] = []
        self._bytes = self._followed = 0
        self._functions = list(_functions(constraint.tools))
        named = constraint.function
        self._must_call = named is not None or constraint.choice == "required"
        offered = constraint.choice != "none" or named is not None
        self._offered = [
            (i, f)
            for i, f in enumerate(self._functions)
            if offered and (named is None or f["name"] == named)
        ]
        if self._must_call and not self._offered:
            raise _refused(
                "no tool to call" if named is None else f"no tool is named {named!r}", "tool_choice"
            )

    def _count(self, schema: Mapping[str, Any]) -> None:
        self._bytes += size_of(schema)
        if self._bytes > MOST_BYTES:
            raise Unsupported(f"the schemas have {self._bytes} bytes, the limit is {MOST_BYTES}")
        check_finite(schema)
        self._followed += followed(schema)
        if self._followed > MOST_FOLLOWED:
            raise Unsupported(f"$ref and anyOf lead to more than {MOST_FOLLOWED} places")

    def build(self) -> list[tuple[str, str]] | None:
        """None when nothing is demanded. Raises InvalidRequestError."""
        c = self._constraint
        schema = None if self._must_call else _json_schema(c.response_format)
        strict = any(f.get("strict") is True for _, f in self._offered)
        limited = bool(self._offered) and not c.parallel
        if not self._must_call and schema is None and not strict and not limited:
            return None
        self._add_calls()
        starts = self._content(schema)
        start = starts[0]
        if c.starts_in_reasoning:
            thought = f'TEXT? RCHUNK* ("</think>" "\\n\\n"? ({start})'
            if self._offered:
                thought += f' | "<tool_call>" {starts[1]}'
            start = thought + ")"
        owner = "response_format" if schema is not None else "tools"
        lines = [(f"start: {start}", owner)]
        marks = r"<(\/think|tool_call)>" if self._offered else r"<\/think>"
        lines += [(line, owner) for line in SHARED.strip().splitlines()]
        lines.append((f"RCHUNK: /<[^<]*/ & ~/{marks}(?s:.*)/", owner))
        lines.append((r"FCHUNK: /<[^<]*/ & ~/<(tool_call>|function=)(?s:.*)/", owner))
        return lines + self._lines

    def _content(self, schema: Mapping[str, Any] | None) -> tuple[str, str]:
        """The reply's content, and what follows a `<tool_call>` in its reasoning."""
        one = '"\\n<function=" call "\\n</tool_call>"'
        more = f'("\\n"? "<tool_call>" {one})*' if self._constraint.parallel else ""
        calls = f'"<tool_call>" {one} {more}'
        if schema is not None:
            try:
                self._count(schema)
            except Unsupported as error:
                raise _refused(str(error), "response_format") from None
            self._lines.append((f"json: %json {json.dumps(schema)}", "response_format"))
            return ("json" if not self._offered else f"json | {calls}"), f"{one} {more}"
        if self._must_call:
            return calls, f"{one} {more}"
        call = f'("<tool_call>" {one} | "<function=" call)'
        if not self._constraint.parallel:
            return f"TEXT? FCHUNK* {call}?", one
        return (
            f"TEXT? FCHUNK* ({call} TEXT? FCHUNK*)*",
            f"{one} TEXT? FCHUNK* ({call} TEXT? FCHUNK*)*",
        )

    def _add_calls(self) -> None:
        if not self._offered:
            return
        names = " | ".join(f"t{i}" for i, _ in self._offered)
        self._lines.append((f"call: {names}", "tools"))
        for i, function in self._offered:
            param = f"tools[{i}]"
            strict = function.get("strict") is True
            parameters = function.get("parameters") or {}
            if not isinstance(parameters, Mapping):
                raise _refused("parameters must be an object", param)
            try:
                rules = self._rules(f"t{i}", function["name"], parameters, strict)
            except Unsupported as error:
                raise _refused(f"{function['name']}: {error}", param) from None
            self._lines += [(line, param) for line in rules]

    def _rules(
        self, prefix: str, name: str, parameters: Mapping[str, Any], strict: bool
    ) -> list[str]:
        if not strict:
            if self._tolerant or not self._must_call:
                return loose_call(prefix, name)
            self.has_promised_more = True
        self._count(parameters)
        return strict_call(prefix, name, parameters)


def _functions(tools: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refused("a tool needs a function with a name", f"tools[{i}]")
        yield function


def _json_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The schema that the reply's content has to satisfy, None when it is free."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"x-guidance": _JSON, "type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema, **rest}}:
            lenient = rest.get("strict") is not True
            return {**schema, "x-guidance": {**_JSON, "lenient": lenient}}
        case _:
            raise _refused(
                "type is text, json_object or json_schema with an object json_schema.schema",
                "response_format",
            )


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
    return _refused(f"the schema can't be enforced: {reason[:300]}", param)


def _refused(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {reason}", param=param)


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
