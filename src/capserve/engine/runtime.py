"""How does the torch engine keep the seam's promises?

It owns one model, one `State` and the live segments, and moves them one step at a time. All methods
run on the caller's one thread, under inference mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from capserve.engine import memory
from capserve.engine.capsule import LiveSegments, TorchCapsule
from capserve.engine.decode import Decode, HostDecode
from capserve.engine.fingerprint import fingerprint_of
from capserve.engine.history import SEGMENT_TOKENS
from capserve.engine.layers.linear import MAX_ROWS
from capserve.engine.loading import Progress, load_weights
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.parts import PartPool
from capserve.engine.seam import (
    MAX_DRAFTS,
    MAX_TOP_LOGPROBS,
    Capsule,
    CapsulePart,
    Chunk,
    EngineLimits,
    Sampling,
    TokenArray,
    TokenConstraint,
)
from capserve.engine.shelf import Shelf
from capserve.engine.state import State, StateBytes
from capserve.engine.tiers import Tiers
from capserve.errors import ContextLengthError, StartupError

if TYPE_CHECKING:
    from capserve.engine.card_decode import CardDecode
    from capserve.engine.models.qwen3_5_prefill import ChunkNetwork

P = ParamSpec("P")
R = TypeVar("R")


def _inference(method: Callable[P, R]) -> Callable[P, R]:
    return torch.inference_mode()(method)


class TorchEngine:
    """One hot state of one Qwen3.5-family model. Implements `seam.Engine`."""

    def __init__(
        self,
        model: Qwen35,
        *,
        positions: int,
        prefill_chunk: int,
        vocab: int,
        max_drafts: int,
        fingerprint: str,
        card: bool | None = None,
        capture: bool = True,
    ) -> None:
        """card: decode by the card's kernels, as is done on CUDA when None. capture: replay them as
        graphs on CUDA; without it each is launched anew, which gives the same bits."""
        config, dtype, device = model.config, model.dtype, model.device
        on_cuda = device.type == "cuda"
        card = on_cuda if card is None else card
        assert card or not on_cuda, "on CUDA rows are invariant in the card's kernels alone (I7)"
        self._model = model
        self._device = device
        max_drafts = min(max_drafts, MAX_DRAFTS) if model.mtp is not None else 0
        with torch.inference_mode():
            self._state = State(config, dtype, device, positions, for_card=card)
            self._decode: Decode
            self._card: CardDecode | None = None
            self._chunks: ChunkNetwork | None = None
            self._absorb: Callable[[Tensor, int], Tensor]
            if card:
                # their kernels need Triton, which a host without a card may not have
                from capserve.engine.card_decode import CardDecode
                from capserve.engine.models.qwen3_5_prefill import ChunkNetwork

                self._decode = self._card = CardDecode(
                    model, self._state, vocab, max_drafts=max_drafts, capture=capture and on_cuda
                )
                self._chunks = ChunkNetwork(model, self._state, prefill_chunk)
                self._absorb = self._chunks.absorb
            else:
                self._decode = HostDecode(model, self._state, vocab)
                self._absorb = partial(model.absorb, self._state)
        tiers = Tiers(device)
        pool = PartPool(tiers)
        self._live = LiveSegments(self._state, tiers, pool, fingerprint)
        self._shelf = Shelf(self._state, tiers, pool, fingerprint)
        sizes = StateBytes.of(config, dtype)
        self._limits = EngineLimits(
            model_name=config.name,
            vocab_size=vocab,
            max_positions=positions,
            max_drafts=max_drafts,
            prefill_chunk=prefill_chunk,
            grid=prefill_chunk,
            small_state_bytes=sizes.small_state,
            kv_bytes_per_token=sizes.kv_per_token,
            segment_tokens=SEGMENT_TOKENS,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            tiers=tiers.names,
            fingerprint=fingerprint,
        )
        self._prefill_threads = torch.get_num_threads()
        self._position = 0

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        max_drafts: int = MAX_DRAFTS,
        threads: int | None = None,
        vocab: int | None = None,
        capsule_budget_bytes: int = 0,
        gpu_budget_bytes: int = 0,
        pending_bytes: int = 0,
        progress: Progress | None = None,
        warming: Progress | None = None,
        card: bool | None = None,
        capture: bool = True,
    ) -> TorchEngine:
        """An engine for the checkpoint in `path`, a Hugging Face directory.

        dtype `auto` is float32 on CPU and bfloat16 on CUDA. threads: of prefill on CPU; one less
        than the cores when None, for the server's event loop and the agent's own work. vocab: ids
        that the tokenizer has; the rest of the head is padding. progress: told of bytes read;
        warming: of pieces of a card's step made ready. card, capture: see `TorchEngine`. Raises
        CheckpointError, or
        MemoryBudgetError before any weight is read.
        """
        config, chosen, where, positions, ids = _resolve(path, dtype, device, max_model_len, vocab)
        memory.plan(
            config,
            chosen,
            where,
            positions=positions,
            prefill_chunk=prefill_chunk,
            vocab=ids,
            capsule_budget_bytes=capsule_budget_bytes,
            gpu_budget_bytes=gpu_budget_bytes,
            pending_bytes=pending_bytes,
        ).check(config.name)
        if where.type == "cpu":
            torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) - 1))
        with torch.inference_mode():
            config, weights = load_weights(path, config, chosen, progress, where)
            model = Qwen35(config, weights, where, vocab=ids, positions=positions)
        engine = cls(
            model,
            positions=positions,
            prefill_chunk=prefill_chunk,
            vocab=ids,
            max_drafts=max_drafts,
            fingerprint=fingerprint_of(path, chosen, where, prefill_chunk),
            card=card,
            capture=capture,
        )
        engine.warm_up(warming)
        return engine

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def position(self) -> int:
        return self._position

    @property
    def graph_capture_count(self) -> int:
        return 0 if self._card is None else self._card.captured

    def warm_up(self, told: Progress | None = None) -> None:
        """Run everything once, so that no live request pays for first calls: compiled loops and
        kernels, graphs, the libraries' own tables, memory that is touched for the first time."""
        room = self._limits.max_positions
        self.attach()
        tokens = np.zeros(max(1, min(self._limits.prefill_chunk, room - MAX_ROWS)), np.int32)
        self.extend(tokens)
        if self._card is not None:
            with torch.inference_mode():
                self._card.record(told)
        for drafts in {0, self._limits.max_drafts}:
            self.begin(Sampling(temperature=1.0, top_k=2, drafts=drafts), tokens)
            self.step()
            if self._position < room:
                self.step()
        if self._card is None:
            self._state.accepted_rows = MAX_ROWS  # a fold, whatever the drafts were worth
        self.restore(self.snapshot())
        self.reset()
        self._live.written_from(0)  # what ran here is no history of anybody

    @_inference
    def attach(self) -> None:
        """Make ready for the thread that calls from now on, with nothing absorbed yet: cuDNN's
        plans belong to the thread that made them, and take tenths of a second. Nothing on CPU."""
        if self._chunks is not None and self._device.type == "cuda":
            assert self._position == 0, "a thread takes over an engine before its first token"
            self._chunks.warm_up()
            self._state.reset()
            self._live.written_from(0)

    @_inference
    def reset(self) -> None:
        self._drop_unbuilt_slots()
        self._state.reset()
        self._live.history.reset()
        self._moved_to(0)

    @_inference
    def extend(self, tokens: TokenArray) -> None:
        assert tokens.ndim == 1, "extend takes a 1-D array"
        assert len(tokens) >= 1, "extend takes at least one token"
        end = self._position + len(tokens)
        if end > self._limits.max_positions:
            raise ContextLengthError(
                f"{end} tokens do not fit a context of {self._limits.max_positions} tokens"
            )
        self._settle()
        self._decode.forget()
        self._use_threads(self._prefill_threads)
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int32)).to(self._device)
        first = self._position
        while self._position < end:
            stop = self._limits.chunk_end(self._position, end)
            chunk = ids[self._position - first : stop - first]
            self._live.written_from(self._position)
            hidden = self._absorb(chunk, self._position)
            self._state.hidden[0] = hidden[-1]
            self._live.history.prefilled(tokens[self._position - first : stop - first])
            self._live.absorbed()
            self._position = stop

    @_inference
    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: TokenArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        _check_sampling(sampling, self._limits)
        decided = [] if output is None else output.tolist()
        if decided:
            assert self._position == len(context) + len(decided) - 1, "output is not this state's"
        self._settle()
        self._decode.begin(sampling, context, decided, constraint)

    @_inference
    def step(self, most: int = MAX_DRAFTS + 1) -> Chunk:
        self._use_threads(1)
        assert self._position >= 1, "step needs a token to continue from"
        assert most >= 1, f"step decides at least one token, not {most}"
        if self._decode.pending is not None:
            room = self._limits.max_positions - self._position
            if room < 1:
                raise ContextLengthError(
                    f"position {self._position} is the end of a context of "
                    f"{self._limits.max_positions} tokens"
                )
            most = min(most, room)
            self._live.written_from(self._position)
        step = self._decode.step(self._position, most)
        if step.absorbed:
            self._position += len(step.absorbed)
            self._live.history.decoded(step.absorbed)
            self._live.absorbed()
        return step.chunk

    @_inference
    def snapshot(self) -> Capsule:
        self._settle()
        return self._live.snapshot()

    @_inference
    def restore(self, capsule: Capsule) -> int:
        assert isinstance(capsule, TorchCapsule), "a capsule of another engine"
        self._drop_unbuilt_slots()
        moved = self._live.restore(capsule)
        self._moved_to(capsule.position)
        return moved

    @_inference
    def move(self, capsule: Capsule, tier: str) -> Capsule:
        assert isinstance(capsule, TorchCapsule), "a capsule of another engine"
        return self._shelf.move(capsule, tier)

    @_inference
    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> Capsule:
        return self._shelf.unpack(position, parts, apart)

    def _use_threads(self, count: int) -> None:
        """Prefill takes all threads that it was given. A decode step takes one: its operations are
        so small that parallel regions cost more than they save (kernels/rows_matmul/cpu.py).
        torch's count is the process's: nobody else computes with torch here."""
        if self._device.type == "cpu" and torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _settle(self) -> None:
        self._use_threads(1)
        self._decode.settle(self._position)

    def _moved_to(self, position: int) -> None:
        self._position = position
        self._decode.forget()

    def _drop_unbuilt_slots(self) -> None:
        """The state goes elsewhere: MTP slots that wait are never built, so a segment that holds
        one is not what its name says."""
        if self._decode.unbuilt_slots:
            self._live.written_from(self._position - self._decode.unbuilt_slots)


def _resolve(
    path: Path, dtype: str, device: str, max_model_len: int | None, vocab: int | None
) -> tuple[ModelConfig, torch.dtype, torch.device, int, int]:
    config = ModelConfig.from_dir(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch sees no CUDA device")
    where = torch.device(device)
    if where.type == "cuda":
        _check_card(config)
    if dtype == "auto":
        dtype = "bfloat16" if where.type == "cuda" else "float32"
    chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    positions = max_model_len or config.max_position_embeddings
    if positions > config.max_position_embeddings:
        raise StartupError(
            f"--max-model-len {positions} is more than the checkpoint's "
            f"max_position_embeddings {config.max_position_embeddings}"
        )
    ids = vocab or config.vocab_size
    if ids > config.vocab_size:
        raise StartupError(
            f"the tokenizer has {ids} ids and the checkpoint's vocab_size is {config.vocab_size}"
        )
    return config, chosen, where, positions, ids


def _check_card(config: ModelConfig) -> None:
    """Raises StartupError for what the card's kernels can't run, before a weight is read."""
    if find_spec("triton") is None:
        raise StartupError("--device cuda needs Triton, which is not installed; --device cpu runs")
    for name, size, least in (
        ("head_dim", config.head_dim, 16),
        ("rotary dims", config.rotary_dim, 2),
        ("linear_key_head_dim", config.linear_key_head_dim, 16),
        ("linear_value_head_dim", config.linear_value_head_dim, 16),
    ):
        if size < least or size & (size - 1):
            raise StartupError(
                f"{name} {size}: the card's kernels need a power of two of at least {least}; "
                "--device cpu runs it"
            )


def plan_memory(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    prefill_chunk: int = 512,
    vocab: int | None = None,
    capsule_budget_bytes: int = 0,
    gpu_budget_bytes: int = 0,
    pending_bytes: int = 0,
) -> memory.MemoryPlan:
    """The plan that `TorchEngine.load` with the same arguments would check."""
    config, chosen, where, positions, ids = _resolve(path, dtype, device, max_model_len, vocab)
    return memory.plan(
        config,
        chosen,
        where,
        positions=positions,
        prefill_chunk=prefill_chunk,
        vocab=ids,
        capsule_budget_bytes=capsule_budget_bytes,
        gpu_budget_bytes=gpu_budget_bytes,
        pending_bytes=pending_bytes,
    )


def _check_sampling(sampling: Sampling, limits: EngineLimits) -> None:
    assert 0 <= sampling.drafts <= limits.max_drafts, f"{sampling.drafts} drafts"
    assert sampling.temperature >= 0
    assert sampling.top_k >= 0
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert sampling.repetition_penalty > 0
    assert 0 <= sampling.seed < 2**64
    assert sampling.top_logprobs is None or 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS
    assert all(0 <= token < limits.vocab_size for token, _ in sampling.logit_bias)
