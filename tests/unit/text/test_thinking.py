"""A reply thinks for as long as its budget lets it, whatever the model would rather do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from test_output import byte_tokens

from capserve.testing.replies import TOOLS, generate_replies
from capserve.text.grammar import GrammarCompiler
from capserve.text.grammar_rules import Constraint
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.thinking import BudgetRule, Rule, ThinkingBudget
from capserve.text.tokenizer import Tokenizer

END = 8185
CLOSING = "\n</think>\n\n"
MARK_TOKENS = 2
"""Of `\\n</think>` in the embedded checkpoint's vocabulary."""
THINKS = OutputSpec(starts_in_reasoning=True)

Wish = Callable[[Sequence[int]], int | None]
"""The token that a model would say next, after these; None is any."""


def allowed(rule: BudgetRule, size: int) -> np.ndarray | None:
    mask = rule.mask()
    if mask is None:
        return None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])


def said_under(
    rule: BudgetRule, tokenizer: Tokenizer, wish: Wish, most: int, seed: int = 0
) -> list[int]:
    """A reply of a model that gets its wish where the rule lets it, and else says anything."""
    rng = random.Random(seed)
    rule.restart()
    said: list[int] = []
    while len(said) < most and said[-1:] != [END]:
        choice, wanted = allowed(rule, tokenizer.vocab_size), wish(said)
        if choice is not None and wanted not in choice:
            wanted = int(rng.choice(choice))
        said.append(rng.randrange(END) if wanted is None else wanted)
        rule.advance(said[-1])
    return said


def read(tokenizer: Tokenizer, spec: OutputSpec, said: Sequence[int]) -> TurnOutput:
    output = TurnOutput(spec, tokenizer, {END})
    output.feed(said)
    output.finish()
    return output


def script(tokens: Sequence[int]) -> Wish:
    return lambda said: tokens[len(said)] if len(said) < len(tokens) else END


def budget(
    tokenizer: Tokenizer, most: int, spec: OutputSpec = THINKS, rule: Rule | None = None
) -> BudgetRule:
    return ThinkingBudget(tokenizer, spec, most).follow(rule)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5, 17, 300])
def test_a_reply_that_never_stops_thinking_is_made_to(tokenizer: Tokenizer, most: int) -> None:
    thought = tokenizer.encode("Let me think about this once more. " * 100).tolist()
    said = said_under(budget(tokenizer, most), tokenizer, script(thought), 400)
    output = read(tokenizer, THINKS, said)
    assert output.reasoning_tokens == max(most, MARK_TOKENS)
    closed = output.reasoning_tokens + 1
    assert said[: closed - 3] == thought[: closed - 3]
    text = b"".join(map(tokenizer.token_bytes, said[:closed])).decode()
    assert text.endswith(CLOSING)
    # The answer behind it is the model's own.
    assert said[closed:] == thought[closed : len(said)]
    assert output.message().content


def test_a_reply_that_closes_its_block_in_time_is_left_as_it_is(tokenizer: Tokenizer) -> None:
    own = tokenizer.encode("I see.</think>Yes.").tolist()
    rule = budget(tokenizer, 20)
    assert said_under(rule, tokenizer, script(own), 50) == [*own, END]
    assert rule.mask() is None


def test_a_line_break_is_not_written_twice(tokenizer: Tokenizer) -> None:
    thought = tokenizer.encode("One\n" * 50).tolist()
    for most in range(4, 12):
        said = said_under(budget(tokenizer, most), tokenizer, script(thought), 200)
        text = b"".join(map(tokenizer.token_bytes, said)).decode()
        assert "\n</think>\n\n" in text
        assert "\n\n</think>" not in text


@pytest.mark.parametrize("calls", [False, True])
def test_tokens_are_counted_as_the_reader_of_the_reply_counts_them(
    tokenizer: Tokenizer, calls: bool
) -> None:
    cut = 0
    for reply in generate_replies(60, seed=3):
        spec = OutputSpec(TOOLS if calls else (), starts_in_reasoning=reply.starts_in_reasoning)
        tokens = tokenizer.encode(reply.text).tolist()
        whole = read(tokenizer, spec, tokens)
        if not whole.reasoning_tokens:
            continue
        # A budget that is enough, for the mark too, changes nothing.
        for most in (whole.reasoning_tokens + MARK_TOKENS + 4, whole.reasoning_tokens - 1):
            rule = budget(tokenizer, most, spec)
            said = said_under(rule, tokenizer, script(tokens), 4000)
            if most > whole.reasoning_tokens:
                assert said == [*tokens, END]
            else:
                counted = read(tokenizer, spec, said).reasoning_tokens
                assert counted <= max(most, MARK_TOKENS) or "<think>" in reply.text
                cut += said != [*tokens, END]
    assert cut > 10


def test_a_call_that_was_begun_in_the_block_is_never_cut(tokenizer: Tokenizer) -> None:
    spec = OutputSpec(TOOLS, starts_in_reasoning=True)
    call = spell_call(
        "write_file", spell_parameter("path", "a" * 90) + spell_parameter("content", "b")
    )
    tokens = tokenizer.encode(f"Now {call}").tolist()
    before = len(tokenizer.encode("Now "))
    for most in range(before + MARK_TOKENS + 2, before + 20):
        said = said_under(budget(tokenizer, most, spec), tokenizer, script(tokens), 900)
        assert said == [*tokens, END]
    # A call that turns out to be none is thinking after all, and is over then.
    broken = tokenizer.encode("Now <tool_call>\n<function=f>\nno call at all " + "x " * 50).tolist()
    said = said_under(budget(tokenizer, before + 6, spec), tokenizer, script(broken), 200)
    assert "</think>" in b"".join(map(tokenizer.token_bytes, said)).decode()


@pytest.mark.parametrize("char", ["🙂", "é", "日"])
def test_a_character_is_not_cut_in_two(tokenizer: Tokenizer, char: str) -> None:
    """The model spells it byte by byte."""
    spelled = byte_tokens(tokenizer, char)

    def wish(said: Sequence[int]) -> int:
        sizes = (n for n in range(1, len(spelled)) if said[-n:] == spelled[:n])
        return spelled[next(sizes, 0)]

    for most in range(MARK_TOKENS, 24):
        said = said_under(budget(tokenizer, most), tokenizer, wish, 60, seed=most)
        output = read(tokenizer, THINKS, said)
        assert output.reasoning_tokens == most
        text = b"".join(map(tokenizer.token_bytes, said[:most]))
        assert text.endswith(b"\n</think>")
        text.decode()  # whole to the last character


def test_a_block_is_not_opened_again_behind_the_budget(tokenizer: Tokenizer) -> None:
    think = tokenizer.specials["<think>"]
    thought = tokenizer.encode("So and so and so. " * 20).tolist()

    def wish(said: Sequence[int]) -> int | None:
        text = b"".join(map(tokenizer.token_bytes, said)).decode(errors="replace")
        return think if text.rstrip().endswith("</think>") else thought[len(said) % len(thought)]

    said = said_under(budget(tokenizer, 12), tokenizer, wish, 60)
    assert think not in said
    assert read(tokenizer, THINKS, said).reasoning_tokens == 12
    # One that the reply opens by itself is counted from there.
    opens = [think, *thought]
    said = said_under(budget(tokenizer, 12, OutputSpec()), tokenizer, script(opens), 60)
    assert said[0] == think
    assert read(tokenizer, OutputSpec(), said).reasoning_tokens == 12
    # And with nothing to spend none is opened.
    said = said_under(budget(tokenizer, 0, OutputSpec()), tokenizer, script(opens), 60)
    assert said[0] != think


@pytest.mark.parametrize("most", [0, 3, 9, 40])
def test_what_is_allowed_depends_on_the_tokens_alone(tokenizer: Tokenizer, most: int) -> None:
    """However far a step drafts and takes back."""
    rng = random.Random(most)
    thought = tokenizer.encode("Hm, 日本 🙂 and more. " * 30).tolist()
    said = said_under(budget(tokenizer, most), tokenizer, script(thought), 120)
    rule, fresh = budget(tokenizer, most), budget(tokenizer, most)
    at = 0
    for _ in range(60):
        to = min(len(said), at + rng.choice((1, 2, 5, 90)))
        for token in said[at:to]:
            rule.advance(token)
        back = rng.randrange(to + 1) if rng.random() < 0.2 else rng.randrange(min(to, 9) + 1)
        if back:
            rule.rollback(back)
        at = to - back
        fresh.restart()
        for token in said[:at]:
            fresh.advance(token)
        mine, other = rule.mask(), fresh.mask()
        assert (mine is None) == (other is None), at
        assert mine is None or np.array_equal(mine, other), at


@pytest.mark.parametrize("most", [0, 2, 5, 11])
def test_a_form_is_kept_behind_a_thought_that_was_cut(tokenizer: Tokenizer, most: int) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    demanded = Constraint(response_format=form, starts_in_reasoning=True)
    grammar = GrammarCompiler(tokenizer, (END,)).compile(demanded)
    assert grammar is not None
    thought = tokenizer.encode("I could go on for ever, and I do. 日本 " * 20).tolist()
    rule = budget(tokenizer, most, rule=grammar.matcher())
    said = said_under(rule, tokenizer, lambda said: thought[len(said) % len(thought)], 200)
    output = read(tokenizer, THINKS, said)
    assert said[-1] == END
    assert output.reasoning_tokens == max(most, MARK_TOKENS)
    assert json.loads(output.message().content)["city"] in ("Oslo", "Rome")


def test_a_demanded_call_comes_behind_a_thought_that_was_cut(tokenizer: Tokenizer) -> None:
    spec = OutputSpec(TOOLS, starts_in_reasoning=True)
    demanded = Constraint(tools=TOOLS, function="get_time", starts_in_reasoning=True)
    grammar = GrammarCompiler(tokenizer, (END,)).compile(demanded)
    assert grammar is not None
    thought = tokenizer.encode("What time is it? " * 20).tolist()
    for seed in range(4):
        rule = budget(tokenizer, 8, spec, grammar.matcher())
        said = said_under(rule, tokenizer, script(thought), 900, seed=seed)
        output = read(tokenizer, spec, said)
        assert output.reasoning_tokens == 8
        assert all(call.name == "get_time" for call in output.message().tool_calls)
        assert b"</think>\n\n<tool_call>" in b"".join(map(tokenizer.token_bytes, said))
