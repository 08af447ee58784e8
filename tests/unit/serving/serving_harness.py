"""A serving layer on the fake engine, with text that a test can read at a glance.

A message is rendered as [role token, content tokens, END]; the generation prompt is [ASSISTANT].
Token t reads as "t ". Content tokens are 16 or higher, so nothing is confused with a control token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np

from capserve.engine.seam import EngineLimits, Sampling, TokenArray
from capserve.errors import CapserveError
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.rates import RateMeter
from capserve.serving.running.bench import MakeOutput
from capserve.serving.schedule.order_queue import Desk
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.turn import (
    CancelToken,
    Delta,
    Failed,
    Finished,
    TurnEvent,
    TurnRequest,
    WorkItem,
)
from capserve.serving.watch import Watch
from capserve.serving.worker import EngineWorker
from capserve.testing.fake_engine import FakeEngine
from capserve.text.channels import Channel, Text
from capserve.text.messages import Conversation, Message, ToolCall
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt, TurnRecord

ASSISTANT, END, USER, SYSTEM, CALL = 2, 1, 3, 4, 5
ROLES = {"assistant": ASSISTANT, "user": USER, "system": SYSTEM, "tool": USER}
WAIT_S = 20.0
_names = count(1)


def ids(tokens: Sequence[int]) -> TokenArray:
    return np.array(tokens, dtype=np.int32)


def words(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def content_tokens(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def some_words(length: int, seed: int = 0, vocab: int = 512) -> str:
    draw = np.random.default_rng(seed)
    return words(draw.integers(16, vocab, length).tolist())


def user(text: str) -> Message:
    return Message("user", text)


def system(text: str) -> Message:
    return Message("system", text)


def rendered(messages: Sequence[Message]) -> list[int]:
    return [
        token
        for message in messages
        for token in (ROLES[message.role], *content_tokens(message.content), END)
    ]


def chain_of(messages: Sequence[Message]) -> tuple[bytes, ...]:
    fold = blake2b(b"no tools", digest_size=16)
    digests = [fold.copy().digest()]
    for message in messages:
        fold.update(repr((message.role, message.content)).encode())
        digests.append(fold.copy().digest())
    return tuple(digests)


def make_prompt(messages: Sequence[Message], record: TurnRecord | None = None) -> Prompt:
    tokens = rendered(messages)
    prompt_end = len(tokens)
    spliced = 0
    if record is not None:
        rest = rendered(messages[len(record.messages) :])
        spliced = len(record.tokens)
        prompt_end = spliced + len(rest)
        tokens = [*record.tokens.tolist(), *rest]
    leading = messages[:1] if messages and messages[0].role == "system" else []
    return Prompt(
        tokens=ids([*tokens, ASSISTANT]),
        conversation=Conversation(tuple(messages)),
        chain=chain_of(messages),
        system_end=len(rendered(leading)),
        prompt_end=prompt_end,
        spliced_tokens=spliced,
        spliced_messages=0 if record is None else len(record.messages),
    )


class WordRecords:
    """What PromptBuilder is to the worker."""

    def make_record(self, prompt: Prompt, reply: Message, tokens: TokenArray) -> TurnRecord | None:
        messages = (*prompt.conversation.messages, reply)
        return TurnRecord(messages, words(tokens.tolist()), tokens)

    def chain(self, conversation: Conversation) -> tuple[bytes, ...]:
        return chain_of(conversation.messages)


@dataclass(frozen=True)
class WordCall:
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class WordDelta:
    parts: tuple[Text | WordCall, ...] = ()


class WordOutput:
    """What TurnOutput is to the worker: CALL is a whole tool call when tools were offered."""

    def __init__(self, spec: OutputSpec) -> None:
        self._spec = spec
        self._text = ""
        self._calls: tuple[ToolCall, ...] = ()
        self.stopped = False
        self.stop_string: str | None = None
        self.calls_are_full = False
        self.reasoning_tokens = 0

    def feed(self, tokens: Sequence[int]) -> WordDelta:
        assert not self.stopped, "nothing may follow a stop string"
        before, calls = len(self._text), []
        for token in tokens:
            if token == END:
                continue
            if token == CALL and self._spec.tools:
                calls.append(WordCall(len(self._calls), f"call_{len(self._calls)}", "run", "{}"))
                self._calls += (ToolCall("run", "{}", calls[-1].id),)
            else:
                self._text += f"{token} "
        for stop in self._spec.stop:
            if stop in self._text:
                self._text = self._text[: self._text.index(stop)]
                self.stopped, self.stop_string = True, stop
        text = self._text[before:]
        return WordDelta((*[Text(Channel.CONTENT, text)][: bool(text)], *calls))

    def finish(self) -> WordDelta:
        return WordDelta()

    def message(self) -> Message:
        return Message("assistant", self._text, tool_calls=self._calls)


class RecordingSink:
    """Keeps all events; may raise in its n-th delivery."""

    def __init__(self, raise_at: int | None = None) -> None:
        self.events: list[TurnEvent] = []
        self.ended = threading.Event()
        self._raise_at = raise_at
        self._deliveries = 0

    def deliver(self, event: TurnEvent) -> None:
        self._deliveries += 1
        if isinstance(event, Finished | Failed):
            self.events.append(event)
            self.ended.set()
        if self._deliveries == self._raise_at:
            raise OSError("planted: the sink is gone")
        if isinstance(event, Delta):
            self.events.append(event)

    def wait(self) -> Finished | Failed:
        assert self.ended.wait(WAIT_S), "the turn never ended"
        return self.end

    @property
    def ends(self) -> list[Finished | Failed]:
        return [event for event in self.events if not isinstance(event, Delta)]

    @property
    def end(self) -> Finished | Failed:
        assert len(self.ends) == 1, "exactly one terminal event a turn"
        assert self.events[-1] is self.ends[0], "nothing follows the terminal event"
        return self.ends[0]

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) for t in e.tokens]

    @property
    def content(self) -> str:
        return "".join(e.content for e in self.events if isinstance(e, Delta))


@dataclass
class Serving:
    engine: FakeEngine
    worker: EngineWorker
    store: CapsuleStore
    sessions: SessionRegistry
    transcripts: Transcripts
    metrics: MetricsLog
    policy: AutoPrefixPolicy

    def item(
        self,
        prompt: Prompt,
        *,
        namespace: str = "key/a",
        sampling: Sampling | None = None,
        max_tokens: int = 8,
        pin: int | bool = False,
        sink: RecordingSink | None = None,
        output: OutputSpec | None = None,
        session_id: str | None = None,
        grammar: Any = None,
    ) -> WorkItem:
        sampling = sampling or Sampling(end_tokens=(END,), drafts=3)
        request = TurnRequest(
            f"req-{next(_names)}",
            namespace,
            prompt,
            sampling,
            max_tokens,
            output or OutputSpec(),
            pin,
            session_id,
            grammar,
        )
        return WorkItem(request, time.monotonic(), sink or RecordingSink(), CancelToken())

    def submit(self, prompt: Prompt, **options: object) -> tuple[WorkItem, RecordingSink]:
        item = self.item(prompt, **options)  # type: ignore[arg-type]
        self.worker.submit(item)
        assert isinstance(item.sink, RecordingSink)
        return item, item.sink

    def ask(self, prompt: Prompt, **options: object) -> tuple[Finished | Failed, RecordingSink]:
        _, sink = self.submit(prompt, **options)
        return sink.wait(), sink

    def build(self, messages: Sequence[Message], namespace: str = "key/a") -> Prompt:
        """A prompt that takes over journal tokens where it can, as the api does."""
        record = self.transcripts.longest(namespace, chain_of(messages))
        return make_prompt(messages, record)


@contextmanager
def serving(
    engine_limits: EngineLimits | None = None,
    *,
    engine: FakeEngine | None = None,
    budget_bytes: int = 64 << 20,
    exact: bool = False,
    checkpoint_interval: int = 256,
    idle_check_s: float = 60.0,
    start: bool = True,
    make_output: MakeOutput = WordOutput,
    desk: Desk | None = None,
    archive: Archive | None = None,
    watch: Watch | None = None,
    **limits: object,
) -> Iterator[Serving]:
    engine = engine or FakeEngine(engine_limits)
    allowed = Limits(
        **{  # type: ignore[arg-type]
            "max_prompt_tokens": 4096,
            "max_output_tokens": 256,
            "capsule_budget_bytes": {"host": budget_bytes},
            **limits,
        }
    )
    policy = AutoPrefixPolicy(engine.limits, exact, checkpoint_interval)
    store = CapsuleStore(engine, allowed.capsule_budget_bytes)
    sessions = SessionRegistry(allowed.max_active_sessions, allowed.session_idle_ttl_s)
    transcripts, metrics = Transcripts(), MetricsLog()
    worker = EngineWorker(
        engine,
        allowed,
        policy,
        store,
        sessions,
        transcripts,
        metrics,
        make_output,
        WordRecords(),
        desk=desk,
        archive=archive,
        meter=RateMeter(weight=0.0),  # plans must not depend on this machine's speed
        watch=watch,
        idle_check_s=idle_check_s,
    )
    if start:
        worker.start()
    try:
        yield Serving(engine, worker, store, sessions, transcripts, metrics, policy)
    finally:
        assert worker.stop(WAIT_S), "the worker did not stop"
    store.check()
    assert not engine.trespasses, "a second thread reached for the engine"


def cold_reply(
    limits: EngineLimits,
    prompt: Prompt,
    sampling: Sampling,
    max_tokens: int,
    stop: tuple[str, ...] = (),
) -> list[int]:
    """The reply that an engine without any reuse gives: the oracle of every reuse test."""
    engine = FakeEngine(limits)
    engine.extend(prompt.tokens)
    engine.begin(replace(sampling, drafts=0), prompt.tokens)
    machine = WordOutput(OutputSpec(stop=stop))
    room = min(max_tokens, limits.max_positions - len(prompt.tokens))
    said: list[int] = []
    while len(said) < room and not machine.stopped:
        chunk = engine.step()
        said += chunk.tokens
        machine.feed(chunk.tokens)
        if chunk.stop is not None:
            break
    return said


def finished(event: Finished | Failed) -> Finished:
    assert isinstance(event, Finished), f"the turn failed: {event.error.message}"
    return event


def failed(event: Finished | Failed) -> CapserveError:
    assert isinstance(event, Failed), "the turn was expected to fail"
    return event.error
