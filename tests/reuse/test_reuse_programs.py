"""P2 on the real model: whatever happened before, a reply is that of a server without reuse.

The programs are the same on every run. CAPSERVE_REUSE_EXAMPLES=200 runs that many new ones, and
lets Hypothesis shrink what fails; `--hypothesis-seed=N` repeats such a run.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from capserve.serving.prefix import PrefixAction
from tests.reuse.conftest import Engines
from tests.reuse.desk import desk
from tests.reuse.ledger import Ledger
from tests.reuse.programs import Move, Setting, moves, run, settings_of_a_server

EXAMPLES = int(os.environ.get("CAPSERVE_REUSE_EXAMPLES", "0"))

# A search that somebody asked for may take its hours.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if EXAMPLES else 300)]


def searching(default_examples: int) -> hypothesis.settings:
    """Fixed programs, reported as they are: shrinking takes minutes with a real model."""
    return hypothesis.settings(
        max_examples=EXAMPLES or default_examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if EXAMPLES else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def test_every_reply_equals_a_cold_run_of_its_prompt(engines: Engines, ledger: Ledger) -> None:
    @searching(10)
    @given(setting=settings_of_a_server, program=st.lists(moves, min_size=8, max_size=12))
    def run_one(setting: Setting, program: list[Move]) -> None:
        with desk(
            *engines(setting.chunk, "float32"),
            ledger,
            budget_bytes=setting.budget_bytes,
            checkpoint_interval=setting.checkpoint_interval,
            max_active_sessions=setting.max_active_sessions,
        ) as server:
            run(server, program)

    run_one()
    usual = set(PrefixAction) - {PrefixAction.EXACT, PrefixAction.APPEND}
    assert usual <= set(ledger.actions), f"too little was tried: {ledger.actions}"


def test_in_exact_mode_replies_and_states_have_a_cold_runs_bits(
    engines: Engines, ledger: Ledger
) -> None:
    @searching(4)
    @given(setting=settings_of_a_server, program=st.lists(moves, min_size=6, max_size=9))
    def run_one(setting: Setting, program: list[Move]) -> None:
        with desk(
            *engines(setting.chunk, "float32"),
            ledger,
            exact=True,
            budget_bytes=setting.budget_bytes,
            checkpoint_interval=setting.checkpoint_interval,
            max_active_sessions=setting.max_active_sessions,
        ) as server:
            run(server, program)

    run_one()
    assert ledger.states > 0
    assert set(ledger.actions) > {PrefixAction.REBUILD}, "nothing was reused"


def test_in_exact_mode_bfloat16_has_a_cold_runs_bits_too(engines: Engines, ledger: Ledger) -> None:
    @searching(1)
    @given(program=st.lists(moves, min_size=8, max_size=8))
    def run_one(program: list[Move]) -> None:
        with desk(*engines(64, "bfloat16"), ledger, exact=True, checkpoint_interval=64) as server:
            run(server, program)

    run_one()
    assert ledger.states > 0
