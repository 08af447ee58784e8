"""The table of legal transitions is the design's, and nothing else is legal."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from capserve.serving.lifecycle import LEGAL, TERMINAL, Lifecycle, TurnState

S = TurnState
HAPPY = [S.ENQUEUED, S.QUEUED, S.PREFILL, S.DECODE, S.DONE]


def at(state: TurnState) -> Lifecycle:
    return Lifecycle(state=state)


def test_the_happy_path_is_legal_and_stamps_each_time_in_order() -> None:
    life = Lifecycle()
    for state in HAPPY[1:4]:
        life.to(state)
    life.first_token()
    first = life.first_token_at
    life.first_token()
    assert life.first_token_at == first, "only the first token counts"
    life.to(S.DONE)
    stamps = [life.enqueued_at, life.started_at, life.first_token_at, life.finished_at]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(stamps))
    assert life.terminal_state is S.DONE


@pytest.mark.parametrize(("before", "after"), list(product(S, S)))
def test_every_step_outside_the_table_is_refused(before: TurnState, after: TurnState) -> None:
    life = at(before)
    if after in LEGAL[before]:
        life.to(after)
        assert life.state is after
    else:
        with pytest.raises(AssertionError, match="illegal transition"):
            life.to(after)
        assert life.state is before


def test_nothing_follows_a_terminal_state_and_every_other_state_can_be_given_up() -> None:
    assert all(not LEGAL[state] for state in TERMINAL)
    for state in set(S) - TERMINAL:
        assert S.CANCELLED in LEGAL[state]
        assert at(state).terminal_state is None


def test_done_is_reached_from_decode_alone() -> None:
    assert [state for state in S if S.DONE in LEGAL[state]] == [S.DECODE]
