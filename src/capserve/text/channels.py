"""Which part of a reply is reasoning, which is content, and where are its calls?

One table: for each state, the marks that matter and where they lead. Text goes out as soon as it
can't be the head of a mark. The pieces depend on the characters alone, never on how they were cut.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from enum import Enum, auto

from capserve.text.markup import CALL_OPEN, FUNCTION_OPEN, THINK_CLOSE, THINK_OPEN, unfinished
from capserve.text.tool_calls import CallReader, RawCall, Verdict


class Channel(Enum):
    REASONING = auto()
    CONTENT = auto()


@dataclass(frozen=True, slots=True)
class Text:
    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningClosed:
    """The reply itself ended its think block."""


Piece = Text | ReasoningClosed | RawCall


class State(Enum):
    START = auto()
    """Nothing of the content yet: here a think block may open."""
    REASONING = auto()
    CONTENT = auto()
    INTERRUPTED = auto()
    """Content behind a call that was made inside a think block: a late `</think>` is swallowed."""


TABLE: dict[State, dict[str, State]] = {
    State.START: {THINK_OPEN: State.REASONING},
    # A bare `<function=` in reasoning is talk about a function; a wrapped one is a call.
    State.REASONING: {THINK_CLOSE: State.START, CALL_OPEN: State.INTERRUPTED},
    State.CONTENT: {CALL_OPEN: State.CONTENT, FUNCTION_OPEN: State.CONTENT},
    State.INTERRUPTED: {
        THINK_CLOSE: State.CONTENT,
        CALL_OPEN: State.INTERRUPTED,
        FUNCTION_OPEN: State.INTERRUPTED,
    },
}
"""Mark -> state behind it (for a call: behind the whole call)."""

_CALL_MARKS = frozenset({CALL_OPEN, FUNCTION_OPEN})

_Marks = dict[State, dict[str, State]]


def _compile(marks: _Marks) -> tuple[_Marks, dict[State, re.Pattern[str]]]:
    # A state without marks gets the pattern that matches nowhere.
    return marks, {s: re.compile("|".join(map(re.escape, m)) or "(?!)") for s, m in marks.items()}


_WITH_CALLS = _compile(TABLE)
_WITHOUT_CALLS = _compile(
    {s: {m: to for m, to in marks.items() if m not in _CALL_MARKS} for s, marks in TABLE.items()}
)


class ChannelSplitter:
    """Splits one reply. Whitespace next to `<think>` and `</think>` belongs to no channel.

    `calls`: whether tools were offered; without them call markup is text like any other.
    `plain`: no think block may open either.
    """

    def __init__(self, *, starts_in_reasoning: bool, calls: bool, plain: bool = False) -> None:
        self._state = State.REASONING if starts_in_reasoning else State.START
        if plain:
            self._state = State.CONTENT
        self._marks, self._patterns = _WITH_CALLS if calls else _WITHOUT_CALLS
        self._buffer = ""
        self._reader: CallReader | None = None
        self._mark = ""  # what opened the reader
        self._skips_space = starts_in_reasoning

    @property
    def in_reasoning(self) -> bool:
        return self._state is State.REASONING and self._reader is None

    @property
    def before_content(self) -> bool:
        """Nothing of the content was written yet: a think block may open."""
        return self._state is State.START

    @property
    def may_reason(self) -> bool:
        """Reasoning goes on here, or may begin."""
        return self.before_content or self._state is State.REASONING

    def copy(self) -> ChannelSplitter:
        """One that goes on from here by itself."""
        twin = copy.copy(self)
        if self._reader is not None:
            twin._reader = self._reader.copy()
        return twin

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[Piece]:
        """Everything still held, as what it is now that nothing follows."""
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[Piece]:
        out: list[Piece] = []
        more = True
        while more and self._buffer:
            if self._reader is not None:
                more = self._read_call(self._reader, out, final)
            elif self._skips_space and self._buffer[0].isspace():
                self._buffer = self._buffer.lstrip()
            elif self._state is State.START:
                more = self._start(final)
            else:
                self._skips_space = False
                more = self._scan(out, final)
        return out

    def _start(self, final: bool) -> bool:
        """Before the first content: only whitespace may come before `<think>`."""
        body = self._buffer.lstrip()
        for mark, state in self._marks[State.START].items():
            if body.startswith(mark):
                self._buffer = body[len(mark) :]
                self._state, self._skips_space = state, True
                return True
            if not final and mark.startswith(body):
                return False
        self._state = State.CONTENT
        return True

    def _scan(self, out: list[Piece], final: bool) -> bool:
        """Take the text up to the next mark, and the mark. False when more text is needed."""
        found = self._patterns[self._state].search(self._buffer)
        if found is None:
            held = 0 if final else unfinished(self._buffer, self._marks[self._state])
            self._say(out, len(self._buffer) - held)
            return False
        self._say(out, found.start())
        mark = found.group()
        if mark in _CALL_MARKS:
            self._reader, self._mark = CallReader(wrapped=mark == CALL_OPEN), mark
            return True
        self._buffer = self._buffer[len(mark) :]
        if self._state is State.REASONING:
            out.append(ReasoningClosed())
        self._state, self._skips_space = self._marks[self._state][mark], True
        return True

    def _read_call(self, reader: CallReader, out: list[Piece], final: bool) -> bool:
        match reader.read(self._buffer, final=final):
            case Verdict.WAIT:
                return False
            case Verdict.BROKEN:
                # Only what opened it becomes text: what follows may hold a whole call.
                self._reader = None
                self._say(out, reader.opened)
            case RawCall() as call:
                self._reader = None
                self._state = self._marks[self._state][self._mark]
                self._buffer = self._buffer[reader.end :]
                out.append(call)
        return True

    def _say(self, out: list[Piece], chars: int) -> None:
        if chars:
            reasoning = self._state is State.REASONING
            channel = Channel.REASONING if reasoning else Channel.CONTENT
            out.append(Text(channel, self._buffer[:chars]))
            self._buffer = self._buffer[chars:]
