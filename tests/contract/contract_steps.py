"""Small steps that the contract tests take on any engine."""

from __future__ import annotations

import numpy as np

from capserve.engine.seam import Engine, Sampling, TokenArray

SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1234)
GREEDY = Sampling()


def some_tokens(engine: Engine, count: int, seed: int = 0) -> TokenArray:
    draw = np.random.default_rng(seed)
    return draw.integers(0, engine.limits.vocab_size, count, dtype=np.int32)


def with_drafts(sampling: Sampling, drafts: int, **changes: object) -> Sampling:
    values = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    return Sampling(**{**values, "drafts": drafts, **changes})


def most_drafts(engine: Engine) -> int:
    return min(4, engine.limits.max_drafts)


def decode(engine: Engine, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += engine.step().tokens
    return tokens[:count]


def run_cold(engine: Engine, prompt: TokenArray, sampling: Sampling, count: int) -> list[int]:
    engine.reset()
    engine.extend(prompt)
    engine.begin(sampling, prompt)
    return decode(engine, count)


def absorb_own(engine: Engine, context: TokenArray, count: int, drafts: int = 0) -> None:
    """Decode until the engine has absorbed `count` tokens of its own, neither more nor fewer."""
    engine.begin(with_drafts(GREEDY, min(drafts, engine.limits.max_drafts)), context)
    end = engine.position + count
    engine.step()
    while engine.position < end:
        engine.step(end - engine.position)
