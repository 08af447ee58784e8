"""2,000 steps of everything that may happen to a server with a disk, each turn against a cold run.

The steps are the same on every run. CAPSERVE_MACHINE_STEPS=20000 takes that many new ones, and lets
Hypothesis shrink what fails.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from capserve.engine.runtime import TorchEngine
from capserve.serving.prefix import PrefixAction
from tests.reuse.cold import ColdRun
from tests.reuse.ledger import Ledger
from tests.reuse.machine import World, machine
from tests.reuse.wire import A_THREAD_DIES

ASKED = int(os.environ.get("CAPSERVE_MACHINE_STEPS", "0"))
STEPS = 2000
STEPS_A_RUN = 50

EVERY_STEP = {
    *("turn", "edit", "retry", "go on", "named turn"),
    *("cancel in prefill", "cancel in decode", "cancel while parked", "park"),
    *("undo", "fork", "delete", "pin", "unpin"),
    *("demote", "evict"),
    *("restart", "crash", "crash in a turn"),
    *("disk full", "disk has room", "disk slow"),
    *("damage: flip", "damage: cut", "damage: lose"),
    "damage: manifest",
}

# A search that somebody asked for may take its hours.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if ASKED else 900), A_THREAD_DIES]


def test_whatever_happens_every_reply_equals_a_cold_run_and_every_account_its_bytes(
    short_segments: tuple[TorchEngine, TorchEngine],
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    hot, cold = short_segments
    world = World(hot, ColdRun(cold), ledger, tmp_path)
    settings = hypothesis.settings(
        # More runs than needed: some steps find nothing to do, and long ones end a run early.
        max_examples=(ASKED or STEPS) * 3 // 2 // STEPS_A_RUN,
        stateful_step_count=STEPS_A_RUN,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if ASKED else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: machine(world), settings=settings)
    assert ledger.steps.total() >= (ASKED or STEPS)
    assert set(ledger.tiers) == {"host", "disk"}
    if ASKED:
        return  # new steps need not do everything
    done = set(ledger.steps)
    assert done >= EVERY_STEP, f"never happened: {EVERY_STEP - done}"
    assert set(ledger.actions) == set(PrefixAction), f"too little was tried: {ledger.actions}"
