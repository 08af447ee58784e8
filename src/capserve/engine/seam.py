"""What can the engine do, in words that know nothing of requests?

Positions and lengths are tokens; sizes are bytes; ranges are half-open. One thread calls an engine.
No generator, lock or callback crosses this file; abilities are values in `EngineLimits`.

  E1  `position` counts exactly the tokens that the state has absorbed.
  E2  `step()` returns only tokens that the target decided; the state has absorbed all of them but
      the last, the *pending* one. `extend` forgets a pending token: the caller passes it again.
  E3  After `restore(snapshot())` and `begin` with the same sampling, context and output, `step()`
      gives what it would have given.
  E4  `extend(a); extend(b)` equals `extend(a + b)` bit for bit when `position + len(a)` is a
      multiple of `limits.grid`. Anywhere else it is equal within float rounding.
  E5  The token at position p is a function of the target's logits and of (seed, p) alone. It does
      not depend on the number of drafts, on what was accepted before, or on capsules.
  E6  A sampled end token ends the chunk (`stop` names it) and is not absorbed.
  E7  A call that raises `CapserveError` before it started leaves the state as it was, and so does a
      `snapshot` that finds no memory. After any other exception the state is undefined until
      `reset` or `restore`.
  E8  A capsule is immutable, survives any later call, and may be restored many times.
  E9  `limits.small_state_bytes` and `limits.kv_bytes_per_token` equal the bytes measured.
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
    device: str
    dtype: str

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

    Order: repetition, presence and frequency penalties, logit_bias, temperature, top_k, top_p,
    min_p, Gumbel noise keyed by (seed, position), argmax. `temperature == 0` is greedy: argmax
    after penalties and bias, lowest id on a tie.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely ids; 0 keeps all."""
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
    """Log probabilities of one chosen token, after penalties and bias, before temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The n most likely (id, logprob), best first."""


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


@dataclass(frozen=True, slots=True)
class CapsulePart:
    """A shareable piece of a capsule, for accounting: equal keys are the same bytes in memory."""

    key: int
    nbytes: int


class Capsule(Protocol):
    """The restorable state at a boundary. Opaque to all but its engine."""

    @property
    def position(self) -> int: ...

    @property
    def parts(self) -> Sequence[CapsulePart]:
        """Every piece of memory that this capsule keeps alive, the small state among them."""
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
        self, sampling: Sampling, context: TokenArray, output: TokenArray | None = None
    ) -> None:
        """Start a turn, or take one up again: `step` samples so from now on.

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
