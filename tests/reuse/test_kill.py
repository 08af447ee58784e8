"""A server that is killed at any moment: what is on disk is whole, and every session goes on.

The victim is a forked process with a worker, a disk and three clients (`victim.py`), killed with
SIGKILL while they work. After each kill the store opens, each listed capsule can be read, and the
next turn of restored sessions equals its cold run. CAPSERVE_KILLS=200 takes that many moments.
CAPSERVE_SERVER_KILLS=10 does the same to that many pairs of real servers.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from capserve.engine.seam import Sampling
from capserve.serving.disk.tier import DiskTier
from capserve.serving.turn import Finished
from tests.process import server_process
from tests.reuse import victim
from tests.reuse.desk import Ask, Desk, desk
from tests.reuse.ledger import Ledger
from tests.reuse.machine import SYSTEM, WORDS

KILLS = int(os.environ.get("CAPSERVE_KILLS", "25"))
SERVER_KILLS = int(os.environ.get("CAPSERVE_SERVER_KILLS", "1"))
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
                    sessions += _sessions_go_on(server, rng)
        finally:
            parent.stdin.close()  # and so it ends
    ledger.steps["kill"] += KILLS
    assert capsules > KILLS, "hardly anything was ever written, so nothing was shown"
    assert sessions > KILLS / 2
    assert ledger.tiers["disk"] > KILLS / 4


@pytest.mark.parametrize("seed", range(SERVER_KILLS))
def test_a_real_server_that_is_killed_under_load_leaves_every_session_to_go_on(
    seed: int, ledger: Ledger, tmp_path: Path
) -> None:
    hot, cold = victim.load(), victim.load()
    rng = random.Random(seed)
    directory = tmp_path / hot.limits.fingerprint[:16]
    flags = {"capsule_budget": "8MB", "disk_budget": victim.DISK_BYTES, "min_slice": 1}
    for _ in range(2):  # the second one begins with what the first one left
        with server_process(tmp_path, **flags) as server:
            answered = threading.Semaphore(0)
            clients = [
                threading.Thread(target=_http_client, args=(server.url, rng.random(), answered))
                for _ in range(3)
            ]
            for client in clients:
                client.start()
            for _ in range(rng.randrange(1, 30)):
                assert answered.acquire(timeout=60.0), "the server answers nobody"
            time.sleep(rng.uniform(0.0, 0.2))  # the moment of the kill, not a wait for something
            server.kill()
            for client in clients:
                client.join(60.0)
        assert _every_capsule_is_whole(directory, hot.limits.fingerprint) > 0
    with desk(hot, cold, ledger, **vars(victim.setup(directory))) as left:
        assert _sessions_go_on(left, rng) > 0
    ledger.steps["kill of a server"] += 2


def _http_client(url: str, seed: float, answered: threading.Semaphore) -> None:
    """Turns, named and not, forks and undo, until the server is gone."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    with httpx.Client(base_url=url, timeout=60.0) as http, suppress(httpx.TransportError):
        while True:
            if len(messages) % 4 == 0:
                messages = [{"role": "system", "content": SYSTEM}]
            messages.append({"role": "user", "content": rng.choice(WORDS)})
            body = {"model": "nano", "messages": messages, "max_tokens": rng.choice([1, 12, 40])}
            reply = http.post("/v1/chat/completions", json={**body, "enable_thinking": False})
            assert reply.status_code == 200, reply.text
            messages.append(reply.json()["choices"][0]["message"])
            answered.release()
            sessions = http.get("/v1/sessions").json()["data"]
            path = f"/v1/sessions/{rng.choice(sessions)['id']}"
            done = http.post(f"{path}/{rng.choice(['fork', 'undo'])}", json={})
            # Busy, or nothing to undo: that is an answer, too.
            assert done.status_code < 500, done.text


def _sessions_go_on(server: Desk, rng: random.Random) -> int:
    """The next turn of some, the last used one among them, compared with its cold run."""
    server.check()
    found = [s for s in reversed(server.sessions.all()) if s.conversation is not None]
    others = rng.sample(found[1:], min(SESSIONS - 1, len(found) - 1)) if found else []
    chosen = [session.id for session in [*found[:1], *others]]
    for session_id in chosen:
        known = server.known(session_id)
        assert known is not None
        ask = Ask(
            Sampling(top_logprobs=0),
            max_tokens=8,
            namespace=known.namespace,
            on=False,
            session_id=session_id,
        )
        talk = victim.next_words(known, rng.choice(WORDS))
        assert isinstance(server.ask(talk, ask), Finished)
    return len(chosen)


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
