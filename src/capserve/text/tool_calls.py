"""Where does a call in the model's XML form end, and what are its parts?

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>

VALUE is raw and may itself hold tags. A `</parameter>` closes it only where the form goes on
behind it: another parameter, or the call's own end. Whatever can't be a call is reported as broken,
so that its text stays text.
"""

from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass
from enum import Enum, auto

from capserve.text.markup import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call. `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits that nobody can guess."""
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as it was written."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    source: str
    """Its exact text, opening and closing tags included."""
    closed: bool
    """False when the reply ended before a closing tag: more parameters may have been to come."""


class Verdict(Enum):
    """What a reader says when it has no call."""

    WAIT = auto()
    """More text is needed."""
    BROKEN = auto()
    """This is no call; whatever opened it is text."""


class _Phase(Enum):
    OPENING = auto()
    NAME = auto()
    NEXT = auto()
    KEY = auto()
    VALUE = auto()
    TAIL = auto()


class _NotHere(Enum):
    NOT_HERE = auto()


_NOT_HERE = _NotHere.NOT_HERE
"""A closing tag that is part of the value."""

_CANDIDATE = re.compile(f"{PARAMETER_CLOSE}|{FUNCTION_CLOSE}")
_CANDIDATE_CHARS = max(len(PARAMETER_CLOSE), len(FUNCTION_CLOSE))
_SPACE = re.compile(r"\s*")
_NO = -1
_PENDING = -2


class CallReader:
    """Reads one call from a buffer that starts at its opening tag and only ever grows.

    `wrapped`: it opened with `<tool_call>`; otherwise with a bare `<function=`.
    """

    def __init__(self, *, wrapped: bool) -> None:
        self._wrapped = wrapped
        self._phase = _Phase.OPENING if wrapped else _Phase.NAME
        self._at = len(CALL_OPEN if wrapped else FUNCTION_OPEN)
        self.opened = self._at
        """Length of the tags that opened it: all that becomes text when the call is broken."""
        self._scan = 0  # in VALUE: no closing tag begins before this
        self._fallback: int | None = None  # the first `</parameter></function>` that was passed by
        self._blanks: dict[int, int] = {}
        """Where whitespace that begins at a place ended so far: a model may write it without end,
        and each token would look through all of it again."""
        self._name = ""
        self._key = ""
        self._parameters: list[tuple[str, str]] = []
        self.end = 0
        """After a call: where it ends in the buffer."""

    def copy(self) -> CallReader:
        """One that goes on from here by itself."""
        twin = copy.copy(self)
        twin._parameters = list(self._parameters)
        twin._blanks = dict(self._blanks)
        return twin

    def read(self, buffer: str, *, final: bool) -> RawCall | Verdict:
        """Go on with the buffer as it is now; `final` when nothing will follow."""
        step: RawCall | Verdict | None
        while True:
            match self._phase:
                case _Phase.OPENING:
                    step = self._open(buffer)
                case _Phase.NAME | _Phase.KEY:
                    step = self._word(buffer)
                case _Phase.NEXT:
                    step = self._next(buffer)
                case _Phase.VALUE:
                    step = self._value(buffer, final)
                case _Phase.TAIL:
                    step = self._tail(buffer, final)
            if step is Verdict.WAIT and final:
                return Verdict.BROKEN
            if step is not None:
                return step

    def _open(self, buffer: str) -> Verdict | None:
        end = self._expect(buffer, self._at, FUNCTION_OPEN)
        if end < 0:
            return Verdict.BROKEN if end == _NO else Verdict.WAIT
        self._at, self._phase = end, _Phase.NAME
        self.opened = end
        return None

    def _word(self, buffer: str) -> Verdict | None:
        """A function's or parameter's name, up to `>` on the same line."""
        end = buffer.find(">", self._at)
        word = buffer[self._at : end if end >= 0 else len(buffer)]
        if "\n" in word or "<" in word or (end >= 0 and not word.strip()):
            return Verdict.BROKEN
        if end < 0:
            return Verdict.WAIT
        self._at = end + 1
        if self._phase is _Phase.NAME:
            self._name, self._phase = word.strip(), _Phase.NEXT
        else:
            self._key, self._phase = word.strip(), _Phase.VALUE
            self._scan, self._fallback = self._at, None
        return None

    def _next(self, buffer: str) -> Verdict | None:
        parameter = self._expect(buffer, self._at, PARAMETER_OPEN)
        close = self._expect(buffer, self._at, FUNCTION_CLOSE)
        if parameter >= 0:
            self._at, self._phase = parameter, _Phase.KEY
        elif close >= 0:
            self._at, self._phase = close, _Phase.TAIL
        else:
            return Verdict.WAIT if _PENDING in (parameter, close) else Verdict.BROKEN
        return None

    def _value(self, buffer: str, final: bool) -> RawCall | Verdict | None:
        while found := _CANDIDATE.search(buffer, self._scan):
            if found.group() == PARAMETER_CLOSE:
                step = self._after_parameter(buffer, found.start(), found.end(), final)
            else:
                step = self._after_function(buffer, found.end(), final)
            if step is not _NOT_HERE:
                return step
            self._scan = found.end()
        self._scan = max(self._scan, len(buffer) - _CANDIDATE_CHARS + 1)
        return self._fall_back(buffer) if final else Verdict.WAIT

    def _after_parameter(
        self, buffer: str, start: int, end: int, final: bool
    ) -> RawCall | Verdict | _NotHere | None:
        """Is the `</parameter>` at [start, end) the value's end?"""
        parameter = self._expect(buffer, end, PARAMETER_OPEN)
        function = self._expect(buffer, end, FUNCTION_CLOSE)
        call = self._expect(buffer, end, CALL_CLOSE) if self._wrapped else _NO
        if parameter >= 0:
            self._take(buffer, start, end, _Phase.NEXT)
            return None
        if call >= 0:  # `</function>` was lost, but the call is closed
            return self._finish(buffer, start, call, closed=True)
        if function >= 0:
            # A value may tell about calls. Behind a wrapped call's true end stands a call's tag.
            tags = (CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN)
            after = [self._expect(buffer, function, tag) for tag in tags]
            if not self._wrapped or max(after) >= 0 or (final and _PENDING in after):
                self._take(buffer, start, end, _Phase.NEXT)
                return None
            if _PENDING in after:
                return Verdict.WAIT
            if self._fallback is None:
                self._fallback = start
            return _NOT_HERE
        if _PENDING not in (parameter, function, call):
            return _NOT_HERE
        if not final:
            return Verdict.WAIT
        rest = buffer[end:].lstrip()
        if rest and not rest.startswith("</"):
            return self._fall_back(buffer)  # cut where another parameter began
        return self._finish(buffer, start, len(buffer), closed=False)

    def _after_function(self, buffer: str, end: int, final: bool) -> Verdict | _NotHere:
        """A closed call and the next one's opening inside a value: this call lost its
        `</parameter>`, and going on would swallow the next one."""
        closing = (CALL_CLOSE,) if self._wrapped else ()
        for tag in (*closing, CALL_OPEN, FUNCTION_OPEN):
            end = self._expect(buffer, end, tag)
            if end == _NO or (final and end == _PENDING):
                return _NOT_HERE
            if end == _PENDING:
                return Verdict.WAIT
        return Verdict.BROKEN

    def _fall_back(self, buffer: str) -> Verdict | None:
        if self._fallback is None:
            return Verdict.BROKEN
        start = self._fallback
        self._take(buffer, start, start + len(PARAMETER_CLOSE), _Phase.NEXT)
        return None

    def _take(self, buffer: str, start: int, end: int, phase: _Phase) -> None:
        value = buffer[self._at : start].removeprefix("\n").removesuffix("\n")
        self._parameters.append((self._key, value))
        self._at, self._phase = end, phase

    def _finish(self, buffer: str, start: int, end: int, *, closed: bool) -> RawCall:
        self._take(buffer, start, end, _Phase.TAIL)
        return self._call(buffer, end, closed=closed)

    def _expect(self, buffer: str, at: int, tag: str) -> int:
        """End of `tag` when it stands at `at` (whitespace skipped), _PENDING when it still may,
        else _NO."""
        found = _SPACE.match(buffer, self._blanks.get(at, at))
        assert found is not None
        begin = self._blanks[at] = found.end()
        if buffer.startswith(tag, begin):
            return begin + len(tag)
        rest = buffer[begin : begin + len(tag)]
        return _PENDING if tag.startswith(rest) else _NO

    def _tail(self, buffer: str, final: bool) -> RawCall | Verdict:
        """Behind `</function>`: a closing tag belongs to the call, its loss is forgiven."""
        close = self._expect(buffer, self._at, CALL_CLOSE)
        if close == _PENDING:
            if not final:
                return Verdict.WAIT
            half = buffer[self._at :].lstrip().startswith("</")
            close = len(buffer) if half else _NO  # half a closing tag is no text
        return self._call(buffer, close if close >= 0 else self._at, closed=True)

    def _call(self, buffer: str, end: int, *, closed: bool) -> RawCall:
        self.end = end
        return RawCall(self._name, tuple(self._parameters), buffer[:end], closed)
