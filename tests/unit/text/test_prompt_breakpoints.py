"""Where a client's cache marks become boundaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from capserve.text.messages import Conversation, Message
from capserve.text.prompt import MOST_BREAKPOINTS

S, U, A = (
    lambda text, **kw: Message("system", text, **kw),
    lambda text, **kw: Message("user", text, **kw),
    lambda text="", **kw: Message("assistant", text, **kw),
)
QUIET = {"enable_thinking": False}


def conv(*messages: Message) -> Conversation:
    return Conversation(messages, (), QUIET)


def marked(message: Message) -> Message:
    return replace(message, breakpoint=True)


def test_a_mark_is_the_token_end_of_its_message(builder, template) -> None:
    messages = [S("rules"), marked(U("one")), A("two"), marked(U("three")), A("four"), U("five")]
    prompt = builder.build(conv(*messages))
    ends = []
    for count in (2, 4):
        text = template.render(conv(*messages[:count]), add_generation_prompt=False)
        ends.append(len(builder._tokenizer.encode(text)))
    assert list(prompt.breakpoints) == ends
    for end, count in zip(ends, (2, 4), strict=True):
        # Another history that parts there has these tokens, too.
        other = builder.build(conv(*messages[:count], A("else"), U("now")))
        assert np.array_equal(other.tokens[:end], prompt.tokens[:end])


def test_a_mark_changes_no_digest_and_no_token(builder) -> None:
    plain = conv(S("rules"), U("one"), A("two"), U("three"))
    with_marks = conv(*map(marked, plain.messages))
    assert builder.chain(plain) == builder.chain(with_marks)
    assert np.array_equal(builder.build(plain).tokens, builder.build(with_marks).tokens)


def test_no_more_than_the_last_marks_count(builder) -> None:
    turns = [m for i in range(9) for m in (marked(U(f"q{i}")), A(f"a{i}"))]
    prompt = builder.build(conv(*turns, U("last")))
    assert len(prompt.breakpoints) == MOST_BREAKPOINTS
    assert list(prompt.breakpoints) == sorted(set(prompt.breakpoints))
    whole = builder.build(conv(*turns[-8:], U("last")))
    ends = [len(prompt.tokens) - end for end in prompt.breakpoints]
    assert ends == [len(whole.tokens) - end for end in whole.breakpoints]


def test_a_mark_on_the_last_message_is_the_end_of_the_prompt(builder) -> None:
    prompt = builder.build(conv(S("rules"), marked(U("one"))))
    assert prompt.breakpoints == (prompt.prompt_end,)


def test_a_system_message_alone_is_left_to_its_own_boundary(builder) -> None:
    prompt = builder.build(conv(marked(S("rules")), U("one")))
    assert set(prompt.breakpoints) <= {prompt.system_end}


def test_a_mark_inside_what_a_journal_holds_costs_nothing(builder, tokenizer) -> None:
    first = builder.build(conv(S("rules"), marked(U("one"))))
    journal = np.concatenate((first.tokens, tokenizer.encode("two<|im_end|>")))
    record = builder.make_record(first, A("two", reasoning=""), journal)
    assert record is not None
    messages = [S("rules"), marked(U("one")), A("two"), marked(U("three")), A("x"), U("four")]
    prompt = builder.build(conv(*messages), record)
    assert prompt.spliced_tokens == len(journal)
    assert len(prompt.breakpoints) == 1
    assert prompt.breakpoints[0] > len(journal)


def test_a_message_that_the_template_shows_otherwise_later_has_no_end(builder) -> None:
    thought = marked(A("two", reasoning="long thoughts"))
    messages = (S("rules"), U("one"), thought, U("three"))
    prompt = builder.build(Conversation(messages))
    alone = builder.build(Conversation(messages[:2]))
    assert all(end <= alone.prompt_end for end in prompt.breakpoints)
