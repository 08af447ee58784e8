"""From the worker thread to the reader: nothing blocks, nothing is lost, a stall is noticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from serving_harness import (
    END,
    WAIT_S,
    Serving,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    user,
)

from capserve.engine.seam import Sampling
from capserve.errors import EngineError
from capserve.serving.metrics import TurnMetrics
from capserve.serving.sinks import FutureSink, StreamSink
from capserve.serving.turn import CancelToken, Delta, Failed, ToolCallDelta, WorkItem, merged
from capserve.text.channels import Channel, Text

QUESTION = user(some_words(60, seed=2))
END_EVENT = Failed(EngineError("planted"), TurnMetrics("r", "error"))


@dataclass
class Clock:
    now: float = 0.0
    read: Callable[[], float] = field(init=False)

    def __post_init__(self) -> None:
        self.read = lambda: self.now


def piece(n: int) -> Delta:
    return Delta.of(f"{n} ", tokens=(n,))


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), WAIT_S)

    asyncio.run(bounded())


def item_with(s: Serving, sink: FutureSink | StreamSink, cancel: CancelToken) -> WorkItem:
    made = s.item(make_prompt([QUESTION]), max_tokens=60, sampling=Sampling(end_tokens=(END,)))
    return WorkItem(made.request, made.submitted_at, sink, cancel)


def test_deltas_merge_into_what_they_add_up_to() -> None:
    call = ToolCallDelta(0, "call_0", "run", "{}")
    thought = Delta.of(reasoning="hm", tool_calls=(call,))
    whole = merged([piece(0), piece(1), thought, thought, piece(2)])
    words = [Text(Channel.CONTENT, "0 1 "), Text(Channel.CONTENT, "2 ")]
    hm = Text(Channel.REASONING, "hm")
    assert whole == Delta((words[0], hm, call, hm, call, words[1]), (0, 1, 2))
    assert (whole.content, whole.reasoning, whole.tool_calls) == ("0 1 2 ", "hmhm", (call, call))


def test_a_lagging_reader_gets_fewer_and_larger_pieces_in_order() -> None:
    async def body() -> None:
        sink = StreamSink(CancelToken(), stall_timeout_s=9.0, max_waiting=4)
        for n in range(1000):
            sink.deliver(piece(n))
        assert sink.waiting == 4, "the channel must be bounded"
        sink.deliver(END_EVENT)
        events = [event async for event in sink]
        assert events[-1] is END_EVENT
        deltas = [event for event in events if isinstance(event, Delta)]
        assert len(deltas) == 4
        assert merged(deltas).tokens == tuple(range(1000))

    run(body)


def test_a_reader_that_waits_is_woken_from_another_thread_for_every_burst() -> None:
    async def body() -> None:
        sink = StreamSink(CancelToken(), stall_timeout_s=9.0)
        taken = threading.Semaphore(0)

        def produce() -> None:
            for n in range(200):
                sink.deliver(piece(n))
                assert taken.acquire(timeout=WAIT_S), "the reader was never woken"
            sink.deliver(END_EVENT)

        producer = threading.Thread(target=produce)
        producer.start()
        tokens: list[int] = []
        async for event in sink:
            if isinstance(event, Delta):
                tokens += event.tokens
                taken.release()
        producer.join(WAIT_S)
        assert tokens == list(range(200))

    run(body)


def test_a_timeout_without_an_event_leaves_time_for_a_heartbeat() -> None:
    async def body() -> None:
        sink = StreamSink(CancelToken(), stall_timeout_s=9.0)
        assert await sink.next(timeout_s=0.001) is None
        sink.deliver(piece(1))
        assert await sink.next(timeout_s=WAIT_S) == piece(1)
        sink.deliver(END_EVENT)
        assert await sink.next() is END_EVENT
        with pytest.raises(StopAsyncIteration):
            await sink.next()

    run(body)


def test_a_reader_that_takes_nothing_has_its_turn_cancelled() -> None:
    async def body() -> None:
        clock, cancel = Clock(), CancelToken()
        sink = StreamSink(cancel, stall_timeout_s=5.0, clock=clock.read)
        clock.now = 100.0
        sink.deliver(piece(1))
        assert not cancel.cancelled, "nothing waited until now: the turn was merely slow"
        clock.now = 104.0
        sink.deliver(piece(2))
        assert await sink.next() == piece(1)
        clock.now = 108.0
        sink.deliver(piece(3))
        assert not cancel.cancelled, "the reader took something 4 seconds ago"
        assert sink.stalled_s == 4.0
        clock.now = 109.5
        sink.deliver(piece(4))
        assert cancel.cancelled
        assert cancel.reason == "stream stalled"

    run(body)


def test_the_readers_side_may_notice_the_stall_too() -> None:
    async def body() -> None:
        clock, cancel = Clock(), CancelToken()
        sink = StreamSink(cancel, stall_timeout_s=5.0, clock=clock.read)
        assert not sink.check_stall()
        sink.deliver(piece(1))
        clock.now = 5.5
        assert sink.check_stall()
        assert cancel.cancelled

    run(body)


def test_a_closed_loop_cancels_the_turn_instead_of_breaking_the_worker() -> None:
    cancel = CancelToken()
    sinks: list[StreamSink] = []

    async def body() -> None:
        sinks.append(StreamSink(cancel, stall_timeout_s=5.0))

    run(body)
    sinks[0].deliver(piece(1))
    assert cancel.cancelled


def test_a_stalled_stream_stops_the_turn_and_the_next_one_is_served() -> None:
    with serving() as s:

        async def body() -> None:
            clock, cancel = Clock(), CancelToken()
            sink = StreamSink(cancel, stall_timeout_s=5.0, clock=clock.read)
            gate = s.engine.hold("step", at=6)
            s.worker.submit(item_with(s, sink, cancel))
            gate.wait_arrived()
            clock.now = 6.0  # five chunks wait, and nobody takes one
            stalled = threading.Event()
            cancel.subscribe(stalled.set)
            gate.open()
            assert stalled.wait(WAIT_S), "the reader blocks its loop, and nobody noticed"
            events = [event async for event in sink]
            assert isinstance(events[-1], Failed)
            assert events[-1].error.status == 499
            assert "stream stalled" in events[-1].error.message
            assert s.engine.calls("step") == 6

        run(body)
        finished(s.ask(make_prompt([QUESTION]))[0])


def test_stream_and_plain_reply_are_the_same_turn() -> None:
    with serving() as s:
        replies = []

        async def body() -> None:
            future = FutureSink()
            s.worker.submit(item_with(s, future, CancelToken()))
            replies.append(await future.reply())
            sink = StreamSink(CancelToken(), stall_timeout_s=9.0)
            s.worker.submit(item_with(s, sink, CancelToken()))
            events = [event async for event in sink]
            deltas = [event for event in events if isinstance(event, Delta)]
            plain = replies[0]
            assert merged(deltas) == plain.delta
            assert finished(plain.end).message.content == plain.delta.content
            last = events[-1]
            assert not isinstance(last, Delta)
            assert finished(last).message == finished(plain.end).message

        run(body)


def test_a_waiter_that_gives_up_does_not_break_the_delivery() -> None:
    async def body() -> None:
        sink = FutureSink()
        waiter = asyncio.ensure_future(sink.reply())
        await asyncio.sleep(0)  # let it start
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        sink.deliver(piece(1))
        sink.deliver(END_EVENT)
        assert failed(sink.wait(WAIT_S).end).code == "engine_error"
        assert sink.wait(WAIT_S).delta == piece(1)

    run(body)
