"""The parts that the sockets hide: the text thread's line, the body budget, the stream's clock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from harness import WAIT_S
from starlette.requests import Request

from capserve.api.body import HELD_BODIES, Bodies
from capserve.api.choices import ChoiceChunks, ChoiceEvent
from capserve.api.schemas import ChatRequest
from capserve.api.sse import HEARTBEAT, ReplyHead
from capserve.api.state import ModelInfo, SamplingDefaults
from capserve.api.stream import Departure, EventStream
from capserve.api.text_thread import TextThread
from capserve.api.translate import output_spec, sampling
from capserve.api.validation import validated
from capserve.errors import QueueFullError, StartupError, UnavailableError
from capserve.serving.lifecycle import FinishReason
from capserve.serving.metrics import TurnMetrics
from capserve.serving.turn import CancelToken, Delta, Finished
from capserve.text.messages import Message

HEAD = ReplyHead("chatcmpl-1", 0, "nano", "fp")


def test_text_jobs_run_one_by_one_off_the_loop_and_a_full_line_refuses():
    async def scenario() -> None:
        text = TextThread(max_waiting=2)
        inside, leave = threading.Event(), threading.Event()

        def hold() -> str:
            inside.set()
            assert leave.wait(WAIT_S)
            return threading.current_thread().name

        first = asyncio.ensure_future(text.run(hold))
        await asyncio.to_thread(inside.wait, WAIT_S)
        ran: list[str] = []
        second = asyncio.ensure_future(text.run(lambda: ran.append("second")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait"):
            await text.run(lambda: None)
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.ensure_future(text.run(lambda: ran.append("third")))
        await asyncio.sleep(0)
        leave.set()
        assert "capserve-text" in await first
        await third
        assert ran == ["third"], "a job whose client left before it began never runs"
        text.close()

    asyncio.run(scenario())


def request_of(pieces: list[bytes]) -> Request:
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json; charset=utf-8")]}
    return Request(scope, receive)


def test_all_held_bodies_together_have_a_limit_and_are_given_back():
    async def scenario() -> None:
        bodies = Bodies(max_body_bytes=10)
        held = []
        for _ in range(HELD_BODIES):
            reading = bodies.read(request_of([b"x" * 5, b"y" * 5]))
            assert await reading.__aenter__() == b"xxxxxyyyyy"
            held.append(reading)
        with pytest.raises(UnavailableError, match=rf"{10 * HELD_BODIES}"):
            async with bodies.read(request_of([b"z"])):
                pass
        assert bodies.held_bytes == 10 * HELD_BODIES
        for reading in held:
            await reading.__aexit__(None, None, None)
        assert bodies.held_bytes == 0

    asyncio.run(scenario())


def test_a_heartbeat_breaks_silence_while_events_have_nothing_to_show():
    """A long call is written for minutes: events come all the time, but no text."""

    async def scenario() -> None:
        beaten, sent = asyncio.Event(), []

        class Writing:
            async def next(self, timeout_s: float | None = None) -> ChoiceEvent:
                await asyncio.sleep(0)
                if not beaten.is_set():
                    return 0, Delta(tokens=(1,))
                metrics = TurnMetrics("r", "done")
                return 0, Finished(FinishReason.STOP, Message("assistant"), 1, 1, 0, metrics)

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body"))
            if message.get("body") == HEARTBEAT:
                beaten.set()

        cancel = CancelToken()
        departure = Departure(receive)
        departure.cancels(cancel)
        chunks = ChoiceChunks(HEAD, lambda _: b"", 1)
        stream = EventStream(Writing(), chunks, departure, heartbeat_s=0.02, stall_timeout_s=5)
        async with asyncio.timeout(WAIT_S):
            await stream({}, receive, send)
        assert HEARTBEAT in sent
        assert sent[-1].endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_a_client_that_left_before_the_turn_was_made_still_cancels_it():
    async def scenario() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        departure = Departure(receive)
        await asyncio.sleep(0)
        cancelled = asyncio.Event()
        cancel = CancelToken()
        cancel.subscribe(cancelled.set)
        departure.cancels(cancel)
        async with asyncio.timeout(WAIT_S):
            await cancelled.wait()
        assert cancel.reason == "disconnect"

    asyncio.run(scenario())


def test_sampling_defaults_are_the_checkpoints_own():
    read = SamplingDefaults.from_generation_config
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert read(sampled) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert read({**sampled, "do_sample": False}).temperature == 0.0
    assert read({"max_new_tokens": 9}) == SamplingDefaults(temperature=0.0, max_new_tokens=9)
    assert read({"do_sample": True, "temperature": 1, "top_k": -1, "eos_token_id": [1]}) == (
        SamplingDefaults(temperature=1, top_k=-1)
    )


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("temperature", "warm", "'warm'"),
        ("temperature", -1, "-1"),
        ("temperature", True, "true"),
        ("top_p", 0, "0"),
        ("top_p", 1.1, "1.1"),
        ("top_k", 20.0, "20.0"),
        ("top_k", False, "false"),
        ("min_p", float("nan"), "NaN"),
        ("repetition_penalty", 0, "0"),
        ("repetition_penalty", 1e9, "1000000000.0"),
        ("max_new_tokens", 0, "0"),
        ("do_sample", "yes", "'yes'"),
    ],
)
def test_a_default_that_no_request_could_have_stops_the_start(key, value, shown):
    with pytest.raises(StartupError) as refused:
        SamplingDefaults.from_generation_config({key: value})
    assert "generation_config.json" in refused.value.message
    assert key in refused.value.message
    assert shown in refused.value.message


def model(**fields):
    numbers = {"max_model_len": 64, "vocab_size": 8, "max_drafts": 0, "default_drafts": 0}
    return ModelInfo(served_names=("m",), end_tokens=(1,), **numbers, **fields)


def asked(**fields):
    return validated(ChatRequest, {"messages": [{"role": "user", "content": "q"}], **fields})


def test_a_temperature_too_small_to_divide_by_is_greedy():
    for value, seen in ((0, 0.0), (9.9e-6, 0.0), (1e-5, 1e-5), (0.5, 0.5)):
        assert sampling(asked(temperature=value), model()).temperature == seen
    assert sampling(asked(), model(defaults=SamplingDefaults(temperature=1e-9))).temperature == 0


def test_a_request_without_a_seed_gets_a_fresh_one_unless_the_server_has_one():
    seeds = {sampling(asked(), model()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sampling(asked(), model(seed=0)).seed == 0
    assert sampling(asked(seed=5), model(seed=9)).seed == 5
    assert sampling(asked(seed=-1), model()).seed == 2**64 - 1


def test_no_parallel_calls_means_one_call_where_there_are_tools():
    tools = ({"type": "function", "function": {"name": "f"}},)
    for fields, offered, most in (
        ({"parallel_tool_calls": False}, tools, 1),
        ({"parallel_tool_calls": False}, (), None),
        ({"parallel_tool_calls": False, "tool_choice": "none"}, tools, None),
        ({"parallel_tool_calls": True}, tools, None),
        ({}, tools, None),
    ):
        assert output_spec(asked(**fields), offered, False).max_calls == most
