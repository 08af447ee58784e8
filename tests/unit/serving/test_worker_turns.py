"""One turn after another: what is reused, and how turns end."""

from __future__ import annotations

import pytest
from serving_harness import (
    CALL,
    END,
    RecordingSink,
    WordDelta,
    WordOutput,
    chain_of,
    cold_reply,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    system,
    user,
)

from capserve.engine.seam import Sampling
from capserve.serving.capsules.footprint import Taken
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.store import CapsuleLostError
from capserve.serving.journal import SpanKind
from capserve.serving.lifecycle import FinishReason
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.turn import Delta, TurnEvent
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Message
from capserve.text.output import OutputSpec

SYSTEM = system(some_words(150, seed=1))
QUESTION = user(some_words(60, seed=2))


def scripted(*tokens: int) -> FakeEngine:
    return FakeEngine(fake_limits(), script=lambda context: tokens)


def test_a_growing_conversation_prefills_only_what_is_new() -> None:
    engine = scripted(20, 21, 22, END)
    with serving(engine=engine) as s:
        messages = [SYSTEM, QUESTION]
        for turn in range(5):
            end, sink = s.ask(s.build(messages))
            done = finished(end)
            assert sink.tokens == [20, 21, 22, END]
            if turn:
                assert done.metrics.prefix_action == "message_append"
                assert done.metrics.miss_reason is None
                # The unabsorbed end token, one short message, the generation prompt.
                assert done.metrics.new_prefill_tokens == 1 + 12 + 1
            assert done.metrics.cached_tokens + done.metrics.new_prefill_tokens == (
                done.prompt_tokens
            )
            messages += [done.message, user(some_words(10, seed=turn))]


def test_a_prompt_that_was_not_spliced_appends_by_its_tokens() -> None:
    with serving(engine=scripted(20, END)) as s:
        first, _ = s.ask(make_prompt([SYSTEM, QUESTION]))
        longer = [SYSTEM, QUESTION, finished(first).message, user(some_words(5))]
        second, _ = s.ask(make_prompt(longer))
        assert finished(second).metrics.prefix_action == "append"


def test_the_whole_prompt_is_reused_when_the_state_still_ends_there() -> None:
    with serving() as s:
        prompt = make_prompt([SYSTEM, QUESTION])
        first, one = s.ask(prompt, max_tokens=1)
        second, two = s.ask(prompt, max_tokens=1)
        assert finished(first).reason is FinishReason.LENGTH
        assert finished(second).metrics.prefix_action == "exact"
        assert finished(second).metrics.new_prefill_tokens == 0
        assert one.tokens == two.tokens


def test_an_edit_truncates_the_hot_journal_and_older_boundaries_survive_it() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        messages = [SYSTEM, QUESTION]
        first, _ = s.ask(s.build(messages))
        longer = [*messages, finished(first).message, user(some_words(30, seed=3))]
        s.ask(s.build(longer))
        edited = [*messages[:1], user(some_words(40, seed=4))]
        done = finished(s.ask(s.build(edited))[0])
        assert done.metrics.prefix_action == "truncate"
        assert done.metrics.cached_tokens == 152  # the end of the system message
        assert done.metrics.miss_reason == "diverged(message 1, token 153)"
        again = finished(s.ask(s.build(longer))[0])
        assert again.metrics.cached_tokens > 152 + 62, "the divergence erased a boundary"
        assert again.metrics.prefix_action in ("restore", "fork")


def test_a_side_request_does_not_cost_the_session_its_state() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        first, _ = s.ask(s.build([SYSTEM, QUESTION]))
        s.ask(s.build([system(some_words(20, seed=8)), user(some_words(9, seed=9))]))
        longer = [SYSTEM, QUESTION, finished(first).message, user(some_words(10, seed=5))]
        done = finished(s.ask(s.build(longer))[0])
        assert done.metrics.prefix_action == "restore"
        assert done.metrics.new_prefill_tokens == 1 + 12 + 1
        assert done.metrics.restore_ms > 0


def test_a_branch_from_a_parked_session_is_a_fork_and_leaves_it_whole() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        first, _ = s.ask(s.build([SYSTEM, QUESTION]))
        s.ask(s.build([user(some_words(9, seed=9))]))
        other = finished(s.ask(s.build([SYSTEM, user(some_words(10, seed=6))]))[0])
        assert other.metrics.prefix_action == "fork"
        assert other.metrics.cached_tokens == 152
        longer = [SYSTEM, QUESTION, finished(first).message, user(some_words(10, seed=5))]
        assert finished(s.ask(s.build(longer))[0]).metrics.prefix_action == "restore"


def test_a_side_request_costs_nothing_even_when_one_session_alone_may_live() -> None:
    with serving(engine=scripted(20, 21, END), max_active_sessions=1) as s:
        first, _ = s.ask(s.build([SYSTEM, QUESTION]))
        s.ask(s.build([system(some_words(20, seed=8)), user(some_words(9, seed=9))]))
        assert len(s.sessions) == 1
        longer = [SYSTEM, QUESTION, finished(first).message, user(some_words(10, seed=5))]
        done = finished(s.ask(s.build(longer))[0])
        assert done.metrics.prefix_action == "restore"
        assert done.metrics.new_prefill_tokens == 1 + 12 + 1


def test_a_record_that_went_on_leaves_before_another_conversations() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        other = [SYSTEM, user(some_words(61, seed=7))]
        other.append(finished(s.ask(s.build(other))[0]).message)
        talk = [SYSTEM, QUESTION]
        talk.append(finished(s.ask(s.build(talk))[0]).message)
        # Room for two of these and a little more, but not for three.
        s.transcripts.budget_bytes = s.transcripts.used_bytes * 5 // 4
        talk.append(user(some_words(10, seed=5)))
        talk.append(finished(s.ask(s.build(talk))[0]).message)
        chain = chain_of(talk)
        assert s.transcripts.longest("key/a", chain[:-2]) is None, "the superseded one stayed"
        assert s.transcripts.longest("key/a", chain) is not None
        assert s.transcripts.longest("key/a", chain_of(other)) is not None


def test_namespaces_never_share_state_and_the_reason_says_so() -> None:
    with serving(engine=scripted(20, END)) as s:
        prompt = make_prompt([SYSTEM, QUESTION])
        s.ask(prompt, namespace="key/a")
        same_key = finished(s.ask(prompt, namespace="key/b")[0])
        assert same_key.metrics.cached_tokens == 0
        assert same_key.metrics.miss_reason == "namespace"
        other_key = finished(s.ask(prompt, namespace="stranger/a")[0])
        assert other_key.metrics.cached_tokens == 0
        assert other_key.metrics.miss_reason == "no_candidate", "it must not tell what others hold"


def test_exact_mode_starts_on_the_grid_only_and_says_so() -> None:
    limits = fake_limits()
    with serving(limits, exact=True) as s:
        prompt = make_prompt([SYSTEM, QUESTION])
        done = finished(s.ask(prompt)[0])
        longer = make_prompt([SYSTEM, QUESTION, done.message, user(some_words(10))])
        second = finished(s.ask(longer)[0])
        assert second.metrics.cached_tokens == 192  # 214 tokens before the generation prompt
        assert second.metrics.miss_reason == "not_on_grid"
        assert all(start % limits.grid == 0 for start, _ in s.engine.extended)


def test_a_restored_journal_says_how_its_capsule_was_computed() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        asked = make_prompt([SYSTEM, QUESTION])
        tip = len(asked.tokens) + 2  # where the reply of 20 and 21 ends
        answered = [SYSTEM, QUESTION, Message("assistant", "20 21 "), user(some_words(5))]
        s.ask(make_prompt(answered), pin=tip)  # the same tokens, but prefilled
        first = finished(s.ask(asked)[0])  # decoded now; the capsule there is the other one
        s.ask(make_prompt([user(some_words(9, seed=9))]))
        longer = [SYSTEM, QUESTION, first.message, user(some_words(10, seed=5))]
        done = finished(s.ask(make_prompt(longer))[0])
        assert (done.metrics.prefix_action, done.metrics.cached_tokens) == ("restore", tip)
        assert s.sessions.hot is not None
        before = [span for span in s.sessions.hot.journal.spans if span.start < tip]
        assert {span.kind for span in before} == {SpanKind.PREFILL}


def test_the_output_is_trimmed_exactly_to_its_limit_whatever_the_drafts() -> None:
    limits = fake_limits()
    prompt = make_prompt([QUESTION])
    greedy = Sampling(end_tokens=(END,))
    for most in range(1, 12):
        expected = cold_reply(limits, prompt, greedy, most)
        for drafts in (0, 1, 4):
            with serving(limits) as s:
                sampling = Sampling(end_tokens=(END,), drafts=drafts)
                end, sink = s.ask(prompt, max_tokens=most, sampling=sampling)
                assert sink.tokens == expected
                assert finished(end).output_tokens == len(expected) == most
                assert finished(end).reason is FinishReason.LENGTH


class Witness(RecordingSink):
    """Looks at the journal at the moment of each delivery.

    It does so in the worker's own thread, where nothing can move while it looks.
    """

    def __init__(self, sessions: SessionRegistry) -> None:
        super().__init__()
        self._sessions = sessions
        self.moments: list[tuple[list[int], list[int]]] = []
        """(all tokens delivered so far, the journal's tokens), once for each event."""

    def deliver(self, event: TurnEvent) -> None:
        delivered = [*self.tokens, *(event.tokens if isinstance(event, Delta) else ())]
        (journal,) = self._sessions.views()
        self.moments.append((delivered, journal.tokens.tolist()))
        super().deliver(event)


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_a_client_hears_is_already_the_tail_of_the_journal(drafts: int) -> None:
    reply = [*range(20, 30), END]
    prompt = make_prompt([SYSTEM, QUESTION])
    with serving(engine=scripted(*reply)) as s:
        sink = Witness(s.sessions)
        end, _ = s.ask(
            prompt,
            sink=sink,
            max_tokens=len(reply) + 5,
            sampling=Sampling(end_tokens=(END,), drafts=drafts),
        )
        finished(end)
    assert sink.tokens == reply
    assert len(sink.moments) > 2, "one event is no order"
    for delivered, journal in sink.moments:
        assert journal == [*prompt.tokens.tolist(), *delivered]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_reply_cut_at_any_length_leaves_its_state_hot_and_is_continued_by_append(
    drafts: int,
) -> None:
    limits = fake_limits()
    prompt = make_prompt([QUESTION])
    sampling = Sampling(end_tokens=(END,), drafts=drafts)
    for most in range(1, 12):
        with serving(limits) as s:
            done = finished(s.ask(prompt, max_tokens=most, sampling=sampling)[0])
            assert done.reason is FinishReason.LENGTH
            longer = make_prompt([QUESTION, done.message, user(some_words(4))])
            end, sink = s.ask(longer, sampling=sampling)
            assert end.metrics.prefix_action == "append"
            # All of the prompt and the reply but its last token, which no state absorbed.
            assert end.metrics.cached_tokens == len(prompt.tokens) + most - 1
            assert end.metrics.miss_reason is None
            assert sink.tokens == cold_reply(limits, longer, sampling, 8)


def test_a_stop_string_ends_the_turn_and_leaves_no_session_hot() -> None:
    with serving(engine=scripted(20, 21, 22, 23, 24, END)) as s:
        prompt = make_prompt([QUESTION])
        end, sink = s.ask(prompt, output=OutputSpec(stop=("22 ",)))
        done = finished(end)
        assert (done.reason, done.message.content) == (FinishReason.STOP, "20 21 ")
        assert sink.content == "20 21 "
        assert done.output_tokens == 3
        assert s.worker.health()["hot_position"] is None
        assert s.transcripts.longest("key/a", prompt.chain) is None


def test_a_stop_string_found_in_held_back_text_leaves_no_session_hot_either() -> None:
    class HoldsBack(WordOutput):
        def finish(self) -> WordDelta:
            self.stopped = True
            return WordDelta()

    with serving(engine=scripted(20, 21, END), make_output=HoldsBack) as s:
        prompt = make_prompt([QUESTION])
        done = finished(s.ask(prompt)[0])
        assert done.reason is FinishReason.STOP
        assert s.worker.health()["hot_position"] is None
        assert len(s.transcripts) == 0
        cut = finished(s.ask(prompt, max_tokens=1)[0])
        assert cut.reason is FinishReason.STOP


def test_tool_calls_is_the_reason_only_when_there_are_calls() -> None:
    tools = OutputSpec(tools=({"type": "function", "function": {"name": "run"}},))
    with serving(engine=scripted(20, CALL, END)) as s:
        with_calls = finished(s.ask(make_prompt([QUESTION]), output=tools)[0])
        assert with_calls.reason is FinishReason.TOOL_CALLS
        assert [call.name for call in with_calls.message.tool_calls] == ["run"]
        cut = finished(s.ask(make_prompt([QUESTION]), output=tools, max_tokens=1)[0])
        assert cut.reason is FinishReason.LENGTH
        plain = finished(s.ask(make_prompt([QUESTION]))[0])
        assert plain.reason is FinishReason.STOP


def test_the_context_end_and_the_decode_time_end_a_turn_with_length() -> None:
    limits = fake_limits(max_positions=80)
    prompt = make_prompt([user(some_words(70))])
    with serving(limits) as s:
        done = finished(s.ask(prompt, max_tokens=200)[0])
        assert (done.reason, done.output_tokens) == (FinishReason.LENGTH, 7)
    with serving(max_decode_ms=1e-6) as s:
        done = finished(s.ask(prompt, max_tokens=200)[0])
        assert (done.reason, done.output_tokens) == (FinishReason.LENGTH, 1)


def test_health_never_waits_for_the_engine() -> None:
    with serving() as s:
        gate = s.engine.hold("extend")
        item, sink = s.submit(make_prompt([QUESTION]))
        gate.wait_arrived()
        health = s.worker.health()  # would deadlock here if it waited
        assert health["running"] == item.request.request_id
        assert health["status"] == "ok"
        gate.open()
        finished(sink.wait())


def test_the_metrics_of_a_turn_add_up() -> None:
    with serving() as s:
        sampling = Sampling(end_tokens=(END,), drafts=4)
        end, sink = s.ask(make_prompt([SYSTEM, QUESTION]), max_tokens=40, sampling=sampling)
        m = finished(end).metrics
        assert m.terminal_state == "done"
        assert m.cached_tokens + m.new_prefill_tokens == m.prompt_tokens
        assert m.output_tokens == len(sink.tokens) == finished(end).output_tokens
        assert 0 < m.spec_accepts < m.spec_attempts
        assert m.accept_length is not None
        assert 1.0 < m.accept_length <= 5.0
        assert m.first_delta_ms is not None
        assert m.first_delta_ms >= m.prefill_ms > 0
        assert m.decode_ms > 0
        assert m.decode_tok_per_s is not None


def test_a_sink_that_raises_ends_its_own_turn_only() -> None:
    with serving() as s:
        prompt = make_prompt([QUESTION])
        for at in (1, 2, 3):
            sink = RecordingSink(raise_at=at)
            end, _ = s.ask(prompt, sink=sink, max_tokens=30)
            assert failed(end).code == "internal_error"
            assert s.worker.ready
        _, sink = s.ask(prompt)
        expected = cold_reply(s.engine.limits, prompt, Sampling(end_tokens=(END,)), 8)
        assert sink.tokens == expected


def test_a_capsule_that_can_not_be_read_back_costs_its_reuse_and_not_the_turn() -> None:
    with serving() as s:
        prompt = make_prompt([SYSTEM, QUESTION])
        finished(s.ask(prompt)[0])
        finished(s.ask(make_prompt([user(some_words(9, seed=9))]))[0])
        get = s.store.get
        lost: list[int] = []

        def torn(key: CapsuleKey) -> Taken:
            s.store.get = get  # type: ignore[method-assign]
            lost.append(key.position)
            s.store.drop(key)
            raise CapsuleLostError("planted: the file is torn")

        s.store.get = torn  # type: ignore[method-assign]
        end, sink = s.ask(prompt)
        assert lost == [prompt.prompt_end]
        assert finished(end).metrics.cached_tokens == 152  # the end of the system message
        assert sink.tokens == cold_reply(s.engine.limits, prompt, Sampling(end_tokens=(END,)), 8)
        assert s.worker.health()["faults"] == 0
