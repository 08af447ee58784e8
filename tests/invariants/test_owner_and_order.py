"""I1 and I2, watched from outside: who touches what, and what is known when news arrives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from capserve.engine.seam import Sampling
from capserve.nano import checkpoint_dir
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.misses import owner_of
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.desk import SessionDesk
from capserve.serving.sessions.orders import ListSessions, SessionPage
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.turn import CancelToken, Delta, TurnEvent, TurnRequest, WorkItem
from capserve.serving.worker import EngineWorker
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Conversation, Message
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

WAIT_S = 20.0
T = TypeVar("T")


def watched(kind: type[T], threads: set[int]) -> type[T]:
    """`kind`, noting the thread of whoever reaches for anything of an instance."""

    def note(self: Any, name: str) -> Any:
        threads.add(threading.get_ident())
        return object.__getattribute__(self, name)

    return type(f"Watched{kind.__name__}", (kind,), {"__getattribute__": note})


class Sink:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def deliver(self, event: TurnEvent) -> None:
        if not isinstance(event, Delta):
            self.ended.set()


@dataclass
class Server:
    worker: EngineWorker
    sessions: SessionRegistry
    prompts: PromptBuilder

    def item(self, words: str, sink: Any) -> WorkItem:
        """A turn of at most 20 tokens."""
        prompt = self.prompts.build(Conversation((Message("user", words),)))
        request = TurnRequest("req", "key/a", prompt, Sampling(drafts=3), 20, OutputSpec())
        return WorkItem(request, time.monotonic(), sink, CancelToken())


@contextmanager
def serving(threads: set[int]) -> Iterator[Server]:
    path = checkpoint_dir()
    tokenizer = Tokenizer.from_dir(path)
    ends = tuple(json.loads((path / "generation_config.json").read_text())["eos_token_id"])
    prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path))
    engine = watched(FakeEngine, threads)(fake_limits(vocab_size=tokenizer.vocab_size))
    # No slice is too short to be interrupted, so that turns do run inside each other here.
    limits = Limits(max_prompt_tokens=4096, max_output_tokens=4096, min_slice_ms=0.0)
    sessions = watched(SessionRegistry, threads)(64, 3600.0)
    store = watched(CapsuleStore, threads)(engine, {"host": 1 << 20})
    transcripts = Transcripts()
    archive = Archive(transcripts)
    keeper = Keeper(engine, store, sessions)
    desk = SessionDesk(engine, store, keeper, sessions, transcripts, archive, prompts)
    worker = EngineWorker(
        engine,
        limits,
        AutoPrefixPolicy(engine.limits),
        store,
        sessions,
        transcripts,
        MetricsLog(),
        lambda spec: TurnOutput(spec, tokenizer, ends),
        prompts,
        archive=archive,
        desk=desk,
    )
    threads.clear()  # until here everything was this thread's own
    worker.start()
    try:
        yield Server(worker, sessions, prompts)
    finally:
        assert worker.stop(WAIT_S), "the worker did not stop"


def test_only_the_workers_thread_touches_engine_sessions_and_store() -> None:
    threads: set[int] = set()
    with serving(threads) as server:

        def client(number: int) -> None:
            for turn in range(3):
                sink = Sink()
                item = server.item(f"client {number} says {turn} " * (20 + 300 * (turn % 2)), sink)
                server.worker.submit(item)
                listed = server.worker.order(ListSessions(owner_of("key/a")))
                server.worker.health()
                server.worker.depth()
                if turn == 1:
                    item.cancel.cancel()
                assert sink.ended.wait(WAIT_S)
                assert isinstance(listed.result(WAIT_S), SessionPage)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(WAIT_S)
        assert server.worker.wait_ready(WAIT_S)
    assert len(threads) == 1, "the engine, the sessions or the store were touched by two threads"
    assert not threads & {threading.get_ident(), *(thread.ident for thread in clients)}


def test_a_chunk_is_in_the_journal_before_its_sink_hears_of_it() -> None:
    with serving(set()) as server:
        told: list[int] = []
        true_when_told: list[bool] = []

        class Reader(Sink):
            def deliver(self, event: TurnEvent) -> None:
                if isinstance(event, Delta):
                    told.extend(event.tokens)
                    journal = server.sessions.views()[-1].tokens.tolist()
                    # A chunk may hold more than the turn's limit lets through.
                    true_when_told.append(journal[prompt : prompt + len(told)] == told)
                super().deliver(event)

        sink = Reader()
        item = server.item("What is true?", sink)
        prompt = len(item.request.prompt.tokens)
        server.worker.submit(item)
        assert sink.ended.wait(WAIT_S)
    assert len(told) == 20
    assert all(true_when_told)
