"""What does a turn work with? The things of the worker's thread, and the words of its neighbours.

The text layer (`OutputMachine`, `Records`) is seen here only as far as a turn needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from capserve.engine.seam import Engine, TokenArray
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.lifecycle import FinishReason, Lifecycle
from capserve.serving.limits import Limits
from capserve.serving.prefix import AutoPrefixPolicy, CapsuleIndex
from capserve.serving.rates import RateMeter
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.tally import Tally
from capserve.serving.turn import WorkItem
from capserve.text.channels import Text
from capserve.text.messages import Conversation, Message
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt, TurnRecord


class ReplyCall(Protocol):
    """A complete tool call as the text layer parsed it."""

    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


class ReplyDelta(Protocol):
    @property
    def parts(self) -> Sequence[Text | ReplyCall]:
        """In the reply's order."""
        ...


class OutputMachine(Protocol):
    """Committed tokens in, parts of the reply out: `capserve.text.output.TurnOutput`."""

    def feed(self, tokens: Sequence[int], /) -> ReplyDelta: ...
    def finish(self) -> ReplyDelta: ...
    def message(self) -> Message: ...
    @property
    def stopped(self) -> bool:
        """Nothing more is read: a stop string matched, or all calls are there and more came."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The one that matched."""
        ...

    @property
    def calls_are_full(self) -> bool: ...
    @property
    def reasoning_tokens(self) -> int: ...


class MakeOutput(Protocol):
    def __call__(self, spec: OutputSpec, /) -> OutputMachine: ...


class Records(Protocol):
    """Finished turns as records and as digests: `capserve.text.prompt.PromptBuilder`."""

    def make_record(
        self, prompt: Prompt, reply: Message, tokens: TokenArray, /
    ) -> TurnRecord | None: ...
    def chain(self, conversation: Conversation, /) -> tuple[bytes, ...]: ...


class SinkError(Exception):
    """The sink itself failed: this turn has nobody to deliver to, the engine is fine."""


@dataclass(frozen=True)
class Done:
    """The turn came to its own end; `clean` when the state is what the client has seen."""

    reason: FinishReason
    message: Message
    reasoning_tokens: int
    output: tuple[int, ...]
    clean: bool
    at_end_token: bool
    stop_string: str | None = None
    """The one that ended it."""


@dataclass(frozen=True)
class Cancelled:
    pass


Ending = Done | Cancelled


@dataclass(eq=False)
class Turn:
    """A work item on its way; equality is identity, so that a queue can find it."""

    item: WorkItem
    life: Lifecycle
    tally: Tally


@dataclass(frozen=True)
class Bench:
    """What every run works with; all of it belongs to the worker thread."""

    engine: Engine
    limits: Limits
    policy: AutoPrefixPolicy
    index: CapsuleIndex
    sessions: SessionRegistry
    keeper: Keeper
    archive: Archive
    meter: RateMeter
    make_output: MakeOutput
    records: Records
