"""What do many conversations with a common beginning weigh together?"""

from __future__ import annotations

import numpy as np
import pytest

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Capsule
from capserve.nano import checkpoint_dir
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.journal import prefix_digests

SESSIONS, WHOLE, SHARED = 20, 8_192, 6_144


@pytest.mark.slow
def test_twenty_sessions_that_share_a_long_prefix_keep_it_once() -> None:
    engine = TorchEngine.load(checkpoint_dir(), device="cpu", max_model_len=WHOLE)
    limits = engine.limits
    store = CapsuleStore(engine, {"host": 1 << 30})
    draw = np.random.default_rng(0)
    prefix = draw.integers(0, limits.vocab_size, SHARED, dtype=np.int32)

    def keep(tokens: np.ndarray) -> Capsule:
        capsule = engine.snapshot()
        position = len(tokens)
        key = CapsuleKey("key/a", position, prefix_digests(tokens, [position])[0])
        assert store.put(key, capsule, ()) is None
        return capsule

    engine.extend(prefix)
    start = keep(prefix)
    for _ in range(SESSIONS):
        engine.restore(start)
        own = draw.integers(0, limits.vocab_size, WHOLE - SHARED, dtype=np.int32)
        engine.extend(own)
        keep(np.concatenate((prefix, own)))
    store.check()
    kv_tokens = SHARED + SESSIONS * (WHOLE - SHARED)
    kv_bytes = kv_tokens * limits.kv_bytes_per_token
    most = 1.3 * kv_bytes + SESSIONS * limits.small_state_bytes
    used = store.footprint().used_bytes
    assert used <= most, f"{used} bytes, at most {most:.0f}"
    # Tight, too: the start's own small state is all that there is beside them.
    assert used == kv_bytes + (SESSIONS + 1) * limits.small_state_bytes
