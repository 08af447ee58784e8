"""What can the engine do, in words that know nothing of requests?

Positions and lengths are tokens; sizes are bytes; ranges are half-open. One thread calls an engine.
No generator or lock crosses this file, and of callbacks one, a turn's `TokenConstraint`; abilities
are values in `EngineLimits`.

  E1  `position` counts exactly the tokens that the state has absorbed.
  E2  `step()` returns only tokens that the target decided; the state has absorbed all of them but
      the last, the *pending* one. `extend` forgets a pending token: the caller passes it again.
  E3  After `restore(snapshot())` and `begin` with the same sampling, context, output and
      constraint, `step()` gives what it would have given.
  E4  `extend(a); extend(b)` equals `extend(a + b)` bit for bit when `position + len(a)` is a
      multiple of `limits.grid`. Anywhere else it is equal within float rounding.
  E5  The token at position p is a function of the target's logits, of (seed, p) and of what the
      turn's constraint allows there. It does not depend on the number of drafts, on what was
      accepted before, or on capsules.
  E6  A sampled end token ends the chunk (`stop` names it) and is not absorbed.
  E7  A call that raises `CapserveError` before it started leaves the state as it was, and so does a
      `snapshot` that finds no memory. After any other exception the state is undefined until
      `reset` or `restore`.
  E8  A capsule is immutable, survives any later call, and may be restored many times.
  E9  `limits.small_state_bytes` and `limits.kv_bytes_per_token` equal the bytes measured.
  E10 Parts of equal name hold equal bytes, in this process and in any other whose engine has the
      same `limits.fingerprint`. A part's name is a digest of all that was absorbed up to its end
      and of how it was absorbed; a part that is not full, or a small state, has a name of its own.
  E11 `unpack(c.position, [p.pack() for p in c.parts])` is a capsule that restores the bits of c.
  E12 Under a constraint every token that `step` returns was allowed where it stands. An error
      that the constraint raises leaves `step` as it is; the state is undefined until `reset` or
      `restore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
"""Token ids, int32, 1-D: the one form in which tokens cross a seam."""

MAX_DRAFTS = 8
"""Upper bound of K: K + 1 = 9 rows are the most that one verify tile holds."""

MAX_TOP_LOGPROBS = 20
"""Upper bound of `Sampling.top_logprobs`, the wire's own limit."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What this engine, with this checkpoint on this device, can do. All values are constant."""

    model_name: str
    vocab_size: int
    """Ids that may be sampled are in [0, vocab_size)."""
    max_positions: int
    """The state holds at most this many tokens; `position <= max_positions` always."""
    max_drafts: int
    """Highest K that `Sampling.drafts` may ask for; 0 without an MTP head."""
    prefill_chunk: int
    """Most tokens that one forward pass absorbs; chunks start at its multiples."""
    grid: int
    """Positions that are multiples of this are bit-exact restore points (E4)."""
    small_state_bytes: int
    kv_bytes_per_token: int
    """Bytes that a capsule holds for each token before its position, MTP included."""
    segment_tokens: int
    """Tokens of one full KV part: what capsules share is counted in these."""
    device: str
    dtype: str
    tiers: tuple[str, ...]
    """Where capsules can lie, the nearest to the live buffers first: `("host",)` on CPU,
    `("gpu", "host")` on a card. `snapshot` makes them in the first."""
    fingerprint: str
    """Digest of everything that decides a state's bits: weights, config, dtype, grid, device kind,
    versions. A packed part means nothing to an engine with another one."""

    def chunk_end(self, position: int, limit: int) -> int:
        """The end of the prefill chunk that starts at `position`, never beyond `limit`.

        Cutting an `extend` at these points changes no bit of the result: this is where a caller
        looks for cancellation.
        """
        return min(limit, (position // self.prefill_chunk + 1) * self.prefill_chunk)

    def capsule_aligned_len(self, n: int) -> int:
        """`n` floored to the grid: the longest bit-exact restore point of n tokens."""
        return n // self.grid * self.grid

    def capsule_bytes(self, position: int) -> int:
        """Bytes of a capsule at `position` that shares nothing."""
        return self.small_state_bytes + position * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Validated where it is made; the engine asserts.

    Order: repetition, presence and frequency penalties, logit_bias, the constraint's mask,
    temperature, top_k, top_p, min_p, Gumbel noise keyed by (seed, position), argmax.
    `temperature == 0` is greedy: argmax after the mask, lowest id on a tie.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely ids, and those that tie with the k-th; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over context and output, as in CTRL: divide positive logits, multiply negative ones."""
    presence_penalty: float = 0.0
    """Over the output of this turn only, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """64-bit, unsigned."""
    drafts: int = 0
    """K: MTP drafts per step, 0 <= K <= limits.max_drafts. Changes speed, never tokens."""
    end_tokens: tuple[int, ...] = ()
    """Sampling one of these ends the chunk (E6)."""
    top_logprobs: int | None = None
    """None: no logprobs. n in 0..20: the chosen token's logprob and the n best."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities of one chosen token, after penalties, bias and mask, before temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The n most likely (id, logprob), best first; fewer when a constraint allows fewer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one `step` decided: 1 to K + 1 tokens, all of the target's own choice."""

    tokens: tuple[int, ...]
    stop: int | None
    """The end token that closed this chunk (it is also the last of `tokens`), or None."""
    drafted: int
    """Drafts verified in this step; 0 for a step without speculation."""
    accepted: int
    """Drafts among them that equalled the target's token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token when asked for, else empty."""


TokenMask = npt.NDArray[np.int32]
"""One bit for each id: bit t % 32 of word t // 32 is set when token t is allowed. Its length is
`(vocab_size + 31) // 32`; bits beyond the vocabulary don't matter."""


class TokenConstraint(Protocol):
    """What may come next, as far as one turn's output has come. Belongs to that turn, and is called
    by the engine in `begin` and `step` alone."""

    def restart(self) -> None:
        """Back to where no token was decided."""
        ...

    def mask(self) -> TokenMask | None:
        """What is allowed next: at least one id. None allows every id."""
        ...

    def advance(self, token: int) -> None:
        """Go on by a token that `mask` allowed."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take the last `tokens` back: at most those since the last `restart`."""
        ...


class CapsulePart(Protocol):
    """An immutable piece of a capsule, shared by every capsule that has it (E10)."""

    @property
    def name(self) -> bytes:
        """16 bytes."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def tier(self) -> str: ...

    def pack(self) -> Sequence[memoryview]:
        """The part as one safetensors file, in pieces to be written one after another.

        Any thread may call it at any time; what lies in host memory is not copied.
        """
        ...


class Capsule(Protocol):
    """The restorable state at a boundary. Opaque to all but its engine."""

    @property
    def position(self) -> int: ...

    @property
    def parts(self) -> Sequence[CapsulePart]:
        """Every piece of memory that this capsule keeps alive: the small state first, then the KV
        parts in ascending order. All lie in one tier."""
        ...


class Engine(Protocol):
    """One hot state. See the numbered guarantees above."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def position(self) -> int: ...

    @property
    def graph_capture_count(self) -> int:
        """Graphs captured so far; constant after warm-up. 0 on CPU."""
        ...

    def reset(self) -> None:
        """Forget everything: position 0, no pending token."""
        ...

    def extend(self, tokens: TokenArray) -> None:
        """Absorb `tokens` at `position`. At least one; `position + n <= max_positions`."""
        ...

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: TokenArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Start a turn, or take one up again: `step` samples so from now on.

        `constraint` is restarted and led over `output`: the same object may come with each `begin`
        of its turn.

        `context` is the prompt, for the repetition penalty. `output` are the tokens that this turn
        decided so far (penalties count them); its last one becomes the pending token, so
        `position == len(context) + len(output) - 1` when it is given and not empty.
        """
        ...

    def step(self, most: int = MAX_DRAFTS + 1) -> Chunk:
        """Decide the next tokens, `most` (>= 1) at the most. Needs `position >= 1` and a `begin`.

        The first step after `begin` samples one token from the state as it stands; later ones
        absorb the pending token and up to K accepted drafts. Raises `ContextLengthError` when
        `position == max_positions` and a pending token waits.
        """
        ...

    def snapshot(self) -> Capsule:
        """The state at `position`, to be kept. Costs a copy of what no earlier capsule shares."""
        ...

    def restore(self, capsule: Capsule) -> int:
        """Make `capsule` the hot state; returns the bytes moved. No pending token afterwards."""
        ...

    def move(self, capsule: Capsule, tier: str) -> Capsule:
        """The same capsule in another tier of `limits.tiers`; itself when it lies there already.

        Parts of equal name that live in that tier are shared instead of copied. The state does not
        change; neither does the capsule that was given.
        """
        ...

    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> Capsule:
        """A capsule in the last tier of `limits.tiers`, from its parts in order: living ones as
        they are, others as the bytes that `pack` gave, joined.

        A name in foreign bytes is a claim. With `apart`, 16 random bytes, all parts must be bytes,
        and they, and whatever is absorbed after a restore of them, get names that no other history
        has: what they hold is never shared with a state that was computed here.

        Raises CapsuleError for bytes that are no such part of this engine at this position.
        """
        ...
