"""A conversation in JSON comes back exactly, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capserve.serving.sessions.conversation_json import (
    conversation_json,
    conversation_of,
    message_of,
    message_row,
)
from capserve.text.messages import Conversation, Message, ToolCall

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    reasoning=st.none() | TEXT,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    tool_call_id=TEXT,
    name=TEXT,
    breakpoint=st.booleans(),
)
CONVERSATION = st.builds(
    Conversation,
    st.lists(MESSAGE, max_size=4).map(tuple),
    st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=2).map(tuple),
    st.none() | st.dictionaries(TEXT, JSON, max_size=3),
)


@given(CONVERSATION)
def test_a_conversation_comes_back_exactly(conversation: Conversation) -> None:
    back = conversation_of(conversation_json(conversation))
    assert back == conversation
    assert back is not None
    marks = [message.breakpoint for message in conversation.messages]
    assert [message.breakpoint for message in back.messages] == marks  # no part of equality
    for ours, theirs in zip(conversation.tools, back.tools, strict=True):
        assert list(ours) == list(theirs), "the template shows keys in their order"


def test_no_conversation_is_no_empty_one() -> None:
    assert conversation_of(conversation_json(None)) is None
    assert conversation_of(conversation_json(Conversation(()))) == Conversation(())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"messages":[],"tools":[]}',
        '{"messages":[{"role":"root","content":""}],"tools":[],"template_kwargs":null}',
        '{"messages":[{"role":"user","content":null}],"tools":[],"template_kwargs":null}',
        '{"messages":[{"role":"user","content":"","tool_calls":[["a"]]}],"tools":[],'
        '"template_kwargs":null}',
        '{"messages":[{"role":"user","content":"","reasoning":1}],"tools":[],'
        '"template_kwargs":null}',
        '{"messages":[],"tools":["x"],"template_kwargs":null}',
        '{"messages":[],"tools":[],"template_kwargs":[]}',
        "[" * 100_000,
        "7",
        '{"messages":{},"tools":[],"template_kwargs":null}',
        '{"messages":[["role","user"]],"tools":[],"template_kwargs":null}',
        '{"messages":[{"role":["user"],"content":""}],"tools":[],"template_kwargs":null}',
        '{"messages":[{"role":"user","content":"","tool_calls":{"a":1}}],"tools":[],'
        '"template_kwargs":null}',
        '{"messages":[{"role":"user","content":"","tool_calls":["abc"]}],"tools":[],'
        '"template_kwargs":null}',
        '{"messages":[],"tools":{},"template_kwargs":null}',
    ],
)
def test_what_is_no_conversation_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of them, and nothing else
        conversation_of(text)


ROW = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    "change",
    [
        {"role": None},
        {"content": None},
        {"content": ["q"]},
        {"name": 7},
        {"tool_call_id": None},
        {"breakpoint": 1},
        {"tool_calls": [["f", "{}", None]]},
        {"tool_calls": None},
        {"unknown": ""},
    ],
)
def test_a_field_that_no_message_has_is_a_value_error(change: dict[str, object]) -> None:
    assert message_of(ROW) == Message("user", "q")
    with pytest.raises(ValueError):  # noqa: PT011 - any of them, and nothing else
        message_of(ROW | change)


def test_rows_with_every_field_spelled_out_are_read_too() -> None:
    call = ToolCall("f", "{}", "1")
    message = Message("assistant", "a", tool_calls=(call,), breakpoint=True)
    full = {"reasoning": None, "tool_call_id": "", "name": ""} | message_row(message)
    back = message_of(full)
    assert (back, back.breakpoint) == (message, True)
