"""What is done to sessions beside turns, and in the middle of one, never changes what is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from capserve.engine.seam import Sampling
from capserve.serving.sessions.orders import ForkSession, UndoSession
from capserve.serving.turn import Failed, Finished
from capserve.text.messages import Message
from tests.reuse.conftest import Engines
from tests.reuse.desk import Ask, Desk, Guest, continued, desk
from tests.reuse.ledger import Ledger
from tests.reuse.talks import RESULTS, WORDS, Talk

GREEDY = Sampling(drafts=3, top_logprobs=0)
SAMPLED = Sampling(0.8, top_p=0.95, seed=5, drafts=3, top_logprobs=0)


@pytest.fixture
def server(engines: Engines, ledger: Ledger, tmp_path: Path) -> Iterator[Desk]:
    with desk(*engines(64, "float32"), ledger, directory=tmp_path) as made:
        yield made


def talked(server: Desk, turns: int = 2) -> str:
    """The id of a session of so many turns."""
    talk, name = Talk(thinking=False), None
    for words in WORDS[:turns]:
        talk.say(words, RESULTS[0])
        end = server.ask(talk.conversation(), Ask(GREEDY, on=False))
        assert isinstance(end, Finished)
        talk.heard(end.message, loses=False)
        name = end.metrics.session_id
    assert name is not None
    return name


def says(server: Desk, session_id: str, words: str, sampling: Sampling = GREEDY) -> Finished:
    known = server.known(session_id)
    assert known is not None
    talk = continued(known, Message("user", words))
    end = server.ask(talk, Ask(sampling, session_id=session_id))
    assert isinstance(end, Finished)
    assert end.metrics.session_id == session_id
    return end


def messages(server: Desk, session_id: str) -> int:
    known = server.known(session_id)
    assert known is not None
    assert known.conversation is not None
    return len(known.conversation.messages)


def test_after_an_undo_the_session_goes_on_as_if_the_turn_had_never_been(server: Desk) -> None:
    name = talked(server)
    done = server.order(UndoSession("key", name))
    assert (done.removed_turns, messages(server, name)) == (1, 3)
    end = says(server, name, WORDS[3], SAMPLED)
    assert end.metrics.cached_tokens > 50, "the state before the undone turn is still there"
    assert messages(server, name) == 5


def test_forks_and_their_source_go_on_each_in_its_own_way(server: Desk) -> None:
    name = talked(server)
    made = [
        *server.order(ForkSession("key", name, n=2)).sessions,
        *server.order(ForkSession("key", name, turns=1)).sessions,
    ]
    names = [name, *(session.id for session in made)]
    for session_id, words in zip(names, WORDS[2:6], strict=True):
        assert says(server, session_id, words).metrics.cached_tokens > 50
    assert [messages(server, session_id) for session_id in names] == [7, 7, 7, 5]
    # Once more, so that each goes on from what itself has said.
    for session_id in reversed(names):
        says(server, session_id, WORDS[0], SAMPLED)


def test_a_reply_that_was_continued_is_one_message_of_its_session(server: Desk) -> None:
    talk = Talk(thinking=False)
    talk.say(WORDS[3], RESULTS[0])
    first = server.ask(talk.conversation(), Ask(GREEDY, max_tokens=7, on=False))
    assert isinstance(first, Finished)
    talk.heard(first.message, loses=False)
    assert talk.may_go_on
    then = server.ask(talk.conversation(), Ask(GREEDY, max_tokens=7, on=False))
    assert isinstance(then, Finished)
    name = then.metrics.session_id
    assert name is not None
    known = server.known(name)
    assert known is not None
    assert known.conversation is not None
    [_, _, reply] = known.conversation.messages
    assert reply.content == first.message.content + then.message.content
    says(server, name, WORDS[0])
    assert server.order(UndoSession("key", name, turns=2)).session.messages == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at", [("extend", 1), ("extend", 3), ("step", 1), ("step", 4)])
def test_a_turn_that_made_way_says_what_it_would_have_said(
    server: Desk, at: tuple[str, int], sampling: Sampling
) -> None:
    talked(server)
    long, short = Talk(system="", thinking=False), Talk(thinking=False)
    long.say(WORDS[5], RESULTS[0])
    short.say(WORDS[0], RESULTS[0])
    inside = Guest(short.conversation(), Ask(SAMPLED, max_tokens=2), at)
    end = server.ask(long.conversation(), Ask(sampling, max_tokens=40, guest=inside))
    assert isinstance(end, Finished)
    assert end.metrics.parks == 1
    assert isinstance(server.guest_end, Finished)


def test_a_turn_that_is_cancelled_while_parked_leaves_what_it_had_read(server: Desk) -> None:
    long, short = Talk(system="", thinking=False), Talk(thinking=False)
    long.say(WORDS[5], RESULTS[0])
    short.say(WORDS[0], RESULTS[0])
    inside = Guest(short.conversation(), Ask(GREEDY, max_tokens=2), ("extend", 3), ends_host=True)
    ask = Ask(SAMPLED, max_tokens=40)
    end = server.ask(long.conversation(), replace(ask, guest=inside))
    assert isinstance(end, Failed)
    assert end.metrics.parks == 1
    again = server.ask(long.conversation(), ask)
    assert again.metrics.cached_tokens == 64 * 3
