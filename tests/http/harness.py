"""A whole server on a real loopback socket, over any engine: for tests of the wire.

`serving(engine)` composes the text layer of the embedded checkpoint, the serving layer and the api
as the command line does, and gives clients for it. `Replies` makes the fake engine speak.
"""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai

import capserve
from capserve.api.app import create_app
from capserve.api.server import bind, running
from capserve.api.state import ModelInfo, SamplingDefaults, ServerState
from capserve.engine.seam import Engine, TokenArray
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.disk.tier import DiskTier
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.sessions.archive import Archive, revive
from capserve.serving.sessions.desk import SessionDesk
from capserve.serving.sessions.orders import SessionOrder
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.turn import Delta, Failed, Finished, ResultSink, TurnEvent, WorkItem
from capserve.serving.watch import Watch
from capserve.serving.worker import EngineWorker
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.grammar import GrammarCompiler
from capserve.text.output import TurnOutput
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

NAME = "nano"
NANO = Path(capserve.__file__).parent / "nano"
DISK_BYTES = 1 << 30
WAIT_S = 20.0
"""Longest that a test waits for something that should happen at once."""


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(NANO)


@functools.cache
def template() -> ChatTemplate:
    return ChatTemplate.from_dir(NANO)


@functools.cache
def end_tokens() -> tuple[int, ...]:
    return tuple(json.loads((NANO / "generation_config.json").read_text())["eos_token_id"])


@functools.cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), end_tokens())


def spelled(tokens: Iterable[int]) -> str:
    """The text of these tokens, control tokens included."""
    return b"".join(tokenizer().token_bytes(int(token)) for token in tokens).decode()


class Replies:
    """What the fake engine says: a reply by the last user turn's text, else an echo of it.

    A reply is the model's raw text after the generation prompt; the end token is added.
    """

    def __init__(self) -> None:
        self.say: dict[str, str] = {}

    def __call__(self, prompt: TokenArray) -> Sequence[int]:
        text = spelled(prompt)
        asked = text.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>", 1)[0]
        thinks = text.endswith("<think>\n")
        raw = next((reply for key, reply in self.say.items() if key in asked), None)
        if raw is None:
            thought = f"Thinking of {asked}\n</think>\n\n" if thinks else ""
            raw = f"{thought}I heard: {asked}"
        return [*tokenizer().encode(raw).tolist(), end_tokens()[0]]


def fake_engine(replies: Replies | None = None, *, max_positions: int = 4096) -> FakeEngine:
    """A fake with the embedded checkpoint's vocabulary."""
    limits = fake_limits(vocab_size=tokenizer().vocab_size, max_positions=max_positions)
    return FakeEngine(limits, replies or Replies())


@dataclass(frozen=True)
class _Noting:
    """A sink that keeps what the real one was told: tokens in `said`; `note` hears the end."""

    sink: ResultSink
    said: list[int]
    note: Callable[[Finished | Failed], None]

    def deliver(self, event: TurnEvent) -> None:
        if isinstance(event, Delta):
            self.said.extend(event.tokens)
        self.sink.deliver(event)
        if not isinstance(event, Delta):
            self.note(event)


class Watched:
    """The worker as the api sees it, keeping what was submitted and how it ended."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self.items: list[WorkItem] = []
        self.said: list[list[int]] = []
        """Tokens of each item's reply, so far."""
        self.ends: list[Finished | Failed] = []

    def submit(self, item: WorkItem) -> None:
        said: list[int] = []
        self._worker.submit(replace(item, sink=_Noting(item.sink, said, self._note)))
        item.cancel.subscribe(self._notify)
        with self._changed:
            self.items.append(item)
            self.said.append(said)
            self._changed.notify_all()

    def _note(self, event: Finished | Failed) -> None:
        with self._changed:
            self.ends.append(event)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), f"never happened: {what}"

    def wait_taken(self, count: int) -> WorkItem:
        """The `count`-th turn that was accepted, once it is."""
        self.wait_for(lambda: len(self.items) >= count, f"{count} turns accepted")
        return self.items[count - 1]

    def wait_cancelled(self, item: WorkItem) -> None:
        self.wait_for(lambda: item.cancel.cancelled, "the turn is cancelled")

    def wait_idle(self) -> None:
        """Every accepted turn has had its terminal event."""
        self.wait_for(lambda: len(self.ends) == len(self.items), "all turns ended")

    def order(self, order: SessionOrder) -> Future[Any]:
        return self._worker.order(order)

    def depth(self) -> int:
        return self._worker.depth()

    def health(self) -> dict[str, Any]:
        return self._worker.health()

    @property
    def ready(self) -> bool:
        return self._worker.ready


@dataclass(frozen=True)
class Served:
    """A running server and the ways to talk to it."""

    url: str
    state: ServerState
    worker: Watched
    http: httpx.Client
    disk: DiskTier | None
    store: CapsuleStore

    def post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def post_raw(self, body: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return self.http.post("/v1/chat/completions", content=body, headers=headers)

    @contextmanager
    def stream(self, word: str) -> Iterator[httpx.Response]:
        body = {**chat_body([user(word)]), "stream": True}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            yield response

    def events(self, body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        """All data lines of a stream, and those that are chunks, parsed."""
        body = {**body, "stream": True}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return lines, [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]

    def wait_ready(self) -> None:
        """A worker that broke down tells its clients first and heals then."""
        until = time.monotonic() + WAIT_S
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < until, "never ready again"

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    @contextmanager
    def raw(self, body: dict[str, Any], receive_buffer_bytes: int = 0) -> Iterator[socket.socket]:
        """A connection that has sent this request and read nothing; closed at the block's end."""
        host, port = self.url.removeprefix("http://").split(":")
        content = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        with socket.socket() as sock:
            if receive_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            sock.settimeout(WAIT_S)
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + content)
            yield sock


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat_body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": NAME, "messages": messages}


def small_buffers() -> socket.socket:
    """A listener whose connections fill up after some kilobytes: a stalled reader shows soon."""
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return listener


@contextmanager
def serving(
    engine: Engine,
    *,
    api_keys: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    watch: Watch | None = None,
    heartbeat_s: float = 5.0,
    listener: socket.socket | None = None,
    drafts: int = 3,
    checkpoint_interval: int = 2048,
    capsule_dir: Path | None = None,
    max_import_bytes: int = 64 << 20,
    **limits: Any,
) -> Iterator[Served]:
    """A server over `engine` while the block runs. `limits` are fields of `Limits`.

    With `capsule_dir` it has a disk tier there, and begins with what the last one left.
    """
    size = engine.limits.max_positions
    bounds = Limits(**{"max_prompt_tokens": size, "max_output_tokens": size, **limits})
    prompts = PromptBuilder(tokenizer(), template())
    transcripts, metrics = Transcripts(), MetricsLog()
    sessions = SessionRegistry(bounds.max_active_sessions, bounds.session_idle_ttl_s)
    disk = None
    if capsule_dir is not None:
        disk = DiskTier.open(capsule_dir, engine.limits.fingerprint, DISK_BYTES)
    store = CapsuleStore(engine, bounds.capsule_budget_bytes, disk)
    archive, keeper = Archive(transcripts, disk), Keeper(engine, store, sessions)
    worker = EngineWorker(
        engine,
        bounds,
        AutoPrefixPolicy(engine.limits, checkpoint_interval=checkpoint_interval),
        store,
        sessions,
        transcripts,
        metrics,
        lambda spec: TurnOutput(spec, tokenizer(), end_tokens()),
        prompts,
        archive=archive,
        desk=SessionDesk(engine, store, keeper, sessions, transcripts, archive, prompts),
        watch=watch,
    )
    if disk is not None:
        revive(sessions, transcripts, store, disk, time.time())
    watched = Watched(worker)
    generation = json.loads((NANO / "generation_config.json").read_text())
    state = ServerState(
        worker=watched,
        prompts=prompts,
        tokenizer=tokenizer(),
        grammars=grammars(),
        transcripts=transcripts,
        limits=bounds,
        metrics=metrics,
        model=ModelInfo(
            served_names=(NAME,),
            max_model_len=size,
            vocab_size=engine.limits.vocab_size,
            max_drafts=engine.limits.max_drafts,
            default_drafts=drafts,
            end_tokens=end_tokens(),
            defaults=SamplingDefaults.from_generation_config(generation),
        ),
        engine=engine.limits,
        max_import_bytes=max_import_bytes,
        api_keys=api_keys,
        cors_origins=cors_origins,
        heartbeat_s=heartbeat_s,
    )
    worker.start()
    try:
        with (
            running(create_app(state), listener=listener) as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            yield Served(url, state, watched, client, disk, store)
    finally:
        assert worker.stop(WAIT_S), "the worker did not stop"
        if disk is not None:
            disk.close(WAIT_S)
