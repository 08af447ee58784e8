"""Does the strict reading of replies notice what a lenient client would let pass?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_shapes import STORY
from harness import NAME, Replies, Served, fake_engine, serving, user
from sdk_replies import Said, send

from capserve.text.markup import spell_call, spell_parameter

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CALLS = "".join(
    f"\n\n{spell_call('look', spell_parameter('path', path))}" for path in ("a.py", "b.py")
)
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [user("look")],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": "look",
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
    },
    "/v1/messages": {
        "messages": [user("look")],
        "max_tokens": 300,
        "thinking": {"type": "adaptive"},
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    },
}
CHAT, RESPONSES, MESSAGES = ASKED


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = Replies()
    replies.say["look"] = f"Two files.\n</think>\n\nI look.{CALLS}"
    with serving(fake_engine(replies)) as running:
        yield running


def asked(path: str, stream: bool) -> dict[str, Any]:
    body = {"model": NAME, "stream": stream, **ASKED[path]}
    if not stream:
        body.pop("stream_options", None)
    return body


def reread(path: str, body: dict[str, Any], raw: bytes) -> Said:
    """What is understood of these bytes, if a server sent them."""
    kind = "text/event-stream" if body["stream"] else "application/json"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=raw, headers={"content-type": kind})

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
        return send(client, path, body)


@pytest.mark.parametrize("path", ASKED)
def test_plain_and_streamed_are_understood_as_the_same_reply(served: Served, path: str) -> None:
    plain, streamed = (send(served.http, path, asked(path, stream)) for stream in (False, True))
    for said in (plain, streamed):
        assert (said.text, said.reasoning) == ("I look.", "Two files.")
        assert [(call.name, call.value["path"]) for call in said.calls] == [
            ("look", "a.py"),
            ("look", "b.py"),
        ]
    assert (plain.prompt, plain.output) == (streamed.prompt, streamed.output)
    assert plain.reason == streamed.reason


FAULTS = [
    (CHAT, b'"choices":', b'"choises":'),
    (CHAT, b'"created":', b'"created":"then","was":'),
    (CHAT, b'"finish_reason":"tool_calls"', b'"finish_reason":"tools"'),
    (CHAT, b'"finish_reason":"tool_calls"', b'"finish_reason":null'),
    (CHAT, b"data: [DONE]\n\n", b""),
    (CHAT, b'"role":"assistant"', b'"role":"robot"'),
    (CHAT, b'"prompt_tokens":', b'"prompt_tokens":1'),
    (CHAT, b'"id":"chatcmpl-', b'"id":"other-'),
    (CHAT, b'"index":0', b'"index":"0"'),
    (RESPONSES, b'"sequence_number":3', b'"sequence_number":4'),
    (RESPONSES, b'"type":"response.output_item.added"', b'"type":"response.item.added"'),
    (RESPONSES, b"event: response.completed", b"event: response.done"),
    (RESPONSES, b'"status":"completed"', b'"status":"complete"'),
    (RESPONSES, b'"call_id":', b'"callid":'),
    (RESPONSES, b'"input_tokens":', b'"input_tokens":"many","were":'),
    (MESSAGES, b'"type":"message_start"', b'"type":"message_begin"'),
    (MESSAGES, b'"stop_reason":"tool_use"', b'"stop_reason":"end_turn"'),
    (MESSAGES, b'"stop_reason":"tool_use"', b'"stop_reason":"tools"'),
    (MESSAGES, b'"index":1', b'"index":2'),
    (MESSAGES, b'"type":"input_json_delta"', b'"type":"json_delta"'),
    (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', b""),
]


@pytest.mark.parametrize(("path", "right", "wrong"), FAULTS)
def test_a_planted_fault_in_a_stream_is_noticed(
    served: Served, path: str, right: bytes, wrong: bytes
) -> None:
    body = asked(path, True)
    raw = served.http.post(path, json=body).content
    assert right in raw
    assert reread(path, body, raw).calls
    with pytest.raises((AssertionError, KeyError, ValueError)):
        reread(path, body, raw.replace(right, wrong, 1))


def test_a_stream_that_breaks_off_is_noticed(served: Served) -> None:
    for path in ASKED:
        body = asked(path, True)
        raw = served.http.post(path, json=body).content
        for cut in (len(raw) - 1, raw.rindex(b"data: "), len(raw) // 2):
            with pytest.raises((AssertionError, KeyError, ValueError)):
                reread(path, body, raw[:cut])


def test_the_story_has_what_agents_do() -> None:
    """Parallel calls, a reply of nothing but calls, one of nothing but words, a question more."""
    assert max(len(step.calls) for step in STORY) == 2
    assert any(step.calls and not step.text for step in STORY)
    assert any(step.words for step in STORY[:-1])
    assert not STORY[-1].calls
