"""Each way to reuse a state, taken on purpose, gives the tokens of a cold run, 64 tokens on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capserve.engine.seam import Sampling
from capserve.serving.prefix import PrefixAction
from capserve.serving.turn import Failed, Finished
from tests.reuse.conftest import Engines
from tests.reuse.desk import Ask, Desk, desk
from tests.reuse.ledger import Ledger
from tests.reuse.talks import RESULTS, SYSTEM, TOOLS, WORDS, Talk
from tests.reuse.wire import A_THREAD_DIES

SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=60, seed=11, drafts=3)
GREEDY = Sampling(drafts=4)


@pytest.fixture(params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> Sampling:
    value: Sampling = request.param
    return value


@pytest.fixture
def server(engines: Engines, ledger: Ledger) -> Iterator[Desk]:
    with desk(*engines(128, "float32"), ledger) as made:
        yield made


def turn(server: Desk, talk: Talk, ask: Ask) -> Finished:
    end = server.ask(talk.conversation(), ask)
    assert isinstance(end, Finished)
    talk.heard(end.message, loses=False)
    return end


def action(end: Finished | Failed) -> PrefixAction:
    assert end.metrics.prefix_action is not None
    return PrefixAction(end.metrics.prefix_action)


def started(server: Desk, sampling: Sampling, system: str = SYSTEM) -> Talk:
    """A talk of two whole turns."""
    talk = Talk(system, thinking=False)
    for words in WORDS[2:4]:
        talk.say(words, RESULTS[0])
        turn(server, talk, Ask(sampling, on=False, max_tokens=120))
    return talk


def test_the_next_turn_appends_to_the_hot_state(server: Desk, sampling: Sampling) -> None:
    talk = started(server, sampling)
    talk.say(WORDS[0], RESULTS[0])
    end = turn(server, talk, Ask(sampling))
    assert action(end) is PrefixAction.MESSAGE_APPEND
    assert end.metrics.new_prefill_tokens < 40


def test_a_history_that_is_spelled_otherwise_appends_too(server: Desk) -> None:
    talk = Talk(tools=TOOLS, thinking=True)
    for words in (WORDS[1], WORDS[1]):
        talk.say(words, RESULTS[0])
        end = server.ask(talk.conversation(), Ask(Sampling(drafts=3), max_tokens=120))
        assert isinstance(end, Finished)
        talk.heard(end.message, loses=True)
    assert talk.messages[1].tool_calls, "nano calls the tool"
    assert action(end) is PrefixAction.MESSAGE_APPEND


def test_the_same_request_again_needs_no_prefill_at_all(server: Desk, sampling: Sampling) -> None:
    talk = Talk(thinking=False)
    talk.say(WORDS[4], RESULTS[0])
    turn(server, talk, Ask(sampling, max_tokens=1))
    talk.take_back_reply()
    end = turn(server, talk, Ask(sampling))
    assert action(end) is PrefixAction.EXACT
    assert end.metrics.new_prefill_tokens == 0


def test_a_reply_that_was_cut_off_goes_on_from_the_hot_state(
    server: Desk, sampling: Sampling
) -> None:
    talk = Talk(thinking=False)
    talk.say(WORDS[3], RESULTS[0])
    turn(server, talk, Ask(Sampling(), max_tokens=7))  # K = 0: it ends exactly where it is cut
    assert talk.may_go_on
    assert action(turn(server, talk, Ask(sampling))) is PrefixAction.APPEND


def test_going_back_to_another_talk_restores_its_tip(server: Desk, sampling: Sampling) -> None:
    talk = started(server, sampling)
    started(server, sampling, system="You are another assistant. Be brief.")
    talk.say(WORDS[0], RESULTS[0])
    assert action(turn(server, talk, Ask(sampling))) is PrefixAction.RESTORE


def test_a_talk_of_the_same_length_never_gets_the_others_state(
    server: Desk, sampling: Sampling
) -> None:
    ends = []
    for colour in ("red", "blue", "green"):
        talk = Talk(f"Your favourite colour is {colour}. Answer in one sentence.", thinking=False)
        talk.say(WORDS[4], RESULTS[0])
        ends.append(turn(server, talk, Ask(sampling)))
    assert len({end.metrics.prompt_tokens for end in ends}) == 1
    assert all(action(end) is PrefixAction.REBUILD for end in ends)


def test_an_edit_of_the_hot_talk_truncates_it(server: Desk, sampling: Sampling) -> None:
    talk = started(server, sampling)
    talk.edit(1, WORDS[5])
    end = turn(server, talk, Ask(sampling))
    assert action(end) is PrefixAction.TRUNCATE
    assert end.metrics.cached_tokens > 0


def test_a_branch_of_a_talk_that_is_not_hot_forks_it(server: Desk, sampling: Sampling) -> None:
    talk = started(server, sampling)
    started(server, sampling, system="You are another assistant. Be brief.")
    branch = talk.branch()
    branch.edit(1, WORDS[4])
    assert action(turn(server, branch, Ask(sampling))) is PrefixAction.FORK


def test_without_room_for_capsules_a_prompt_is_read_again(
    engines: Engines, ledger: Ledger, sampling: Sampling
) -> None:
    with desk(*engines(128, "float32"), ledger, budget_bytes=0) as server:
        talk = started(server, sampling)
        talk.edit(1, WORDS[0])
        end = turn(server, talk, Ask(sampling))
    assert action(end) is PrefixAction.REBUILD
    assert end.metrics.cached_tokens == 0


def test_a_pin_that_outlives_its_session_is_restored(
    engines: Engines, ledger: Ledger, sampling: Sampling
) -> None:
    with desk(*engines(64, "float32"), ledger, max_active_sessions=1) as server:
        talk = Talk(tools=TOOLS, thinking=False)
        talk.say(WORDS[0], RESULTS[0])
        turn(server, talk, Ask(sampling, pin=True, on=False))
        started(server, sampling, system="You are another assistant. Be brief.")
        talk.take_back_reply()
        end = turn(server, talk, Ask(sampling))
    assert action(end) is PrefixAction.RESTORE
    assert end.metrics.new_prefill_tokens < 10


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_retry_goes_on_behind_the_chunks_that_a_cancelled_prefill_finished(
    engines: Engines, ledger: Ledger, sampling: Sampling, chunks: int
) -> None:
    with desk(*engines(64, "float32"), ledger, checkpoint_interval=4096) as server:
        talk = Talk(system="", thinking=False)
        talk.say(WORDS[5], RESULTS[0])
        end = server.ask(talk.conversation(), Ask(sampling, cancel=("extend", chunks)))
        assert isinstance(end, Failed)
        end = turn(server, talk, Ask(sampling))
    assert end.metrics.cached_tokens == 64 * chunks


def test_a_retry_after_a_cancelled_decode_says_what_the_first_would_have_said(
    server: Desk, sampling: Sampling
) -> None:
    talk = started(server, sampling)
    talk.say(WORDS[3], RESULTS[0])
    end = server.ask(talk.conversation(), Ask(sampling, cancel=("step", 4)))
    assert isinstance(end, Failed)
    told = server.last_output
    assert told
    end = turn(server, talk, Ask(sampling))
    assert end.metrics.cached_tokens >= end.metrics.prompt_tokens - 10
    assert server.last_output[: len(told)] == told


@A_THREAD_DIES
@pytest.mark.parametrize("exact", [False, True])
def test_ten_impatient_retries_of_a_long_prompt_each_come_further(
    engines: Engines, ledger: Ledger, tmp_path: Path, exact: bool
) -> None:
    """A client whose timeout is shorter than the prefill gets its answer all the same."""
    setup: dict[str, Any] = {"checkpoint_interval": 4096, "exact": exact, "directory": tmp_path}
    with desk(*engines(64, "float32"), ledger, **setup) as server:
        talk = Talk(system="", thinking=False)
        talk.say("\n\n".join([WORDS[5]] * 3), RESULTS[0])
        ask = Ask(GREEDY, max_tokens=8, on=False)
        known = 0
        for tries in range(1, 11):
            # Each time it leaves after one chunk; every third time the server is killed, too.
            end = server.ask(talk.conversation(), replace(ask, cancel=("extend", 1)))
            assert isinstance(end, Failed)
            assert end.metrics.cached_tokens == known, "the work of the last try is lost"
            known += end.metrics.new_prefill_tokens
            assert known == 64 * tries
            if tries % 3 == 0:
                disk = server.server.disk
                assert disk is not None
                assert disk.flush(60.0)
                server.die()
                server.start()
        assert end.metrics.prompt_tokens > known, "there was nothing left to read"
        end = turn(server, talk, ask)
        assert end.metrics.cached_tokens == known
