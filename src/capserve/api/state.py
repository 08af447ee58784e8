"""What does the wire need to know of the rest of the server?

One frozen value, made by the composition root. The api holds no state of its own beyond what is in
flight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from capserve import __version__
from capserve.api.schemas import GenerationConfig
from capserve.api.validation import validated
from capserve.engine.seam import EngineLimits
from capserve.errors import InvalidRequestError, StartupError
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog
from capserve.serving.sessions.orders import SessionOrder, SessionResult
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.turn import WorkItem
from capserve.text.grammar import GrammarCompiler
from capserve.text.prompt import PromptBuilder
from capserve.text.tokenizer import Tokenizer


class Worker(Protocol):
    """What the api calls of `EngineWorker`: all of it returns at once, from any thread."""

    def submit(self, item: WorkItem) -> None: ...

    def order(self, order: SessionOrder) -> Future[SessionResult]: ...

    def depth(self) -> int: ...

    def health(self) -> dict[str, Any]: ...

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets: the checkpoint's own recommendation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Read a checkpoint's `generation_config.json`; `do_sample: false` means temperature 0.

        Raises `StartupError`, naming key and value, for one that no request could have either.
        """
        try:
            known = validated(GenerationConfig, dict(config))
        except InvalidRequestError as error:
            raise StartupError(f"generation_config.json: {error.message}") from None
        given = known.model_dump(exclude={"do_sample"}, exclude_none=True)
        defaults = cls(**given)
        # The absent flag counts as false: that is what the file format says.
        return defaults if known.do_sample else replace(defaults, temperature=0.0)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model as its clients see it."""

    served_names: tuple[str, ...]
    """The first one is the name that replies carry when the request had none."""
    max_model_len: int
    """Tokens of prompt and reply together."""
    vocab_size: int
    max_drafts: int
    default_drafts: int
    """K of requests that bring no `flashrt_K`."""
    end_tokens: tuple[int, ...]
    defaults: SamplingDefaults = SamplingDefaults()
    seed: int | None = None
    """Seed of requests that bring none; None gives each a fresh one."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes when the same request may get another answer."""
        parts = (__version__, self.served_names[0], self.max_model_len, self.vocab_size)
        return "fp_" + blake2b(repr(parts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything that the routes use."""

    worker: Worker
    prompts: PromptBuilder
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    """For that tokenizer and the model's end tokens."""
    transcripts: Transcripts
    limits: Limits
    metrics: MetricsLog
    model: ModelInfo
    engine: EngineLimits
    """What an imported session must fit."""
    max_import_bytes: int = 2 << 30
    """Of the file of one session."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    """Whose web pages may call: origins, or `*` for all."""
    heartbeat_s: float = 5.0
    """Longest silence of a stream."""
    started_at: float = field(default_factory=time.monotonic)
