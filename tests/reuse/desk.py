"""One server without its wire: what do its clients hear, and is it what a cold run says?

`Desk.ask` renders, submits, waits, and compares the turn with a cold run. The engine is wrapped, so
that a test can act inside an exact call of it. With a directory the server has a disk, and can be
started again, or killed and started again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from capserve.api.named import Subject, best_record
from capserve.engine.capsule import TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenLogprob
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.lifecycle import FinishReason
from capserve.serving.prefix import PrefixAction
from capserve.serving.sessions.orders import SessionOrder
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import KnownSession, Transcripts
from capserve.serving.turn import CancelToken, Failed, Finished, TurnRequest, WorkItem
from capserve.serving.worker import EngineWorker
from capserve.text.messages import Conversation, Message
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt
from capserve.text.thinking import ThinkingBudget
from tests.engine.helpers import assert_same_bits, live_bits
from tests.reuse.cold import ColdRun
from tests.reuse.faults import DiskSeam
from tests.reuse.ledger import Ledger
from tests.reuse.server import Server, Setup, texts
from tests.reuse.wire import WAIT_S, Collector, Wire, killed

ON = 64
"""Tokens after the prompt that are compared wherever the state is the turn's own."""

_names = itertools.count(1)

R = TypeVar("R")


@dataclass(frozen=True)
class Guest:
    """Another client's turn, which arrives while one runs."""

    talk: Conversation
    ask: Ask
    at: tuple[str, int]
    """Inside this call of the engine: ("extend" or "step", n)."""
    ends_host: bool = False
    """The running turn's client leaves when the guest's first word is there."""


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
    session_id: str | None = None
    guest: Guest | None = None
    thinking: int | None = None
    """Its budget, in tokens."""


@dataclass
class GoneOn:
    """What a hot state said after its turn; at least `ON` tokens with those of the turn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Pending:
    """A turn that was submitted."""

    ask: Ask
    prompt: Prompt
    item: WorkItem
    sink: Collector


@dataclass
class Desk:
    engine: Wire
    setup: Setup
    server: Server
    cold: ColdRun
    ledger: Ledger
    seam: DiskSeam
    last_prompt: Prompt | None = None
    last_output: list[int] = field(default_factory=list)
    guest_end: Finished | Failed | None = None
    """How the guest of the last turn ended."""
    _sinks: list[Collector] = field(default_factory=list)
    """Of all turns of this server."""

    @property
    def worker(self) -> EngineWorker:
        return self.server.worker

    @property
    def store(self) -> CapsuleStore:
        return self.server.store

    @property
    def sessions(self) -> SessionRegistry:
        return self.server.sessions

    @property
    def transcripts(self) -> Transcripts:
        return self.server.transcripts

    # -- beside turns -------------------------------------------------------------------------

    def order(self, order: SessionOrder) -> Any:
        """Its result; raises the CapserveError that the client would see."""
        return self.worker.order(order).result(WAIT_S)

    def do(self, action: Callable[[], R]) -> R:
        """In the worker's thread, between two units of work."""
        result: R = self.worker.order(action).result(WAIT_S)  # type: ignore[arg-type]
        return result

    def known(self, session_id: str) -> KnownSession | None:
        return self.transcripts.session(session_id)

    def check(self) -> None:
        """All accounts, counted afresh."""
        self.do(self.store.check)
        disk = self.server.disk
        if disk is not None and disk.fault is None and not self.seam.full:
            self.seam.ready()
            disk.check(WAIT_S)
            footprint = self.do(self.store.footprint)
            assert footprint.tiers["disk"].used_bytes == disk.used_bytes

    # -- the end of a process -----------------------------------------------------------------

    def stop(self) -> None:
        """As a person stops a server: what is saved is written."""
        self.seam.ready()
        assert self.worker.stop(WAIT_S), "the worker did not stop"
        for sink in self._sinks:
            sink.the_end()
        self._sinks = []
        if self.server.disk is not None:
            self.server.disk.close(WAIT_S)

    def die(self, *, writes: int = 0) -> None:
        """As kill -9 stops a server, after so many more calls of its writer."""

        self.engine.disarm()
        self.seam.die(writes)
        if self.worker.ready and self.worker._thread.is_alive():
            self.worker.order(killed)  # type: ignore[arg-type]
        # Nobody hears of this end: the thread is dead by then, or dies of that order.
        self.worker._thread.join(WAIT_S)
        assert not self.worker._thread.is_alive()
        self._sinks = []
        if self.server.disk is not None:
            self.server.disk.close(WAIT_S)
        self.seam.live()

    def start(self) -> None:
        """Another process, on what the last one left."""
        self.server = Server.start(self.engine, self.setup)

    # -- turns --------------------------------------------------------------------------------

    def ask(self, talk: Conversation, ask: Ask) -> Finished | Failed:
        """One turn, compared with a cold run of its prompt. The worker is idle afterwards."""
        guest, guests = ask.guest, []
        host = self.prepared(talk, ask)
        if ask.cancel is not None:
            self.engine.when(*ask.cancel, host.item.cancel.cancel)
        if guest is not None:
            leave = host.item.cancel.cancel if guest.ends_host else None
            visitor = self.prepared(guest.talk, guest.ask, leave)
            self.engine.when(*guest.at, lambda: guests.append(self.submitted(visitor)))
        self.submitted(host)
        end = host.sink.wait()
        turns = [host, *guests]
        for turn in guests:
            turn.sink.wait()
        self.guest_end = guests[0].sink.the_end() if guests else None
        self.engine.disarm()
        self.last_prompt, self.last_output = host.prompt, host.sink.tokens
        assert self.worker.health()["faults"] == 0
        self.do(self.store.check)
        for turn in turns:
            self._check(turn)
        return end

    def ask_and_die(
        self, talk: Conversation, ask: Ask, at: tuple[str, int], writes: int
    ) -> Finished | Failed | None:
        """The process is killed inside that call of the turn, or after the turn if there is none.

        What the client had heard by then is compared with a cold run; the end, if it heard of one.
        """
        turn = self.prepared(talk, ask)

        def dies() -> None:
            self.seam.die(writes)
            killed()

        self.engine.when(*at, dies)
        self.submitted(turn)
        until = time.monotonic() + WAIT_S
        while self.worker._thread.is_alive() and not turn.sink.has_ended:
            assert time.monotonic() < until, "the turn neither ended nor died"
            self.worker._thread.join(0.01)
        self.die(writes=writes)
        heard = turn.sink
        sampling = turn.item.request.sampling
        self.ledger.add(
            self.cold.compare(
                turn.prompt.tokens,
                sampling,
                heard.tokens,
                heard.logprobs,
                turn.item.request.thinking,
            )
        )
        return heard.the_end() if heard.has_ended else None

    def prepared(
        self, talk: Conversation, ask: Ask, on_first: Callable[[], None] | None = None
    ) -> Pending:
        tokenizer, prompts, end_tokens = texts()
        chain = prompts.chain(talk)
        named = None if ask.session_id is None else self.known(ask.session_id)
        record = best_record(Subject(talk, ask.namespace, named), chain, self.transcripts)
        prompt = prompts.build(talk, record, chain)
        output = OutputSpec(talk.tools, ask.stop, prompt.starts_in_reasoning)
        thinking = None
        if ask.thinking is not None:
            thinking = ThinkingBudget(tokenizer, output, ask.thinking)
        request = TurnRequest(
            f"req-{next(_names)}",
            ask.namespace,
            prompt,
            replace(ask.sampling, end_tokens=end_tokens),
            ask.max_tokens,
            output,
            ask.pin,
            ask.session_id,
            thinking=thinking,
        )
        sink = Collector(on_first)
        return Pending(ask, prompt, WorkItem(request, time.monotonic(), sink, CancelToken()), sink)

    def submitted(self, turn: Pending) -> Pending:
        self.worker.submit(turn.item)
        self._sinks.append(turn.sink)
        return turn

    def _check(self, turn: Pending) -> None:
        ask, prompt, sink, end = turn.ask, turn.prompt, turn.sink, turn.sink.the_end()
        sampling, output = turn.item.request.sampling, sink.tokens
        thinking = turn.item.request.thinking
        # A turn that was let in, or that its guest outlived, may have left its own state.
        hot = self.sessions.hot is not None and self.sessions.hot.id == end.metrics.session_id
        if isinstance(end, Failed):
            assert end.error.status == 499, f"the turn failed: {end.error.message}"
            assert not hot, "a turn that was not done left its state hot"
        else:
            _assert_ended_in_its_place(output, end, ask, sampling.end_tokens)
        # Idle: the terminal event is the last that the worker does for a turn.
        engine, more, state = self.engine.engine, GoneOn(), None
        strict = self.setup.exact
        if hot:
            assert engine.position == len(prompt.tokens) + len(output) - 1
            state = live_bits(engine) if strict else None
            if ask.on:
                more = self._go_on(prompt, sampling, output, thinking)
        action = end.metrics.prefix_action
        try:
            if state is None and not more.tokens and not strict:
                logs = sink.logprobs
                self.ledger.add(self.cold.compare(prompt.tokens, sampling, output, logs, thinking))
            else:
                self._follow(turn, state, more)
        except AssertionError as error:
            error.add_note(f"after {action}, {len(prompt.tokens)} prompt tokens, {sampling}")
            raise
        if isinstance(end, Failed):
            self.ledger.cancelled += 1
        elif action is not None:
            self.ledger.actions[PrefixAction(action)] += 1
        if end.metrics.restored_from is not None:
            self.ledger.tiers[end.metrics.restored_from] += 1
        self.ledger.parked += end.metrics.parks > 0

    def _follow(self, turn: Pending, state: TorchCapsule | None, more: GoneOn) -> None:
        strict, request, sink = self.setup.exact, turn.item.request, turn.sink
        self.cold.start(turn.prompt.tokens, request.sampling, request.thinking)
        self.ledger.add(self.cold.follow(sink.tokens, sink.logprobs, strict=strict))
        if state is not None:
            assert_same_bits(state, self.cold.state())
            self.ledger.states += 1
        self.ledger.add(self.cold.follow(more.tokens, more.logprobs, strict=strict))

    def _go_on(
        self,
        prompt: Prompt,
        sampling: Sampling,
        output: list[int],
        thinking: ThinkingBudget | None,
    ) -> GoneOn:
        """What the hot state says next, up to `ON` tokens; the state is put back afterwards."""
        engine = self.engine.engine
        parked = live_bits(engine)
        decided = np.array(output, dtype=np.int32)
        alone = replace(sampling, end_tokens=(), top_logprobs=0)
        rule = None if thinking is None else thinking.follow(None)
        engine.begin(alone, prompt.tokens, decided, rule)
        more = GoneOn()
        while len(more.tokens) < ON - len(output):
            chunk = engine.step()
            more.tokens += chunk.tokens
            more.logprobs += chunk.logprobs
        engine.restore(parked)
        return more


def continued(known: KnownSession, *new: Message) -> Conversation:
    """The session's conversation with new messages behind it, as the API makes it."""
    assert known.conversation is not None
    return replace(known.conversation, messages=(*known.conversation.messages, *new))


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
    cold: TorchEngine | ColdRun,
    ledger: Ledger,
    *,
    seam: DiskSeam | None = None,
    **setup: Any,
) -> Iterator[Desk]:
    """A started desk; `setup` are fields of `Setup`. Its worker is stopped and its accounts checked
    at the end."""
    chosen = Setup(**setup)
    engine = Wire(hot)
    cold_run = cold if isinstance(cold, ColdRun) else ColdRun(cold)
    server = Server.start(engine, chosen)
    made = Desk(engine, chosen, server, cold_run, ledger, seam or DiskSeam())
    try:
        yield made
    finally:
        made.stop()
    made.store.check()
