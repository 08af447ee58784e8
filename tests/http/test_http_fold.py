"""Is the streamed reply the plain reply, whatever a model writes and wherever it is cut?"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from harness import Replies, chat_body, end_tokens, fake_engine, serving, tokenizer, user

from capserve.api.sse import ChatChunks, ReplyHead, encode, whole_body
from capserve.engine.seam import TokenLogprob
from capserve.serving.lifecycle import FinishReason
from capserve.serving.metrics import TurnMetrics
from capserve.serving.turn import Delta, Finished, ToolCallDelta
from capserve.testing.replies import TOOLS, Reply, generate_replies
from capserve.text.messages import Message
from capserve.text.output import OutputDelta, OutputSpec, TurnOutput

REPLIES = generate_replies(200, seed=6)
HEAD = ReplyHead("chatcmpl-1", 1_700_000_000, "nano", "fp_1")


@functools.cache
def single_bytes() -> dict[bytes, int]:
    ends = set(end_tokens())
    ids = [i for i in range(tokenizer().vocab_size) if i not in ends]
    return {tokenizer().token_bytes(i): i for i in ids if len(tokenizer().token_bytes(i)) == 1}


def byte_tokens(text: str) -> list[int]:
    """`text` as tokens of one byte each: every border between them is a cut."""
    return [single_bytes()[bytes([byte])] for byte in text.encode()]


def client_message(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client adds up from a stream, written without a look at the server's own fold."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                assert call["index"] == len(message["calls"])
                message["calls"].append((call["id"], call["type"], call["function"]))
    return message


def plain_message(body: dict[str, Any]) -> dict[str, Any]:
    """The message of a plain body in the form of `client_message`."""
    message = body["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    if message["content"] is None:
        assert calls, "null content is for replies that are nothing but calls"
    return {
        "role": message["role"],
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [(call["id"], call["type"], call["function"]) for call in calls],
    }


def deltas_of(reply: Reply, cuts: Callable[[list[int]], list[list[int]]]) -> list[Delta | Finished]:
    """The events of a turn that wrote `reply` in the pieces that `cuts` makes."""
    numbers = itertools.count()
    machine = TurnOutput(
        OutputSpec(TOOLS, starts_in_reasoning=reply.starts_in_reasoning),
        tokenizer(),
        end_tokens(),
        lambda: f"call_{next(numbers)}",
    )

    def delta(part: OutputDelta, tokens: Sequence[int] = ()) -> Delta:
        calls = tuple(ToolCallDelta(c.index, c.id, c.name, c.arguments) for c in part.calls)
        return Delta.of(part.content, part.reasoning, calls, tuple(tokens))

    pieces = cuts(byte_tokens(reply.text))
    events: list[Delta | Finished] = [delta(machine.feed(piece), piece) for piece in pieces]
    events.append(delta(machine.finish()))
    return [*events, finished(machine.message(), machine.reasoning_tokens)]


def finished(message: Message = Message("assistant"), reasoning_tokens: int = 0) -> Finished:
    metrics = TurnMetrics(request_id="r", terminal_state="done", cached_tokens=3)
    return Finished(FinishReason.STOP, message, 5, 7, reasoning_tokens, metrics)


def streamed(events: Sequence[Delta | Finished]) -> list[dict[str, Any]]:
    """The chunks of a stream, through their bytes."""
    chunks = ChatChunks(HEAD, tokenizer().token_bytes)
    sent = b""
    for event in events:
        made = chunks.delta(event) if isinstance(event, Delta) else chunks.finished(event)
        sent += b"".join(map(encode, made))
    blocks = sent.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_stream_and_plain_are_the_same_message_for_200_replies_cut_at_every_byte():
    rng = random.Random(6)

    def anywhere(tokens: list[int]) -> list[list[int]]:
        borders = sorted(rng.sample(range(len(tokens) + 1), min(len(tokens) + 1, 5)))
        return [tokens[a:b] for a, b in itertools.pairwise([0, *borders, len(tokens)])]

    seen_calls = 0
    for reply in REPLIES:
        whole = plain_message(
            whole_body(ChatChunks(HEAD, tokenizer().token_bytes), deltas_of(reply, lambda t: [t]))
        )
        seen_calls += len(whole["calls"])
        if reply.expected is not None:
            assert whole["content"].strip() == reply.expected.content.strip()
            assert len(whole["calls"]) == len(reply.expected.calls)
        for cuts in (lambda tokens: [[token] for token in tokens], anywhere):
            events = deltas_of(reply, cuts)
            assert client_message(streamed(events)) == whole, reply.text
            body = whole_body(ChatChunks(HEAD, tokenizer().token_bytes), events)
            assert plain_message(body) == whole, reply.text
    assert seen_calls > 100


def test_stream_and_plain_agree_over_http_for_200_replies_sent_byte_by_byte():
    class ByteReplies(Replies):
        def __call__(self, prompt):
            asked = super().__call__(prompt)  # an echo, in which the reply's number stands
            number = int(tokenizer_text(asked).rsplit("no. ", 1)[1].split(".")[0])
            return [*byte_tokens(REPLIES[number].text), end_tokens()[0]]

    def tokenizer_text(tokens: Sequence[int]) -> str:
        return b"".join(map(tokenizer().token_bytes, tokens)).decode()

    def without_ids(message: dict[str, Any]) -> dict[str, Any]:
        assert all(call[0].startswith("call_") for call in message["calls"])
        assert len({call[0] for call in message["calls"]}) == len(message["calls"])
        return {**message, "calls": [call[1:] for call in message["calls"]]}

    with serving(fake_engine(ByteReplies())) as served:
        for number, reply in enumerate(REPLIES):
            body = {
                **chat_body([user(f"Reply no. {number}.")]),
                "tools": list(TOOLS),
                "enable_thinking": reply.starts_in_reasoning,
                "flashrt_K": 0,
            }
            _, chunks = served.events(body)
            plain = served.post({**body, "flashrt_K": 4}).json()
            assert without_ids(client_message(chunks)) == without_ids(plain_message(plain))
            reasons = (chunks[-1]["choices"][0], plain["choices"][0])
            assert reasons[0]["finish_reason"] == reasons[1]["finish_reason"]


def test_one_delta_of_everything_becomes_one_chunk_for_each_kind():
    call = ToolCallDelta(0, "call_a", "f", "{}")
    delta = Delta.of("words", "thought", (call, ToolCallDelta(1, "call_b", "g", "{}")), (1, 2))
    chunks = streamed([delta, finished()])
    keys = [list(chunk["choices"][0]["delta"]) for chunk in chunks]
    assert keys == [
        ["role", "content"],
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
        [],
    ]


def test_tokens_without_text_yet_still_bring_their_logprobs_once():
    head = ReplyHead("id", 0, "nano", "fp", logprobs=True, token_ids=True, prompt_token_ids=(9, 8))
    chunks = ChatChunks(head, lambda token: bytes([token]))
    entry = TokenLogprob(0xC3, -0.5, ((0xC3, -0.5), (7, float("-inf"))))
    made = [*chunks.delta(Delta(tokens=(0xC3,), logprobs=(entry,)))]
    assert made[0]["prompt_token_ids"] == [9, 8]
    [_, only] = made
    choice = only["choices"][0]
    assert (choice["delta"], choice["token_ids"]) == ({}, [0xC3])
    [shown] = choice["logprobs"]["content"]
    assert shown["bytes"] == [0xC3]
    assert shown["token"] == "\N{REPLACEMENT CHARACTER}"
    assert shown["top_logprobs"][1]["logprob"] == -9999.0
    both = [*chunks.delta(Delta.of("a", "b", (), (1,), (entry,)))]
    assert [chunk["choices"][0]["logprobs"] is not None for chunk in both] == [True, False]


@pytest.mark.parametrize(
    ("content", "calls", "shown"),
    [
        ("", (), ""),
        ("x", (), "x"),
        ("", (ToolCallDelta(0, "c", "f", "{}"),), None),
        ("x", (ToolCallDelta(0, "c", "f", "{}"),), "x"),
    ],
)
def test_content_is_null_only_beside_calls(content, calls, shown):
    chunks = ChatChunks(HEAD, tokenizer().token_bytes)
    body = whole_body(chunks, [Delta.of(content, "", calls), finished()])
    assert body["choices"][0]["message"]["content"] == shown
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
