"""A server that is killed at any moment: what is on disk is whole, and every session goes on.

The victim is a forked process with a worker, a disk and three clients (`victim.py`), killed with
SIGKILL while they work. After each kill the store opens, each listed capsule can be read, and the
next turn of restored sessions equals its cold run. CAPSERVE_KILLS=200 takes that many moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capserve.engine.seam import Sampling
from capserve.serving.disk import DiskTier
from capserve.serving.orders import ListSessions
from capserve.serving.turn import Finished
from tests.reuse import victim
from tests.reuse.desk import Ask, desk
from tests.reuse.ledger import Ledger
from tests.reuse.machine import WORDS

KILLS = int(os.environ.get("CAPSERVE_KILLS", "25"))
LONGEST_LIFE_S = 1.2
SESSIONS = 3
"""Whose next turn is taken after each kill: the last used one, and others."""
A_STORE_LIVES = 10
"""Kills, then the next victim begins with an empty directory."""

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 15 * KILLS)]


def test_after_a_kill_at_any_moment_every_capsule_is_whole_and_every_session_goes_on(
    ledger: Ledger, tmp_path: Path
) -> None:
    hot, cold = victim.load(), victim.load()
    rng = random.Random(9)
    capsules = sessions = 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.reuse.victim"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "ready\n"
            for kill in range(KILLS):
                directory = tmp_path / str(kill // A_STORE_LIVES)
                parent.stdin.write(f"{kill} {directory}\n")
                parent.stdin.flush()
                child = int(parent.stdout.readline())
                # The moment of the kill, not a wait for something.
                time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
                os.kill(child, signal.SIGKILL)
                assert parent.stdout.readline() == f"{-signal.SIGKILL}\n", "it died by itself"
                capsules += _every_capsule_is_whole(directory, hot.limits.fingerprint)
                with desk(hot, cold, ledger, **vars(victim.setup(directory))) as server:
                    server.check()
                    found = server.order(ListSessions(victim.OWNER)).sessions
                    others = rng.sample(found[1:], min(SESSIONS - 1, len(found) - 1)) if found else []
                    for session in [*found[:1], *others]:
                        known = server.known(session.id)
                        assert known is not None
                        talk = victim.next_words(known, rng.choice(WORDS))
                        ask = Ask(
                            Sampling(top_logprobs=0),
                            max_tokens=8,
                            namespace=known.namespace,
                            on=False,
                            session_id=session.id,
                        )
                        assert isinstance(server.ask(talk, ask), Finished)
                        sessions += 1
        finally:
            parent.stdin.close()  # and so it ends
    ledger.steps["kill"] += KILLS
    assert capsules > KILLS, "hardly anything was ever written, so nothing was shown"
    assert sessions > KILLS / 2
    assert ledger.tiers["disk"] > KILLS / 4


def _every_capsule_is_whole(directory: Path, fingerprint: str) -> int:
    """How many there are."""
    tier = DiskTier.open(directory, fingerprint, victim.DISK_BYTES)
    try:
        tier.check()
        rows = tier.capsules()
        for row in rows:
            for part in row.parts:
                tier.read(part.name)
        return len(rows)
    finally:
        tier.close(30.0)
