"""What would the engine do, if a model were a hash?

An honest fake (contract: `capserve.engine.seam`). Its next token is a hash of everything absorbed,
so that a state which is one token off, restored from the wrong capsule or taken from another
conversation shows in the very next token. Drafts are right about two times in three.

For tests it can be stopped at an exact call (`hold`), made to fail at one (`fail`), and made to
speak chosen replies (`script`). A scripted fake can't show wrong reuse in its tokens, so `begin`
compares what it absorbed with the prompt instead and raises `WrongStateError`.

It has no numerics, hence no segmentation: the names of its parts depend on tokens alone. Its packed
parts are files of the real form and of the real size. Like the real engine, `unpack` looks at what
the parts say of themselves and not at their KV: bytes that changed on their way show in `restore`,
as a `WrongStateError`.

The thread of its first call owns it. Any other thread that calls it, or looks at its state, gets
`WrongThreadError`, and the fake remembers it: worker code may swallow the error, a test must not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from capserve.engine.history import DECODED
from capserve.engine.seam import (
    MAX_DRAFTS,
    Capsule,
    CapsulePart,
    Chunk,
    EngineLimits,
    Sampling,
    TokenArray,
    TokenConstraint,
    TokenLogprob,
)
from capserve.errors import CapserveError, ContextLengthError
from capserve.testing.fake_parts import ROOT, FakeCapsule, FakePart, parts_of, read_parts, set_apart

Call = Literal["reset", "extend", "begin", "step", "snapshot", "restore", "move", "unpack"]
Script = Callable[[TokenArray], Sequence[int]]
"""From a prompt to the token ids of the reply; the end token included, if the reply has one."""


class WrongStateError(AssertionError):
    """A turn began on a state that did not absorb its prompt, or a capsule's small state does not
    belong to its KV."""


class WrongThreadError(AssertionError):
    """A thread that does not own the engine reached for it."""


@dataclass
class Gate:
    """Holds one engine call: the engine's thread waits inside the call until `open`."""

    _arrived: threading.Event = field(default_factory=threading.Event)
    _open: threading.Event = field(default_factory=threading.Event)

    def wait_arrived(self, timeout_s: float = 10.0) -> None:
        assert self._arrived.wait(timeout_s), "the engine never made the call that the gate holds"

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self._arrived.set()
        assert self._open.wait(60.0), "nobody opened the gate"


def fake_limits(
    *,
    vocab_size: int = 512,
    max_positions: int = 8192,
    max_drafts: int = 4,
    prefill_chunk: int = 128,
    grid: int = 64,
    small_state_bytes: int = 4096,
    kv_bytes_per_token: int = 16,
    segment_tokens: int = 512,
    tiers: tuple[str, ...] = ("host",),
    fingerprint: str = "fake",
) -> EngineLimits:
    return EngineLimits(
        model_name="fake",
        vocab_size=vocab_size,
        max_positions=max_positions,
        max_drafts=max_drafts,
        prefill_chunk=prefill_chunk,
        grid=grid,
        small_state_bytes=small_state_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        segment_tokens=segment_tokens,
        device="none",
        dtype="hash",
        tiers=tiers,
        fingerprint=fingerprint,
    )


class FakeEngine:
    """One hot state: the bytes of all absorbed tokens, and the fold over them."""

    def __init__(self, limits: EngineLimits | None = None, script: Script | None = None) -> None:
        self._limits = limits or fake_limits()
        self._script = script
        self._parts: weakref.WeakValueDictionary[tuple[bytes, str], FakePart] = (
            weakref.WeakValueDictionary()
        )
        self._traps: list[tuple[Call, int, Callable[[], None]]] = []
        self._counts: dict[Call, int] = {}
        self._lock = threading.Lock()
        # The object, not its ident: an ident is given again once its thread has ended.
        self.owner: threading.Thread | None = None
        """The thread of the first call; None before it. The constructing thread has no claim."""
        self.trespasses: list[str] = []
        """What other threads than the owner tried, in words."""
        self.extended: list[tuple[int, int]] = []
        """Every `extend` as a half-open range: what a test compares with a plan."""
        self._tokens = bytearray()
        self._how = bytearray()
        """int16 a token: how it was absorbed, in the words of `engine/history.py`."""
        self._fold = blake2b(digest_size=16)
        self._root = ROOT
        self._pending: int | None = None
        self._begun = False
        self._sampling = Sampling()
        self._context = b""
        self._output: list[int] = []
        self._constraint: TokenConstraint | None = None
        self._reply: tuple[int, ...] = ()

    # -- what a test can ask for -------------------------------------------------------------

    def when(self, call: Call, at: int, action: Callable[[], None]) -> None:
        """Run `action` inside the `at`-th call of this kind from now on (1 is the next)."""
        assert at >= 1
        with self._lock:
            self._traps.append((call, self.calls(call) + at, action))

    def hold(self, call: Call, at: int = 1) -> Gate:
        """Stop in that call until the gate is opened."""
        gate = Gate()
        self.when(call, at, gate.pass_through)
        return gate

    def fail(self, call: Call, at: int = 1, error: Exception | None = None) -> None:
        """Raise in that call. The state is undefined then, and wrong in this fake, unless `error`
        is one that refuses a call before it starts (E7)."""
        planted = error or RuntimeError(f"planted fault in {call}")

        def break_down() -> None:
            if not isinstance(planted, CapserveError):
                self._absorb(np.array([-1], dtype=np.int32))
            raise planted

        self.when(call, at, break_down)

    def calls(self, call: Call) -> int:
        return self._counts.get(call, 0)

    @property
    def live_segments(self) -> int:
        """KV segments that some capsule keeps alive, in all tiers: a leak shows here."""
        return sum(part.label.kind == "kv" for part in list(self._parts.values()))

    def _enter(self, call: Call) -> None:
        with self._lock:
            if self.owner is None:
                self.owner = threading.current_thread()
        self._refuse_strangers(call)
        with self._lock:
            number = self._counts[call] = self.calls(call) + 1
            due = [trap for trap in self._traps if trap[:2] == (call, number)]
            self._traps = [trap for trap in self._traps if trap not in due]
        for _, _, action in due:
            action()

    def _refuse_strangers(self, what: str) -> None:
        caller = threading.current_thread()
        if self.owner is not None and caller is not self.owner:
            said = f"{what} from thread {caller.name}, the engine belongs to {self.owner.name}"
            self.trespasses.append(said)
            raise WrongThreadError(said)

    # -- the contract ------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def position(self) -> int:
        self._refuse_strangers("position")
        return len(self._tokens) // 4

    @property
    def graph_capture_count(self) -> int:
        self._refuse_strangers("graph_capture_count")
        return 0

    def reset(self) -> None:
        self._enter("reset")
        self._forget()

    def extend(self, tokens: TokenArray) -> None:
        self._refuse_strangers("extend")
        assert tokens.dtype == np.int32
        assert tokens.ndim == 1
        assert len(tokens) > 0
        end = self.position + len(tokens)
        if end > self._limits.max_positions:
            raise ContextLengthError(
                f"tokens: {end} positions asked for, the context holds {self._limits.max_positions}"
            )
        self._enter("extend")
        assert tokens.min() >= 0
        assert tokens.max() < self._limits.vocab_size
        self._pending = None
        self._begun = False
        self.extended.append((self.position, end))
        first = self.position
        while self.position < end:
            # Grid by grid: a cut on the grid changes nothing, in a real engine neither.
            stop = min(end, (self.position // self._limits.grid + 1) * self._limits.grid)
            self._absorb(tokens[self.position - first : stop - first], prefilled=True)

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: TokenArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        assert 0 <= sampling.drafts <= self._limits.max_drafts <= MAX_DRAFTS
        self._enter("begin")
        self._sampling = sampling
        self._context = context.tobytes()
        self._output = [] if output is None else [int(token) for token in output]
        self._pending = self._output[-1] if self._output else None
        self._constraint = constraint
        if constraint is not None:
            constraint.restart()
            for token in self._output:
                constraint.advance(token)
        if self._output:
            assert self.position == len(context) + len(self._output) - 1
        self._begun = True
        if self._script is not None:
            seen = np.concatenate([context, np.array(self._output[:-1], dtype=np.int32)])
            if self._tokens != seen.astype(np.int32).tobytes():
                raise WrongStateError("the state did not absorb the prompt of this turn")
            self._reply = tuple(self._script(context))

    def step(self, most: int = MAX_DRAFTS + 1) -> Chunk:
        self._refuse_strangers("step")
        assert most >= 1
        assert self.position >= 1
        assert self._begun, "step needs a begin"
        if self._pending is not None and self.position >= self._limits.max_positions:
            raise ContextLengthError(
                f"position: {self.position} of {self._limits.max_positions} are taken"
            )
        self._enter("step")
        first = self._pending is None
        if self._pending is not None:
            self._absorb(np.array([self._pending], dtype=np.int32))
        room = self._limits.max_positions - self.position
        drafted = 0 if first else min(self._sampling.drafts, room, most - 1)
        tokens: list[int] = []
        accepted = 0
        while True:
            token = self._target(self._allowed())
            if self._constraint is not None:
                self._constraint.advance(token)
            tokens.append(token)
            self._output.append(token)
            if token in self._sampling.end_tokens or accepted == drafted:
                break
            if self._draft(token) != token:
                break
            accepted += 1
            self._absorb(np.array([token], dtype=np.int32))
        self._pending = tokens[-1]
        stop = tokens[-1] if tokens[-1] in self._sampling.end_tokens else None
        asked = self._sampling.top_logprobs is not None
        logprobs = tuple(self._logprob(token) for token in tokens) if asked else ()
        return Chunk(tuple(tokens), stop, drafted, accepted, logprobs)

    def snapshot(self) -> Capsule:
        self._enter("snapshot")
        fold = self._fold.digest()
        parts = parts_of(self._tokens, self._how, fold, self._limits, self._root)
        return FakeCapsule(self.position, self._shared(parts))

    def restore(self, capsule: Capsule) -> int:
        assert isinstance(capsule, FakeCapsule)
        self._enter("restore")
        before = bytes(self._tokens)
        self._forget()
        small, *segments = capsule.parts
        moved = small.nbytes
        for segment in segments:
            start = len(self._tokens)
            tokens = segment.tensors["tokens"]
            if before[start : start + len(tokens)] != tokens:
                moved += segment.nbytes
            self._absorb(np.frombuffer(tokens, dtype=np.int32))
            self._how[start // 2 :] = segment.tensors["how"]
        if self._fold.digest() != small.tensors["fold"]:
            raise WrongStateError("small state and segments disagree")
        self._root = capsule.root
        return moved

    def move(self, capsule: Capsule, tier: str) -> Capsule:
        assert isinstance(capsule, FakeCapsule)
        assert tier in self._limits.tiers, f"tier {tier!r} is none of {self._limits.tiers}"
        self._enter("move")
        if capsule.tier == tier:
            return capsule
        moved = [replace(part, tier=tier) for part in capsule.parts]
        return FakeCapsule(capsule.position, self._shared(moved))

    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> Capsule:
        assert not apart or all(isinstance(part, memoryview) for part in parts)
        self._enter("unpack")
        found = read_parts(position, parts, self._limits)
        return FakeCapsule(position, self._shared(set_apart(found, apart) if apart else found))

    def _shared(self, parts: Sequence[FakePart]) -> tuple[FakePart, ...]:
        """Each, or the living part of that name in that tier."""
        return tuple(self._parts.setdefault((part.name, part.tier), part) for part in parts)

    # -- the hash that stands for a model ----------------------------------------------------

    def _forget(self) -> None:
        self._root = ROOT
        self._tokens = bytearray()
        self._how = bytearray()
        self._fold = blake2b(digest_size=16)
        self._pending = None
        self._begun = False

    def _absorb(self, tokens: TokenArray, *, prefilled: bool = False) -> None:
        how = np.full(len(tokens), len(tokens) if prefilled else DECODED, np.int16)
        how[0] = -how[0]
        self._how += how.tobytes()
        data = tokens.tobytes()
        self._tokens += data
        self._fold.update(data)

    def _hash(self, *words: object) -> int:
        mixed = self._fold.copy()
        mixed.update(repr(words).encode())
        return int.from_bytes(mixed.digest()[:8], "little")

    def _allowed(self) -> npt.NDArray[np.int64] | None:
        """The ids that the constraint leaves, None without one."""
        mask = None if self._constraint is None else self._constraint.mask()
        if mask is None:
            return None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return np.nonzero(bits[: self._limits.vocab_size])[0]

    def _target(self, allowed: npt.NDArray[np.int64] | None) -> int:
        s = self._sampling
        if self._script is not None:
            said = len(self._output)
            end = s.end_tokens[0] if s.end_tokens else 0
            wanted = self._reply[said] if said < len(self._reply) else end
            if allowed is None or wanted in allowed:
                return wanted
        words: list[object] = [self.position]
        if s.temperature > 0:
            words += [s.seed, s.temperature, s.top_k, s.top_p, s.min_p]
        if s.repetition_penalty != 1.0:
            words += [s.repetition_penalty, self._context, self._output]
        if s.presence_penalty or s.frequency_penalty:
            words += [s.presence_penalty, s.frequency_penalty, self._output]
        if s.logit_bias:
            words.append(s.logit_bias)
        drawn = self._hash(*words)
        if allowed is None:
            return drawn % self._limits.vocab_size
        return int(allowed[drawn % len(allowed)])

    def _draft(self, token: int) -> int:
        """A guess that knows no more than the state: right in about two of three positions."""
        wrong = self._hash("draft") % 3 == 0
        return (token + 1) % self._limits.vocab_size if wrong else token

    def _logprob(self, token: int) -> TokenLogprob:
        n = min(self._sampling.top_logprobs or 0, self._limits.vocab_size)
        if self._constraint is not None:
            n = min(n, 1)  # its neighbours may be forbidden
        top = tuple(((token + i) % self._limits.vocab_size, -0.5 - i) for i in range(n))
        return TokenLogprob(token, -0.5, top)
