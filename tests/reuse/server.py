"""What does one server process have in memory? Wired as the command line wires it, on a real
engine, without its wire."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from capserve.nano import checkpoint_dir
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.disk.tier import DiskTier
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.prefix import AutoPrefixPolicy, Rates
from capserve.serving.rates import RateMeter
from capserve.serving.sessions.archive import Archive, revive
from capserve.serving.sessions.desk import SessionDesk
from capserve.serving.sessions.orders import SessionOrder
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.worker import EngineWorker
from capserve.text.output import TurnOutput
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer
from tests.reuse.wire import Wire

SLOW = Rates(prefill_ms_per_token=500.0, decode_ms_per_token=500.0)
"""Far slower than any machine: a schedule that believes it never sees a turn outlive its estimate,
so that what it decides does not depend on this machine's speed."""


@dataclass(frozen=True)
class Setup:
    """What the person who starts the server chose."""

    budget_bytes: int = 256 << 20
    checkpoint_interval: int = 128
    max_active_sessions: int = 64
    exact: bool = False
    schedule: Literal["fair", "fifo"] = "fair"
    directory: Path | None = None
    disk_bytes: int = 1 << 30


@cache
def texts() -> tuple[Tokenizer, PromptBuilder, tuple[int, ...]]:
    """Of the embedded checkpoint: tokenizer, prompts, end tokens."""
    path = checkpoint_dir()
    tokenizer = Tokenizer.from_dir(path)
    generation = json.loads((path / "generation_config.json").read_text())
    prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path))
    return tokenizer, prompts, tuple(generation["eos_token_id"])


class _Orders:
    """Carries out orders, and whatever a test wants done in the worker's thread."""

    def __init__(self, desk: SessionDesk) -> None:
        self._desk = desk

    def execute(self, order: SessionOrder | Callable[[], Any]) -> Any:
        return order() if callable(order) else self._desk.execute(order)


@dataclass(frozen=True)
class Server:
    worker: EngineWorker
    transcripts: Transcripts
    store: CapsuleStore
    sessions: SessionRegistry
    disk: DiskTier | None

    @classmethod
    def start(cls, engine: Wire, setup: Setup) -> Server:
        tokenizer, prompts, end_tokens = texts()
        size = engine.limits.max_positions
        limits = Limits(
            max_prompt_tokens=size,
            max_output_tokens=size,
            max_active_sessions=setup.max_active_sessions,
            capsule_budget_bytes=MappingProxyType({"host": setup.budget_bytes}),
            schedule=setup.schedule,
            # Whoever comes while another one runs is let in, if shorter.
            fair_share=0.99,
            min_slice_ms=0.0,
            short_turn_ms=float("inf"),
        )
        disk = None
        if setup.directory is not None:
            fingerprint = engine.limits.fingerprint
            disk = DiskTier.open(setup.directory, fingerprint, setup.disk_bytes)
        engine.engine.reset()  # a process begins with nothing
        store = CapsuleStore(engine, limits.capsule_budget_bytes, disk)
        sessions = SessionRegistry(limits.max_active_sessions, limits.session_idle_ttl_s)
        transcripts = Transcripts()
        archive, keeper = Archive(transcripts, disk), Keeper(engine, store, sessions)
        desk = SessionDesk(engine, store, keeper, sessions, transcripts, archive, prompts)
        worker = EngineWorker(
            engine,
            limits,
            AutoPrefixPolicy(engine.limits, setup.exact, setup.checkpoint_interval),
            store,
            sessions,
            transcripts,
            MetricsLog(),
            lambda spec: TurnOutput(spec, tokenizer, end_tokens),
            prompts,
            archive=archive,
            desk=_Orders(desk),
            # Plans must not depend on this machine's speed.
            meter=RateMeter(None if disk is None else SLOW, weight=0.0),
            idle_check_s=600.0,  # upkeep would look at the engine while a test does
        )
        if disk is not None:
            revive(sessions, transcripts, store, disk, time.time())
        worker.start()
        return cls(worker, transcripts, store, sessions, disk)
