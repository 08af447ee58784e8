"""The serving layer on a real engine, wired as the command line wires it.

A `Desk` is one server without its wire: `ask` renders, submits, waits, and compares the turn with a
cold run. The engine is wrapped, so that a test can act inside an exact call of it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from capserve.engine.capsule import TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import (
    MAX_DRAFTS,
    Capsule,
    Chunk,
    EngineLimits,
    Sampling,
    TokenArray,
    TokenLogprob,
)
from capserve.nano import checkpoint_dir
from capserve.serving.capsules import CapsuleStore
from capserve.serving.lifecycle import FinishReason
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.prefix import AutoPrefixPolicy, PrefixAction
from capserve.serving.rates import RateMeter
from capserve.serving.sessions import SessionRegistry
from capserve.serving.transcripts import Transcripts
from capserve.serving.turn import (
    CancelToken,
    Delta,
    Failed,
    Finished,
    TurnEvent,
    TurnRequest,
    WorkItem,
)
from capserve.serving.worker import EngineWorker
from capserve.text.messages import Conversation
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.prompt import Prompt, PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer
from tests.engine.helpers import assert_same_bits
from tests.reuse.cold import ColdRun
from tests.reuse.ledger import Ledger

ON = 64
"""Tokens after the prompt that are compared wherever the state is the turn's own."""

WAIT_S = 60.0
"""Longest that a turn may take on a busy machine."""

_names = itertools.count(1)


class Wire:
    """An engine that passes every call on and can do something inside one. Implements `Engine`."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._calls: Counter[str] = Counter()
        self._traps: dict[tuple[str, int], Callable[[], None]] = {}

    def when(self, call: str, at: int, action: Callable[[], None]) -> None:
        """Run `action` inside the `at`-th call of this kind from now on. Set while idle only."""
        assert at >= 1
        self._traps[(call, self._calls[call] + at)] = action

    def disarm(self) -> bool:
        """Forget what was not reached; tells whether there was something."""
        left, self._traps = bool(self._traps), {}
        return left

    def _enter(self, call: str) -> None:
        self._calls[call] += 1
        action = self._traps.pop((call, self._calls[call]), None)
        if action is not None:
            action()

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def position(self) -> int:
        return self.engine.position

    @property
    def graph_capture_count(self) -> int:
        return self.engine.graph_capture_count

    def reset(self) -> None:
        self._enter("reset")
        self.engine.reset()

    def extend(self, tokens: TokenArray) -> None:
        self._enter("extend")
        self.engine.extend(tokens)

    def begin(
        self, sampling: Sampling, context: TokenArray, output: TokenArray | None = None
    ) -> None:
        self._enter("begin")
        self.engine.begin(sampling, context, output)

    def step(self, most: int = MAX_DRAFTS + 1) -> Chunk:
        self._enter("step")
        return self.engine.step(most)

    def snapshot(self) -> Capsule:
        self._enter("snapshot")
        return self.engine.snapshot()

    def restore(self, capsule: Capsule) -> int:
        self._enter("restore")
        return self.engine.restore(capsule)


class Collector:
    """A sink that keeps every event."""

    def __init__(self) -> None:
        self._events: list[TurnEvent] = []
        self._ended = threading.Event()

    def deliver(self, event: TurnEvent) -> None:
        self._events.append(event)
        if not isinstance(event, Delta):
            self._ended.set()

    def wait(self) -> Finished | Failed:
        assert self._ended.wait(WAIT_S), "the turn never ended"
        [end] = [event for event in self._events if not isinstance(event, Delta)]
        assert self._events[-1] is end, "nothing follows the terminal event"
        return end

    @property
    def tokens(self) -> list[int]:
        return [t for event in self._events if isinstance(event, Delta) for t in event.tokens]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [p for event in self._events if isinstance(event, Delta) for p in event.logprobs]


@dataclass(frozen=True)
class Ask:
    """How a conversation is put to the desk."""

    sampling: Sampling
    max_tokens: int = 40
    namespace: str = "key/a"
    stop: tuple[str, ...] = ()
    pin: int | bool = False
    cancel: tuple[str, int] | None = None
    """("extend" or "step", n): the client leaves inside the n-th such call."""
    on: bool = True
    """Let the hot state go on to `ON` tokens, where it is the turn's own."""


@dataclass
class GoneOn:
    """What a hot state said after its turn; at least `ON` tokens with those of the turn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Desk:
    engine: Wire
    worker: EngineWorker
    prompts: PromptBuilder
    transcripts: Transcripts
    store: CapsuleStore
    sessions: SessionRegistry
    cold: ColdRun
    strict: bool
    ledger: Ledger
    end_tokens: tuple[int, ...]
    last_prompt: Prompt | None = None
    last_output: list[int] = field(default_factory=list)

    def ask(self, talk: Conversation, ask: Ask) -> Finished | Failed:
        """One turn, compared with a cold run of its prompt. The worker is idle afterwards."""
        chain = self.prompts.chain(talk)
        record = self.transcripts.longest(ask.namespace, chain)
        prompt = self.prompts.build(talk, record, chain)
        sampling = replace(ask.sampling, end_tokens=self.end_tokens)
        request = TurnRequest(
            f"req-{next(_names)}",
            ask.namespace,
            prompt,
            sampling,
            ask.max_tokens,
            OutputSpec(talk.tools, ask.stop, prompt.starts_in_reasoning),
            ask.pin,
        )
        sink, cancel = Collector(), CancelToken()
        if ask.cancel is not None:
            self.engine.when(*ask.cancel, cancel.cancel)
        self.worker.submit(WorkItem(request, time.monotonic(), sink, cancel))
        end = sink.wait()
        self.engine.disarm()
        self.last_prompt, self.last_output = prompt, sink.tokens
        self._check(prompt, sampling, ask, sink, end)
        return end

    def _check(
        self,
        prompt: Prompt,
        sampling: Sampling,
        ask: Ask,
        sink: Collector,
        end: Finished | Failed,
    ) -> None:
        output = sink.tokens
        assert self.worker.health()["faults"] == 0
        self.store.check()
        hot = self.sessions.hot is not None
        if isinstance(end, Failed):
            assert end.error.status == 499, f"the turn failed: {end.error.message}"
            assert not hot, "a turn that was not done left its state hot"
        else:
            _assert_ended_in_its_place(output, end, ask, self.end_tokens)
        # Idle: the terminal event is the last that the worker does for a turn.
        engine, more, state = self.engine.engine, GoneOn(), None
        if hot:
            assert engine.position == len(prompt.tokens) + len(output) - 1
            state = engine.snapshot() if self.strict else None
            if ask.on:
                more = self._go_on(prompt, sampling, output)
        action = end.metrics.prefix_action
        try:
            self.cold.start(prompt.tokens, sampling)
            self.ledger.add(self.cold.follow(output, sink.logprobs, strict=self.strict))
            if state is not None:
                cold = self.cold.snapshot()
                assert isinstance(state, TorchCapsule)
                assert isinstance(cold, TorchCapsule)
                assert_same_bits(state, cold)
                self.ledger.states += 1
            self.ledger.add(self.cold.follow(more.tokens, more.logprobs, strict=self.strict))
        except AssertionError as error:
            error.add_note(f"after {action}, {len(prompt.tokens)} prompt tokens, {sampling}")
            raise
        if isinstance(end, Failed):
            self.ledger.cancelled += 1
        elif action is not None:
            self.ledger.actions[PrefixAction(action)] += 1

    def _go_on(self, prompt: Prompt, sampling: Sampling, output: list[int]) -> GoneOn:
        """What the hot state says next, up to `ON` tokens; the state is put back afterwards."""
        engine = self.engine.engine
        parked = engine.snapshot()
        decided = np.array(output, dtype=np.int32)
        alone = replace(sampling, end_tokens=(), top_logprobs=0)
        engine.begin(alone, prompt.tokens, decided)
        more = GoneOn()
        while len(more.tokens) < ON - len(output):
            chunk = engine.step()
            more.tokens += chunk.tokens
            more.logprobs += chunk.logprobs
        engine.restore(parked)
        return more


def _assert_ended_in_its_place(
    output: list[int], end: Finished, ask: Ask, end_tokens: tuple[int, ...]
) -> None:
    assert not set(output[:-1]) & set(end_tokens), "a reply goes on behind its end token"
    if end.reason is FinishReason.LENGTH:
        assert len(output) == ask.max_tokens
    elif not ask.stop:
        assert output[-1] in end_tokens


@contextmanager
def desk(
    hot: TorchEngine,
    cold: TorchEngine,
    ledger: Ledger,
    *,
    exact: bool = False,
    budget_bytes: int = 256 << 20,
    checkpoint_interval: int = 128,
    max_active_sessions: int = 64,
) -> Iterator[Desk]:
    """A started desk with no session; its worker is stopped and its accounts checked at the end."""
    path = checkpoint_dir()
    tokenizer = Tokenizer.from_dir(path)
    generation = json.loads((path / "generation_config.json").read_text())
    end_tokens = tuple(generation["eos_token_id"])
    prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path))
    engine = Wire(hot)
    size = engine.limits.max_positions
    limits = Limits(
        max_prompt_tokens=size, max_output_tokens=size, max_active_sessions=max_active_sessions
    )
    store = CapsuleStore(budget_bytes)
    sessions = SessionRegistry(limits.max_active_sessions, limits.session_idle_ttl_s)
    transcripts = Transcripts()
    worker = EngineWorker(
        engine,
        limits,
        AutoPrefixPolicy(engine.limits, exact, checkpoint_interval),
        store,
        sessions,
        transcripts,
        MetricsLog(),
        lambda spec: TurnOutput(spec, tokenizer, end_tokens),
        prompts,
        meter=RateMeter(weight=0.0),  # plans must not depend on this machine's speed
        idle_check_s=600.0,  # upkeep would look at the engine while a test does
    )
    worker.start()
    try:
        yield Desk(
            engine,
            worker,
            prompts,
            transcripts,
            store,
            sessions,
            ColdRun(cold),
            exact,
            ledger,
            end_tokens,
        )
    finally:
        assert worker.stop(WAIT_S), "the worker did not stop"
    store.check()
