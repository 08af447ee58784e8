"""How do settings become a running server?

The one place that knows every layer: it loads the checkpoint, makes engine, text, serving and api,
and hands each only what it needs. `assemble` starts nothing; `serving` runs it all on a free port
for as long as a block lasts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from starlette.types import ASGIApp

from capserve.api.app import create_app
from capserve.api.server import running
from capserve.api.state import ModelInfo, SamplingDefaults, ServerState
from capserve.cli.access import api_keys
from capserve.cli.models import resolve_model
from capserve.config import Settings
from capserve.engine.kernels.sampling.buffers import MAX_ENDS
from capserve.engine.memory import MemoryPlan
from capserve.engine.runtime import TorchEngine, plan_memory
from capserve.engine.seam import MAX_DRAFTS, EngineLimits
from capserve.errors import StartupError
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.disk.tier import DiskTier, default_capsule_dir, pending_bound
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.sessions.archive import Archive, revive
from capserve.serving.sessions.desk import SessionDesk
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.watch import Watch
from capserve.serving.worker import EngineWorker
from capserve.text.grammar import GrammarCompiler
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

log = logging.getLogger("capserve.capsules")

MIB = 2**20

CLOSE_TIMEOUT_S = 30.0
"""For what waits to be written when the server stops. Longer than a slow disk needs for the last
capsules; what is late then is lost, and read again by the next server."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and how much there is."""

LOADING, WARMING = "loading", "warming up"
"""Bytes read, and pieces of a card's step made ready."""


@dataclass(frozen=True)
class Assembly:
    """A server that is ready to start."""

    path: Path
    name: str
    """As clients call the model."""
    worker: EngineWorker
    state: ServerState
    app: ASGIApp
    disk: DiskTier | None
    """Where its capsules outlive it; None: nowhere."""

    def stop(
        self, timeout_s: float | None = None, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> bool:
        """First the worker, which makes the last rows, then the disk, which writes them.

        False when the worker is still busy after `timeout_s`.
        """
        stopped = self.worker.stop(timeout_s)
        if self.disk is not None:
            self.disk.close(close_timeout_s)
        return stopped


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    assembly: Assembly
    url: str
    """Of the API, `/v1` included."""


def load_engine(
    settings: Settings, path: Path, vocab: int, progress: OnProgress | None = None
) -> TorchEngine:
    """A fresh engine on the checkpoint in `path`. Raises StartupError's children."""
    return TorchEngine.load(
        path,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        max_drafts=MAX_DRAFTS,  # what a request may ask for; --drafts is what it gets by default
        threads=settings.threads,
        vocab=vocab,
        capsule_budget_bytes=settings.capsule_budget_bytes,
        gpu_budget_bytes=settings.gpu_budget_bytes,
        pending_bytes=_pending_bytes(settings),
        progress=None if progress is None else partial(progress, LOADING),
        warming=None if progress is None else partial(progress, WARMING),
    )


def memory_plan(settings: Settings, path: Path) -> MemoryPlan:
    """What `load_engine` would take, without reading a weight."""
    return plan_memory(
        path,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        vocab=Tokenizer.from_dir(path).vocab_size,
        capsule_budget_bytes=settings.capsule_budget_bytes,
        gpu_budget_bytes=settings.gpu_budget_bytes,
        pending_bytes=_pending_bytes(settings),
    )


def plan_line(plan: MemoryPlan) -> str:
    """The plan for a person: both numbers of each memory, then where the bytes go."""
    return "needs " + " and ".join(
        f"{side.total_bytes / MIB:,.0f} MiB of {side.available_bytes / MIB:,.0f} MiB "
        f"available{side.where} ({side.parts()})"
        for side in plan.sides
    )


def assemble(
    settings: Settings, progress: OnProgress | None = None, engine: TorchEngine | None = None
) -> Assembly:
    """Load the model and wire the server around it. Raises StartupError's children.

    With `engine`, which must know the tokenizer's ids, only texts are read from the checkpoint.
    """
    keys = api_keys(settings)
    path, found_name = resolve_model(settings.model)
    name = settings.served_model_name or found_name
    tokenizer = Tokenizer.from_dir(path)
    override = None if settings.chat_template is None else Path(settings.chat_template)
    prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path, override))
    generation = read_generation_config(path)
    end_tokens = _end_tokens(generation, prompts, tokenizer)
    # Text before weights: a broken template is found in milliseconds, a model takes minutes.
    if engine is None:
        engine = load_engine(settings, path, tokenizer.vocab_size, progress)
    if engine.limits.device != "cpu" and len(end_tokens) > MAX_ENDS:
        raise StartupError(
            f"the model has {len(end_tokens)} end tokens; a card's step takes {MAX_ENDS}"
        )
    limits = _limits(settings, engine.limits)
    transcripts, metrics = Transcripts(), MetricsLog()
    model = ModelInfo(
        served_names=(name,),
        max_model_len=engine.limits.max_positions,
        vocab_size=engine.limits.vocab_size,
        max_drafts=engine.limits.max_drafts,
        default_drafts=settings.drafts,
        end_tokens=end_tokens,
        defaults=SamplingDefaults.from_generation_config(generation),
        seed=settings.seed,
    )
    # After all else that may refuse, so that nobody has to give its directory back.
    disk = open_disk(settings, engine.limits)
    store = CapsuleStore(engine, limits.capsule_budget_bytes, disk)
    sessions = SessionRegistry(limits.max_active_sessions, limits.session_idle_ttl_s)
    archive = Archive(transcripts, disk)
    keeper = Keeper(engine, store, sessions)
    worker = EngineWorker(
        engine,
        limits,
        AutoPrefixPolicy(engine.limits, settings.exact, settings.checkpoint_interval),
        store,
        sessions,
        transcripts,
        metrics,
        _output_maker(tokenizer, end_tokens),
        prompts,
        archive=archive,
        desk=SessionDesk(engine, store, keeper, sessions, transcripts, archive, prompts),
        watch=Watch(settings.watchdog_s),
        prepare=engine.attach,
    )
    if disk is not None:
        began = time.monotonic()
        back = revive(sessions, transcripts, store, disk, time.time())
        elapsed_ms = (time.monotonic() - began) * 1e3
        log.info(
            "%s: %d sessions, %d turns, %d capsules from before, in %.0f ms",
            *(disk.directory, back.sessions, back.turns, back.capsules, elapsed_ms),
        )
    state = ServerState(
        worker=worker,
        prompts=prompts,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, end_tokens),
        transcripts=transcripts,
        limits=limits,
        metrics=metrics,
        model=model,
        engine=engine.limits,
        max_import_bytes=settings.max_import_bytes or max(1, settings.capsule_budget_bytes),
        api_keys=keys,
        cors_origins=settings.cors_origin,
        heartbeat_s=settings.heartbeat_s,
    )
    app = create_app(state)
    # A full collection over all that start-up made stops every thread for 0.2 s (docs/log.md).
    gc.collect()
    gc.freeze()
    return Assembly(path, name, worker, state, app, disk)


def capsule_directory(settings: Settings, fingerprint: str) -> Path:
    """Where a server with these settings keeps what outlives it: one directory an engine."""
    root = settings.capsule_dir
    return (default_capsule_dir() if root is None else Path(root)) / fingerprint[:16]


def open_disk(settings: Settings, engine: EngineLimits) -> DiskTier | None:
    """The disk tier that `settings` ask for, or None. Raises StartupError, also when another server
    has its directory."""
    if settings.disk_budget_bytes == 0:
        return None
    directory = capsule_directory(settings, engine.fingerprint)
    try:
        return DiskTier.open(
            directory, engine.fingerprint, settings.disk_budget_bytes, _pending_bytes(settings)
        )
    except StartupError as error:
        raise StartupError(
            f"{error.message}. Give this server another directory with --capsule-dir, or none with "
            "--disk-budget 0.",
            param="capsule_dir",
        ) from None


def _pending_bytes(settings: Settings) -> int:
    """Most that may wait for the disk."""
    return pending_bound(settings.capsule_budget_bytes) if settings.disk_budget_bytes else 0


def private_settings(settings: Settings) -> Settings:
    """Of a server that lives as long as a command: nothing of it stays on disk, unless the disk
    tier was asked for in so many words."""
    changes: dict[str, Any] = {
        "api_key": (),
        "api_key_file": None,
        "cors_origin": (),
        "host": "127.0.0.1",
        "port": 0,
    }
    if not settings.model_fields_set & {"disk_budget_bytes", "capsule_dir"}:
        changes["disk_budget_bytes"] = 0
    return settings.model_copy(update=changes)


@contextlib.contextmanager
def serving(settings: Settings, console: Console) -> Iterator[Running]:
    """A server of one's own on a free loopback port, without keys, while the block runs."""
    assembly = assemble_visibly(private_settings(settings), console)
    assembly.worker.start()
    try:
        with running(assembly.app) as url:
            yield Running(assembly, f"{url}/v1")
    finally:
        assembly.stop()


def assemble_visibly(settings: Settings, console: Console) -> Assembly:
    """`assemble` under progress bars: bytes read, then what a card's step is made of."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {LOADING: bar.add_task(LOADING, total=None)}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        assembly = assemble(settings, progress)
        warmed = bar.tasks[tasks[WARMING]] if WARMING in tasks else None
    if warmed is not None:
        console.print(f"captured {warmed.total:.0f} graphs in {warmed.finished_time:.1f} s")
    return assembly


def read_generation_config(path: Path) -> dict[str, Any]:
    """The checkpoint's own defaults; {} when it has none."""
    file = path / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise StartupError(f"{file} holds a {type(config).__name__}, not an object")
    return config


def _end_tokens(
    generation: dict[str, Any], prompts: PromptBuilder, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Ids that end a reply: the checkpoint's list, and what its template closes a turn with."""
    listed = generation.get("eos_token_id")
    ids = list(listed) if isinstance(listed, list) else [] if listed is None else [listed]
    if prompts.marks is not None:
        ids.append(tokenizer.specials[prompts.marks.end])
    if not ids:
        raise StartupError(
            "the model has no end token: eos_token_id is missing in generation_config.json and "
            "the chat template closes no turn"
        )
    for token in ids:
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise StartupError(
                f"generation_config.json: eos_token_id {token!r} is no token; "
                f"ids are 0 to {tokenizer.vocab_size - 1}"
            )
    return tuple(dict.fromkeys(ids))


def _limits(settings: Settings, engine: EngineLimits) -> Limits:
    context = engine.max_positions
    return Limits(
        max_prompt_tokens=settings.max_prompt_tokens or context,
        max_output_tokens=settings.max_output_tokens or context,
        max_active_sessions=settings.max_active_sessions,
        max_queue_depth=settings.max_num_queued_reqs,
        session_idle_ttl_s=settings.session_idle_ttl_s,
        capsule_budget_bytes=MappingProxyType(_budgets(settings, engine)),
        schedule=settings.schedule,
        fair_share=settings.fair_share,
        min_slice_ms=settings.min_slice_ms,
        short_turn_ms=settings.short_turn_ms,
        max_parked_turns=settings.max_parked_turns,
        max_decode_ms=settings.max_decode_ms,
        max_body_bytes=settings.max_body_bytes,
        stream_stall_timeout_s=settings.stream_stall_timeout_s,
    )


def _budgets(settings: Settings, engine: EngineLimits) -> dict[str, int]:
    """Bytes per tier, of those that this engine has."""
    asked: dict[str, int] = {
        "gpu": settings.gpu_budget_bytes,
        "host": settings.capsule_budget_bytes,
    }
    budgets = {tier: asked[tier] for tier in engine.tiers}
    return budgets | {"disk": int(settings.disk_budget_bytes)}


def _output_maker(
    tokenizer: Tokenizer, end_tokens: tuple[int, ...]
) -> Callable[[OutputSpec], TurnOutput]:
    def make(spec: OutputSpec, /) -> TurnOutput:
        return TurnOutput(spec, tokenizer, end_tokens)

    return make
