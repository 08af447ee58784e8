"""Whole, one byte at a time, cut at every byte, in random cuts: the reply is the same."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from capserve.testing.replies import TOOLS, Reply, generate_replies
from capserve.text.channels import Channel
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.messages import Message
from capserve.text.output import OutputSpec, TurnOutput

REPLIES = generate_replies(200, seed=7)


def byte_tokens(tokenizer, text: str) -> list[int]:
    """One token for each byte, so that a cut may fall inside any character and any mark."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 9)}
    return [single[bytes([byte])] for byte in text.encode()]


class ByteStrings:
    """A vocabulary whose tokens are the given byte strings: cuts fall where a test wants them."""

    def __init__(self, parts: list[bytes]) -> None:
        self.specials: dict[str, int] = {}
        self.control_ids: frozenset[int] = frozenset()
        self.token_bytes = parts.__getitem__


def read_parts(spec: OutputSpec, parts: list[bytes]) -> Message:
    return read(ByteStrings(parts), spec, [range(len(parts))])


def read(tokenizer, spec: OutputSpec, parts) -> Message:
    numbers = itertools.count()
    output = TurnOutput(spec, tokenizer, {8185}, id_factory=lambda: f"call_{next(numbers)}")
    deltas = [output.feed(part) for part in parts]
    deltas.append(output.finish())
    message = output.message()
    assert message.content == "".join(d.content for d in deltas)
    assert message.reasoning == "".join(d.reasoning for d in deltas)
    calls = [call for d in deltas for call in d.calls]
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        (c.id, c.name, c.arguments) for c in message.tool_calls
    ]
    assert [c.index for c in calls] == list(range(output.calls))
    return message


def spec_of(reply: Reply, **kwargs) -> OutputSpec:
    return OutputSpec(tools=TOOLS, starts_in_reasoning=reply.starts_in_reasoning, **kwargs)


def test_a_reply_cut_at_every_byte_is_the_reply_read_whole():
    for reply in REPLIES:
        data, spec = reply.text.encode(), spec_of(reply)
        whole = read_parts(spec, [data])
        for cut in range(len(data) + 1):
            assert read_parts(spec, [data[:cut], data[cut:]]) == whole, (cut, reply.text)


def test_a_reply_read_one_byte_at_a_time_or_in_random_cuts_is_the_reply_read_whole():
    rng = random.Random(5)
    for reply in REPLIES:
        data, spec = reply.text.encode(), spec_of(reply)
        whole = read_parts(spec, [data])
        assert read_parts(spec, [bytes([byte]) for byte in data]) == whole, reply.text
        for _ in range(5):
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(12)))
            parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
            assert read_parts(spec, parts) == whole, (cuts, reply.text)


def test_a_reply_in_the_models_own_tokens_is_the_same_as_in_bytes(tokenizer):
    for reply in REPLIES:
        spec = spec_of(reply)
        tokens = tokenizer.encode(reply.text).tolist()
        in_bytes = b"".join(map(tokenizer.token_bytes, tokens)).decode()  # NFC, as tokenizing does
        assert read(tokenizer, spec, [tokens]) == read(
            tokenizer, spec, [byte_tokens(tokenizer, in_bytes)]
        )


def test_stop_strings_in_random_cuts_end_the_reply_at_the_same_place():
    rng = random.Random(3)
    for reply in REPLIES:
        stops = tuple(
            reply.text[at : at + rng.randrange(1, 6)]
            for at in (rng.randrange(len(reply.text) or 1) for _ in range(2))
        )
        data, spec = reply.text.encode(), spec_of(reply, stop=stops)
        whole = read_parts(spec, [data])
        assert read_parts(spec, [bytes([byte]) for byte in data]) == whole
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(4))
        parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        assert read_parts(spec, parts) == whole
        for stop in stops:
            assert not stop or stop not in whole.content.rstrip()


def test_a_clean_reply_is_read_as_what_was_written():
    clean = [reply for reply in REPLIES if reply.expected is not None]
    assert len(clean) > 100
    for reply in clean:
        message = read_parts(spec_of(reply), [reply.text.encode()])
        expected = reply.expected
        assert message.content == expected.content, reply.text
        assert message.reasoning == expected.reasoning.strip(), reply.text
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        assert calls == [(name, args) for name, args in expected.calls], reply.text
        for (_, args), (_, wanted) in zip(calls, expected.calls, strict=True):
            assert list(args) == list(wanted)


def test_nothing_of_a_broken_reply_is_lost_but_marks_and_whitespace():
    for reply in REPLIES:
        if reply.expected is not None:
            continue
        message = read_parts(spec_of(reply), [reply.text.encode()])
        if message.tool_calls:
            continue
        said = message.reasoning + message.content
        rest = reply.text
        for mark in ("<think>", "</think>"):
            said, rest = said.replace(mark, ""), rest.replace(mark, "")
        assert "".join(said.split()) == "".join(rest.split())


def test_without_tools_call_markup_is_content(tokenizer):
    text = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    message = read(tokenizer, OutputSpec(), [tokenizer.encode(text).tolist()])
    assert message == Message("assistant", text, reasoning="")


def test_end_tokens_and_control_tokens_are_no_text(tokenizer):
    tokens = tokenizer.encode("Hi<|im_start|>!").tolist()
    assert read(tokenizer, OutputSpec(), [[*tokens, 8185]]).content == "Hi!"


def test_reasoning_tokens_count_up_to_the_closing_mark(tokenizer):
    output = TurnOutput(OutputSpec(starts_in_reasoning=True), tokenizer, {8185})
    thought = tokenizer.encode("one two three\n").tolist()
    output.feed([*thought, tokenizer.specials["</think>"], *tokenizer.encode("\n\nHi").tolist()])
    assert output.reasoning_tokens == len(thought) + 1


def test_after_a_stop_string_nothing_more_is_read(tokenizer):
    output = TurnOutput(OutputSpec(stop=("END",)), tokenizer, {8185})
    delta = output.feed(byte_tokens(tokenizer, "some text EN"))
    assert (delta.content, output.stopped) == ("some text", False)
    delta = output.feed(byte_tokens(tokenizer, "D more"))
    assert (delta.content, output.stopped) == ("", True)
    assert output.feed(byte_tokens(tokenizer, "more")).content == ""
    assert output.finish().content == " "
    assert output.message().content == "some text "


def test_a_stop_string_inside_a_call_does_not_cut_it(tokenizer):
    text = "ok " + spell_call("get_time", spell_parameter("a", "END"))
    spec = OutputSpec(tools=TOOLS, stop=("END", "</function>"))
    message = read(tokenizer, spec, [byte_tokens(tokenizer, text)])
    assert message.content == "ok"
    assert [call.arguments for call in message.tool_calls] == ['{"a":"END"}']


GET_TIME = spell_call("get_time", "")


@pytest.mark.parametrize(
    ("text", "calls", "stopped"),
    [
        ("ok " + GET_TIME, 1, False),
        ("ok " + GET_TIME + "\n\n", 1, False),
        ("ok " + GET_TIME + "\n" + GET_TIME, 1, True),
        ("ok " + GET_TIME + GET_TIME * 2, 1, True),
        ("ok " + GET_TIME + " more", 1, True),
        ("ok, no call", 0, False),
    ],
)
def test_a_reply_with_a_most_of_one_call_ends_after_it_however_it_is_cut(
    tokenizer, text, calls, stopped
):
    spec = OutputSpec(tools=TOOLS, max_calls=1)
    data = byte_tokens(tokenizer, text)
    own = tokenizer.encode(text).tolist()
    for parts in ([data], [own], [[token] for token in data], [[token] for token in own]):
        output = TurnOutput(spec, tokenizer, {8185})
        for part in parts:
            output.feed(part)
        output.feed([8185])
        output.finish()
        assert (output.calls, output.stopped) == (calls, stopped)
        assert output.calls_are_full == bool(calls)
        assert output.message().content == ("ok" if calls else text)


def test_after_the_last_call_that_a_reply_may_have_the_next_word_stops_it(tokenizer):
    output = TurnOutput(OutputSpec(tools=TOOLS, max_calls=2), tokenizer, {8185})
    own = tokenizer.encode(GET_TIME + GET_TIME).tolist()
    assert len(output.feed(own).calls) == 2
    assert not output.stopped, "the end token may come now, and the state is then whole"
    output.feed(tokenizer.encode("\n").tolist())
    assert not output.stopped
    output.feed(tokenizer.encode("<tool_call>").tolist())
    assert output.stopped, "not only when the third call is complete"


def test_call_ids_are_unguessable_and_of_the_usual_form(tokenizer):
    text = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>" * 2
    output = TurnOutput(OutputSpec(tools=TOOLS), tokenizer, {8185})
    first, second = output.feed(tokenizer.encode(text).tolist()).calls
    assert first.id != second.id
    for call in (first, second):
        assert call.id.startswith("call_")
        assert len(bytes.fromhex(call.id[5:])) == 12


def test_a_cut_call_inside_a_thought_ends_it_where_the_call_begins(tokenizer):
    tools = ({"function": {"name": "f", "parameters": {"required": ["a", "b"]}}},)
    text = "hm\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"
    output = TurnOutput(OutputSpec(tools=tools, starts_in_reasoning=True), tokenizer, {8185})
    deltas = [output.feed(tokenizer.encode(text).tolist()), output.finish()]
    channels = [part.channel for d in deltas for part in d.parts]
    assert channels == sorted(channels, key=[Channel.REASONING, Channel.CONTENT].index)
    assert output.message().reasoning == "hm"
