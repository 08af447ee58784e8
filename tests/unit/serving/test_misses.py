"""What a miss says of prompts as the embedded model's own template renders them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from store_harness import capsule, make_store

from capserve.nano import checkpoint_dir
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.journal import JournalView, TurnMark, lcp, prefix_digests
from capserve.serving.misses import OPENING_TOKENS
from capserve.serving.prefix import AutoPrefixPolicy, Rates
from capserve.testing.fake_engine import fake_limits
from capserve.text.messages import Conversation, Message, Role
from capserve.text.prompt import Prompt, PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

SYSTEM = Message("system", "You are a careful assistant who answers briefly.")
FACTS = Message("user", "Which is the longest river of Europe?")
REPLY = Message("assistant", "The Volga.", reasoning="It is not the Danube.")


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    path = checkpoint_dir()
    return PromptBuilder(Tokenizer.from_dir(path), ChatTemplate.from_dir(path))


def tool(name: str) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def miss(before: Prompt, now: Prompt) -> str:
    """The reason for `now` after a turn on `before`, of which no capsule was kept."""
    marks = (TurnMark(before.prompt_end, len(before.chain) - 1),)
    known = JournalView("s", "k/a", before.tokens, before.chain, marks)
    policy = AutoPrefixPolicy(fake_limits())
    return str(policy.plan(now, "k/a", None, [known], make_store(1), Rates()).miss)


def test_a_first_unrelated_request_has_no_candidate(builder: PromptBuilder) -> None:
    plain = builder.build(Conversation((FACTS,)))
    with_system = builder.build(Conversation((SYSTEM, FACTS)))
    with_tools = builder.build(Conversation((SYSTEM, FACTS), (tool("read"),)))
    other = builder.build(Conversation((Message("user", "How do magnets work?"),)))
    for before in (plain, with_system, with_tools):
        assert 0 < lcp(before.tokens, other.tokens) <= OPENING_TOKENS
        assert miss(before, other) == "no_candidate"


@pytest.mark.parametrize("role", ["system", "user"])
def test_the_opening_ends_where_the_first_message_begins(
    builder: PromptBuilder, role: Role
) -> None:
    prompts = [
        builder.build(Conversation((Message(role, word), FACTS))).tokens for word in ("a", "b")
    ]
    assert lcp(*prompts) == OPENING_TOKENS


def test_one_word_of_the_first_message_in_common_is_a_divergence_in_it(
    builder: PromptBuilder,
) -> None:
    before = builder.build(Conversation((FACTS,)))
    now = builder.build(Conversation((Message("user", "Which day is today?"),)))
    common = lcp(before.tokens, now.tokens)
    assert common > OPENING_TOKENS
    assert miss(before, now) == f"diverged(message 0, token {common})"


def test_other_tools_and_other_switches_are_named_together(builder: PromptBuilder) -> None:
    talk = (SYSTEM, FACTS, REPLY, Message("user", "And of Asia?"))
    before = builder.build(Conversation(talk, (tool("read"),)))
    retooled = builder.build(Conversation(talk, (tool("write"),)))
    switched = builder.build(Conversation(talk, (tool("read"),), {"enable_thinking": False}))
    for now in (retooled, switched):
        common = lcp(before.tokens, now.tokens)
        assert common > OPENING_TOKENS
        assert miss(before, now) == f"diverged(tools_or_switches, token {common})"


def test_a_continued_reply_that_is_read_again_has_a_reason(builder: PromptBuilder) -> None:
    said = "The Volga is the longest river of Europe, and flows into the Caspian Sea. " * 8
    begun = builder.build(Conversation((SYSTEM, FACTS, Message("assistant", said))))
    assert begun.continues_reply
    assert len(begun.tokens) > begun.prompt_end + 50
    known = JournalView("s", "k/a", begun.tokens, begun.chain)
    policy, store = AutoPrefixPolicy(fake_limits()), make_store(1 << 20)

    def keep(position: int) -> None:
        digest = prefix_digests(begun.tokens, [position])[0]
        store.put(CapsuleKey("k/a", position, digest), capsule(position, (position, 1)), ())

    keep(begun.prompt_end)
    plan = policy.plan(begun, "k/a", None, [known], store, Rates())
    assert (plan.position, str(plan.miss)) == (begun.prompt_end, "no_candidate")
    other = builder.build(Conversation((SYSTEM, FACTS, Message("assistant", said[:200] + "But"))))
    plan = policy.plan(other, "k/a", None, [known], store, Rates())
    assert str(plan.miss) == f"diverged(message 2, token {lcp(begun.tokens, other.tokens)})"
    keep(len(begun.tokens))
    plan = policy.plan(begun, "k/a", None, [known], store, Rates())
    assert (plan.position, plan.miss) == (len(begun.tokens), None)
