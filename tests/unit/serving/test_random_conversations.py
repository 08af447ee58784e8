"""P2 on the fake engine: whatever happened before, a reply is that of a server without reuse."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from serving_harness import END, RecordingSink, cold_reply, serving, some_words, system, user

from capserve.engine.seam import Sampling
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.journal import prefix_digests
from capserve.serving.turn import Finished
from capserve.testing.fake_engine import Call, fake_limits
from capserve.text.messages import Message
from capserve.text.output import OutputSpec

# A small vocabulary, so that end tokens and stop strings really come up.
LIMITS = fake_limits(vocab_size=48, prefill_chunk=32, grid=16, max_positions=2048)
VOCAB = LIMITS.vocab_size


@dataclass
class Talk:
    namespace: str
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Say:
    talk: int
    edit_back: int
    branch: bool
    words: int
    seed: int
    max_tokens: int
    drafts: int
    sampled: bool
    stop: bool
    pin: bool
    splice: bool
    cancel: tuple[Call, int] | None


SAYS = st.builds(
    Say,
    talk=st.integers(0, 3),
    edit_back=st.sampled_from([0, 0, 0, 1, 2, 3]),
    branch=st.booleans(),
    words=st.sampled_from([1, 7, 30, 31, 32, 90, 200]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 24),
    drafts=st.integers(0, 4),
    sampled=st.booleans(),
    stop=st.sampled_from([False, False, True]),
    pin=st.sampled_from([False, False, False, True]),
    splice=st.booleans(),
    cancel=st.sampled_from(
        [None, None, None, ("extend", 1), ("extend", 3), ("step", 1), ("step", 4)]
    ),
)
NAMESPACES = ("key/a", "key/a", "key/b", "other/a")


@settings(max_examples=60, deadline=None)
@given(
    says=st.lists(SAYS, min_size=2, max_size=14),
    exact=st.booleans(),
    budget_capsules=st.sampled_from([0, 1, 3, 100]),
    max_active=st.sampled_from([1, 3, 64]),
)
def test_every_reply_equals_a_cold_run_of_its_prompt(
    says: list[Say], exact: bool, budget_capsules: int, max_active: int
) -> None:
    budget = budget_capsules * LIMITS.capsule_bytes(250)
    # Two talks share a system prompt, two share a namespace: there is much to confuse.
    talks = [
        Talk(namespace, [system(some_words(40, seed=number // 2, vocab=VOCAB))])
        for number, namespace in enumerate(NAMESPACES)
    ]
    pins: set[CapsuleKey] = set()
    with serving(
        LIMITS,
        exact=exact,
        budget_bytes=budget,
        checkpoint_interval=64,
        max_active_sessions=max_active,
    ) as s:
        for say in says:
            talk = talks[say.talk]
            if say.branch:
                talk = Talk(talk.namespace, list(talk.messages))
            if say.edit_back:
                del talk.messages[max(1, len(talk.messages) - say.edit_back) :]
            talk.messages.append(user(some_words(say.words, seed=say.seed, vocab=VOCAB)))
            namespace = talk.namespace
            prompt = s.build(talk.messages, namespace if say.splice else "nobody/x")
            sampling = Sampling(
                temperature=0.7 if say.sampled else 0.0,
                seed=say.seed,
                drafts=say.drafts,
                end_tokens=(END,),
            )
            stop = ("17 ",) if say.stop else ()
            item = s.item(
                prompt,
                namespace=namespace,
                sampling=sampling,
                max_tokens=say.max_tokens,
                pin=say.pin,
                output=OutputSpec(stop=stop),
            )
            if say.cancel is not None:
                s.engine.when(*say.cancel, item.cancel.cancel)
            s.worker.submit(item)
            assert isinstance(item.sink, RecordingSink)
            end = item.sink.wait()

            expected = cold_reply(LIMITS, prompt, sampling, say.max_tokens, stop)
            if isinstance(end, Finished):
                assert item.sink.tokens == expected, f"wrong after {end.metrics.prefix_action}"
                talk.messages.append(end.message)
                if end.metrics.pin == "pinned":
                    position = s.policy.pin_position(prompt, True)
                    assert position is not None
                    digest = prefix_digests(prompt.tokens, [position])[0]
                    pins.add(CapsuleKey(namespace, position, digest))
            else:
                assert item.cancel.cancelled
                assert item.sink.tokens == expected[: len(item.sink.tokens)]
                assert s.sessions.hot is None, "a turn that was not done left its state hot"
            s.store.check()
            assert all(s.store.holds(pin) for pin in pins), "a pin was evicted"
            assert len(s.sessions) <= max_active
        if exact:
            grid = LIMITS.grid
            assert all(start % grid == 0 for start, _ in s.engine.extended)
    assert s.worker.health()["faults"] == 0
