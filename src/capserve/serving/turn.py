"""What crosses from a request to the worker, and what comes back?

Frozen messages only (seam 1). The api makes a `TurnRequest`, wraps it into a `WorkItem` with a
sink, and submits it; the worker delivers `TurnEvent`s to the sink: zero or more `Delta`s, then
exactly one terminal event. `deliver` never blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from capserve.engine.seam import Sampling, TokenLogprob
from capserve.errors import CapserveError
from capserve.serving.lifecycle import FinishReason
from capserve.serving.metrics import TurnMetrics
from capserve.text.channels import Channel, Text
from capserve.text.grammar import Grammar
from capserve.text.messages import Message
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt
from capserve.text.thinking import ThinkingBudget


class TurnCancelledError(CapserveError):
    """The turn was given up before its end. 499: the client is gone, or its stream stalled."""

    status = 499
    type = "cancelled"
    code: str | None = "cancelled"


class CancelToken:
    """Set by whoever gives up on a turn; looked at between chunks and at accept boundaries.

    Thread-safe. The first `cancel` wins and runs the subscribers in its own thread: a turn that
    only waits must not wait for the worker to notice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._subscribers: list[Callable[[], None]] = []
        self.reason = ""

    def cancel(self, reason: str = "client") -> None:
        with self._lock:
            if self._cancelled:
                return
            self.reason = reason
            self._cancelled = True
            subscribers, self._subscribers = self._subscribers, []
        # Outside the lock: a subscriber may look at the token, or take a lock of its own.
        for subscriber in subscribers:
            subscriber()

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call `subscriber` (it must not block) when cancelled; at once when it is already."""
        with self._lock:
            if not self._cancelled:
                self._subscribers.append(subscriber)
                return
        subscriber()

    @property
    def cancelled(self) -> bool:
        return self._cancelled


@dataclass(frozen=True)
class TurnRequest:
    request_id: str
    namespace: str
    """Isolation key for reuse; already bound to the caller's API key."""
    prompt: Prompt
    sampling: Sampling
    max_output_tokens: int
    output: OutputSpec
    pin: int | bool = False
    """`flashrt_pin_prefix`: True pins the end of the prompt, a number that many tokens of it."""
    session_id: str | None = None
    """The session that goes on, whatever its journal holds; None: the one whose journal it is."""
    grammar: Grammar | None = None
    """What the reply must keep to; None: nothing."""
    thinking: ThinkingBudget | None = None
    """How long it may think; None: as long as it likes."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A complete call: calls are delivered whole, so that a broken one can become content."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one committed chunk adds to the reply."""

    parts: tuple[Text | ToolCallDelta, ...] = ()
    """In the reply's order: text may come behind a call. None while a half tag is held."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(
        cls,
        content: str = "",
        reasoning: str = "",
        tool_calls: tuple[ToolCallDelta, ...] = (),
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Delta:
        """Parts in the usual order: thoughts, words, calls."""
        texts = (Text(Channel.REASONING, reasoning), Text(Channel.CONTENT, content))
        said = tuple(text for text in texts if text.text)
        return cls((*said, *tool_calls), tokens, logprobs)

    @property
    def content(self) -> str:
        return self._text(Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        return self._text(Channel.REASONING)

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))

    def _text(self, channel: Channel) -> str:
        texts = (part for part in self.parts if isinstance(part, Text))
        return "".join(text.text for text in texts if text.channel is channel)


def merged(deltas: Sequence[Delta]) -> Delta:
    """What several deltas in a row add up to."""
    return Delta(
        parts=tuple(_joined(part for delta in deltas for part in delta.parts)),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


def _joined(parts: Iterable[Text | ToolCallDelta]) -> Iterator[Text | ToolCallDelta]:
    """Texts of one channel that follow one another become one."""
    for channel, run in groupby(parts, _channel):
        if channel is None:
            yield from run
        else:
            yield Text(channel, "".join(part.text for part in run if isinstance(part, Text)))


def _channel(part: Text | ToolCallDelta) -> Channel | None:
    return part.channel if isinstance(part, Text) else None


@dataclass(frozen=True)
class Finished:
    """Terminal: the turn is DONE. `message` is what the deltas add up to."""

    reason: FinishReason
    message: Message
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    metrics: TurnMetrics
    stop_string: str | None = None
    """The one that ended the reply; None for an end token and any other reason."""


@dataclass(frozen=True)
class Failed:
    """Terminal: REJECTED, CANCELLED or ERROR, with the error that the client is to see."""

    error: CapserveError
    metrics: TurnMetrics


TurnEvent = Delta | Finished | Failed


class ResultSink(Protocol):
    """Where a turn's events go. Called from the worker thread; must not block."""

    def deliver(self, event: TurnEvent) -> None: ...


@dataclass(frozen=True)
class WorkItem:
    request: TurnRequest
    submitted_at: float
    """`time.monotonic()` at arrival, before rendering and tokenizing."""
    sink: ResultSink
    cancel: CancelToken = field(default_factory=CancelToken)
    tokenize_ms: float = 0.0
