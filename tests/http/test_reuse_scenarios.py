"""Nothing is read twice: the benchmark's scenes, small, on a server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.reuse import details, play
from benchmarks.scenarios.client import Sizes
from benchmarks.scenarios.ledger import Ledger, account, plain_messages
from benchmarks.scenarios.plays import SCENES
from benchmarks.scenarios.server import OwnServer

INTERVAL = 256
SIZES = Sizes(prefix=3_500, part=500)
"""A system prompt of some 1,500 tokens, tools included: several intervals."""


@pytest.fixture(scope="module")
def played() -> Iterator[dict[str, Any]]:
    settings = {"threads": 1, "checkpoint_interval": INTERVAL, "prefill_chunk": INTERVAL}
    with OwnServer(settings) as server:
        yield play(server, interval=INTERVAL, sizes=SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_reads_no_more_than_its_bound(played: dict[str, Any], scene: str) -> None:
    rows = [row for row in played["rows"] if row.scene == scene]
    assert rows, "the scene was not played"
    sums = account(rows, INTERVAL)
    assert sums.holds, f"{sums.actual} of {sums.bound} tokens\n{details(rows)}"


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_the_bound_notices_a_server_that_reads_everything_again(
    played: dict[str, Any], scene: str
) -> None:
    rows = [replace(row, actual=row.prompt) for row in played["rows"] if row.scene == scene]
    assert account(rows, INTERVAL).holds is False, details(rows)


@pytest.mark.slow
def test_health_answers_during_all_of_it(played: dict[str, Any]) -> None:
    assert played["health"]["polls"] >= 20
    assert played["health"]["failures"] == 0


def _ids(*tokens: int) -> Any:
    return np.array(tokens, dtype=np.int32)


def test_the_last_token_of_a_reply_is_not_known_yet() -> None:
    ledger = Ledger()
    ledger.learn(_ids(1, 2, 3), _ids(4, 5))
    shared = ledger.shared(_ids(1, 2, 3, 4, 5, 6))
    assert (shared.tokens, shared.branches) == (4, False)


def test_a_branch_point_is_where_known_text_goes_on_and_none_ends() -> None:
    ledger = Ledger()
    ledger.learn(_ids(1, 2, 3), _ids(4, 5, 6))
    assert ledger.shared(_ids(1, 2, 9)).branches
    assert ledger.shared(_ids(1, 2, 3)).branches, "the same prompt again leaves before the reply"
    ledger.learn(_ids(1, 2), _ids(7))
    assert not ledger.shared(_ids(1, 2, 9)).branches, "a known sequence ends there"
    assert not ledger.shared(_ids(8)).branches, "nothing is shared"


def test_the_ideal_of_requests_at_once_does_not_depend_on_their_order() -> None:
    prompts = [_ids(1, 2, 3, 4), _ids(1, 2, 5), _ids(1, 6, 7), _ids(1, 2, 3, 8)]
    sums = set()
    for order in (prompts, prompts[::-1], [*prompts[2:], *prompts[:2]]):
        ledger, ideal = Ledger(), 0
        for prompt in order:
            ideal += len(prompt) - ledger.shared(prompt).tokens
            ledger.learn(prompt, _ids(9))
        sums.add(ideal)
    assert sums == {8}


def test_without_token_ids_messages_that_mean_the_same_are_shared() -> None:
    call = {"name": "read", "arguments": '{"a": 1, "b": 2}'}
    told = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": call}]}
    again = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "y", "function": {**call, "arguments": '{"b":2,"a":1}'}}],
    }
    asked = {"role": "user", "content": "read it"}
    ledger = Ledger()
    ledger.learn_messages(plain_messages([asked, told], []), 100)
    goes_on = ledger.shared_by_messages(plain_messages([asked, again, asked], []))
    assert (goes_on.tokens, goes_on.branches, goes_on.estimated) == (100, False, True)
    edited = ledger.shared_by_messages(plain_messages([{**asked, "content": "other"}], []))
    assert edited.tokens < 20
    assert edited.branches
