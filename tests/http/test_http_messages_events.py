"""The events of the Anthropic dialect, byte by byte and for any way in which a reply may be cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from harness import end_tokens, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from capserve.api.messages_events import (
    PING,
    MessageChunks,
    MessageEvents,
    MessageHead,
    body_of,
    whole_message,
)
from capserve.errors import UnavailableError
from capserve.serving.lifecycle import FinishReason
from capserve.serving.metrics import TurnMetrics
from capserve.serving.sinks import Reply
from capserve.serving.turn import Delta, Failed, Finished, ToolCallDelta
from capserve.text.messages import Message
from capserve.text.output import OutputSpec, TurnOutput


def head(**fields: Any) -> MessageHead:
    known = {"id": "msg_1", "model": "m", "request_id": "r1", "prompt_tokens": 30}
    return MessageHead(**{**known, **fields})


def finished(reason: FinishReason = FinishReason.STOP, **metrics: Any) -> Finished:
    record = TurnMetrics("r1", "done", **metrics)
    return Finished(reason, Message("assistant"), 30, 9, 4, record)


CALL = ToolCallDelta(0, "call_ab", "f", '{"b":1,"a":2.50}')

STREAM = """\
event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",\
"model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":30,\
"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"",\
"signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta",\
"signature":"SIGNATURE"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Ja, "}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"schön"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use",\
"id":"toolu_ab","name":"f","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta",\
"partial_json":"{\\"b\\":1,\\"a\\":2.50}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},\
"usage":{"input_tokens":8,"cache_creation_input_tokens":5,"cache_read_input_tokens":17,\
"output_tokens":9,"output_tokens_details":{"thinking_tokens":4}},"capserve":CAPSERVE}

event: message_stop
data: {"type":"message_stop"}

"""


def test_a_turn_becomes_exactly_these_bytes():
    chunks = MessageChunks(head(marked_tokens=22, seed=3, notes=("n",)))
    end = finished(FinishReason.TOOL_CALLS, cached_tokens=17)
    turn = [
        Delta.of(reasoning="Hm"),
        Delta(),
        Delta.of(content="Ja, "),
        Delta.of(content="schön", tool_calls=(CALL,)),
        end,
    ]
    written = [chunks.written((0, event)) for event in turn]
    assert [over for _, over in written] == [False] * 4 + [True]
    data = b"".join(piece for piece, _ in written).decode()
    signature = data.split('"signature_delta","signature":"')[1].split('"')[0]
    metrics = orjson.dumps(end.metrics.as_dict() | {"seed": 3, "notes": ["n"]}).decode()
    assert data == STREAM.replace("SIGNATURE", signature).replace("CAPSERVE", metrics)
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_failed_turn_and_a_stream_that_is_cut_end_with_an_error_event():
    error = UnavailableError("busy")
    told = {"type": "overloaded_error", "message": "busy"}
    chunks = MessageChunks(head())
    data, over = chunks.written((0, Failed(error, TurnMetrics("r1", "error"))))
    assert over
    name, line = data.decode().strip().split("\n")
    assert name == "event: error"
    sent = json.loads(line.removeprefix("data: "))
    assert sent["error"] == told
    assert sent["capserve"]["terminal_state"] == "error"
    cut = b'event: error\ndata: {"type":"error","error":%s,"request_id":"r1"}\n\n'
    assert chunks.cut(error) == cut % orjson.dumps(told)


def test_a_reply_of_nothing_is_a_message_without_blocks():
    body = body_of(head(), [Reply(Delta(), finished())])
    assert (body["content"], body["stop_reason"]) == ([], "end_turn")


WORD = st.text(min_size=1, max_size=3)
PIECE = st.one_of(
    st.builds(lambda text: Delta.of(reasoning=text), WORD),
    st.builds(lambda text: Delta.of(content=text), WORD),
    st.builds(lambda one, two: Delta.of(content=two, reasoning=one), WORD, WORD),
    st.just(Delta.of(tool_calls=(CALL,))),
    st.just(Delta.of(tool_calls=(CALL, CALL))),
    st.just(Delta()),
)


@given(st.lists(PIECE, max_size=8))
def test_blocks_are_opened_and_closed_one_by_one_and_hold_what_came(pieces):
    events = MessageEvents(head())
    sent = [event for piece in pieces for event in events.delta(piece)]
    sent += events.finished(finished())
    kinds = [event["type"] for event in sent]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened: int | None = None
    count = 0
    for event in sent[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None
            opened = count = event["index"]
        else:
            assert event["index"] == opened
            if event["type"] == "content_block_stop":
                opened, count = None, count + 1
    assert opened is None
    body = whole_message(MessageEvents(head()), [*pieces, finished()])
    for kind, key in (("text", "content"), ("thinking", "reasoning")):
        texts = [block[kind] for block in body["content"] if block["type"] == kind]
        assert "".join(texts) == "".join(getattr(piece, key) for piece in pieces)
    calls = sum(len(piece.tool_calls) for piece in pieces)
    assert sum(block["type"] == "tool_use" for block in body["content"]) == calls


LETTERS = st.text("ab< ", max_size=12)


@given(
    thought=LETTERS,
    text=LETTERS,
    stops=st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3).map(tuple),
)
def test_the_stop_sequence_told_is_the_first_to_be_completed(thought, text, stops):
    machine = TurnOutput(OutputSpec((), stops, True), tokenizer(), end_tokens())
    events = MessageEvents(head())
    tokens = [*tokenizer().encode(f"{thought}</think>{text}").tolist(), end_tokens()[0]]
    for token in tokens:
        part = machine.feed((token,))
        list(events.delta(Delta.of(part.content, part.reasoning, tokens=(token,))))
        if machine.stopped:
            break
    machine.finish()
    *_, told, _ = events.finished(replace(finished(), stop_string=machine.stop_string))
    wanted = None
    for channel in (thought, text):
        ends = (channel[:i] for i in range(1, len(channel) + 1))
        first = next((end for end in ends if end.endswith(stops)), None) if stops else None
        if first is not None:
            wanted = max((s for s in stops if first.endswith(s)), key=len)
            break
    assert told["delta"]["stop_sequence"] == wanted
    assert (wanted is not None) == machine.stopped


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_way_to_finish_has_a_stop_reason(reason):
    told, _ = list(MessageEvents(head()).finished(finished(reason)))[1:]
    known = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert told["delta"]["stop_reason"] == known[reason.value]
