"""The openai and anthropic SDKs, blocking and asyncio: streams, parallel calls, parsed replies, and
leaving in the middle, in each of the three protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import anthropic
import openai
import pytest
from harness import Replies, Served, fake_engine, serving, user
from sdk_clients import ChatSdk, MessagesSdk, ResponsesSdk, Sdk, Trip

from capserve.text.markup import spell_call, spell_parameter

SDKS = [
    pytest.param(sdk, waits, id=f"{sdk.__name__}-{'async' if waits else 'sync'}")
    for sdk in (ChatSdk, ResponsesSdk, MessagesSdk)
    for waits in (False, True)
]
EVERY = pytest.mark.parametrize(("sdk", "waits"), SDKS)
HELD_AT_STEP = 20


def travel(to: str, hours: int) -> str:
    written = spell_parameter("to", to) + spell_parameter("hours", str(hours))
    return spell_call("travel", written)


def thought(text: str) -> str:
    return f"Let me think.\n</think>\n\n{text}"


@pytest.fixture(scope="module")
def replies() -> Replies:
    replies = Replies()
    replies.say["<tool_response>"] = thought("Both trips are done. 🧳")
    replies.say["two trips"] = thought(f"I go.\n\n{travel('Oslo', 2)}\n{travel('Rome', 5)}")
    replies.say["endless"] = thought("word " * 900)
    return replies


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


@EVERY
def test_words_come_piece_by_piece_and_add_up(
    served: Served, replies: Replies, sdk: Any, waits: bool
) -> None:
    text = "Ein Text 🦉 mit 漢字, and some more words behind them."
    replies.say["piece by piece"] = thought(text)

    async def hear() -> list[str]:
        return [piece async for piece in sdk(served.url, waits).words("piece by piece")]

    pieces = asyncio.run(hear())
    assert "".join(pieces) == text
    assert len(pieces) >= 3


@EVERY
def test_parallel_calls_are_run_and_the_loop_only_appends(
    served: Served, sdk: Any, waits: bool
) -> None:
    async def loop() -> None:
        client: Sdk = sdk(served.url, waits)
        history: list[Any] = [user(f"two trips {sdk.__name__} {waits}")]
        first = await client.turn(history)
        assert first.text == "I go."
        assert [call[1:] for call in first.calls] == [
            ("travel", {"to": "Oslo", "hours": 2}),
            ("travel", {"to": "Rome", "hours": 5}),
        ]
        assert first.pieces >= 3
        history += [*first.history, *client.result(first.calls, ["rain", "sun"])]
        second = await client.turn(history)
        assert (second.text, second.calls) == ("Both trips are done. 🧳", [])
        assert second.record["prefix_action"] == "message_append"

    asyncio.run(loop())


@EVERY
@pytest.mark.parametrize("stream", [False, True])
def test_a_parsed_reply_is_of_its_type(served: Served, sdk: Any, waits: bool, stream: bool) -> None:
    """The fake would rather say something else: only the grammar makes it keep to the form."""
    trip = asyncio.run(sdk(served.url, waits).parsed("plan a trip", stream))
    assert isinstance(trip, Trip)


@EVERY
def test_who_leaves_a_stream_ends_its_turn_within_a_step(
    replies: Replies, sdk: Any, waits: bool
) -> None:
    engine = fake_engine(replies)
    with serving(engine) as served:
        client: Sdk = sdk(served.url, waits)

        async def leave() -> None:
            gate = engine.hold("step", at=HELD_AT_STEP)
            async with aclosing(client.words("endless")) as words:
                assert await anext(words)
                gate.wait_arrived()
                [item] = served.worker.items
                assert not item.cancel.cancelled
            served.worker.wait_cancelled(item)
            gate.open()
            served.worker.wait_idle()
            assert engine.calls("step") == HELD_AT_STEP, "the step under way is the last"
            assert served.worker.ends[0].metrics.terminal_state == "cancelled"
            assert await client.says("hello") == "I heard: hello"

        asyncio.run(leave())


@EVERY
def test_who_runs_out_of_patience_ends_its_turn_and_asks_again(
    replies: Replies, sdk: Any, waits: bool
) -> None:
    """A plain reply: nothing was sent yet when the client's own timeout closes the connection."""
    engine = fake_engine(replies)
    with serving(engine) as served:
        client: Sdk = sdk(served.url, waits)

        async def wait() -> None:
            gate = engine.hold("step", at=HELD_AT_STEP)
            with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
                await client.says("endless", timeout=0.5)
            [item] = served.worker.items
            served.worker.wait_cancelled(item)
            gate.open()
            served.worker.wait_idle()
            assert engine.calls("step") == HELD_AT_STEP
            assert await client.says("hello") == "I heard: hello"

        asyncio.run(wait())


@pytest.mark.parametrize("sdk", [ChatSdk, ResponsesSdk, MessagesSdk])
def test_a_task_that_is_cancelled_takes_its_turn_along(replies: Replies, sdk: Any) -> None:
    engine = fake_engine(replies)
    with serving(engine) as served:
        client: Sdk = sdk(served.url, True)

        async def cancel() -> None:
            gate = engine.hold("step", at=HELD_AT_STEP)
            asking = asyncio.create_task(client.says("endless"))
            await asyncio.to_thread(gate.wait_arrived)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            served.worker.wait_cancelled(served.worker.items[0])
            gate.open()
            served.worker.wait_idle()
            assert engine.calls("step") == HELD_AT_STEP
            assert await client.says("hello") == "I heard: hello"

        asyncio.run(cancel())


@pytest.mark.parametrize("sdk", [ChatSdk, ResponsesSdk, MessagesSdk])
def test_twenty_tasks_of_one_client_each_get_their_own_words(served: Served, sdk: Any) -> None:
    async def ask() -> list[str]:
        client: Sdk = sdk(served.url, True)
        return await asyncio.gather(*(client.says(f"number {n}") for n in range(20)))

    assert asyncio.run(ask()) == [f"I heard: number {n}" for n in range(20)]
