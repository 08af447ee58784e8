"""How does one turn run on the engine, unit by unit, from its plan to its last committed token?

Plan and take up a state, prefill chunk by chunk, then step. `advance` does one of these and comes
back, so that between two units the worker can look at everything else. There a turn can also be
parked: its state becomes a capsule, another turn has the engine, and `resume` goes on with the very
token that would have come. Cancellation is looked at before every unit.

A run says how the turn ended, or raises; it never delivers the terminal event itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from capserve.engine.seam import TokenArray
from capserve.errors import NotFoundError
from capserve.serving.capsules.rows import CapsuleKey, TurnEnd
from capserve.serving.capsules.store import CapsuleLostError
from capserve.serving.journal import SpanKind, lcp
from capserve.serving.lifecycle import TurnState
from capserve.serving.prefix import PrefixPlan
from capserve.serving.running.bench import Bench, Cancelled, Done, Ending, Turn
from capserve.serving.running.decode_run import DecodeRun, since_ms
from capserve.serving.sessions.registry import Session
from capserve.text.messages import Conversation, Message
from capserve.text.prompt import Prompt, TurnRecord


@dataclass(frozen=True, slots=True)
class _Parked:
    since: float
    """`time.monotonic()`."""
    key: CapsuleKey | None
    """None when no state had been taken up yet."""


class TurnRun:
    """One use: `advance` until it says how the turn ended, then `close`, which is due whatever
    happens in between."""

    def __init__(self, turn: Turn, bench: Bench) -> None:
        self.turn = turn
        self._bench = bench
        self._request = turn.item.request
        self._prompt = turn.item.request.prompt
        self._tally = turn.tally
        self._pin: int | None = None
        """Where a requested pin lies; None when none was asked for, or none is possible."""
        self.session: Session | None = None
        """The session that it works on, and keeps busy, once a state is taken up."""
        self._start = 0
        """Tokens that were taken up."""
        self._ahead: list[int] = []
        """Boundaries to be kept on the way through the prompt, ascending."""
        self._decode: DecodeRun | None = None
        self._parked: _Parked | None = None

    # -- where it is -------------------------------------------------------------------------

    @property
    def prefill_left_tokens(self) -> int | None:
        """Tokens of the prompt that are still to be read; None before a state is taken up."""
        if self.session is None:
            return None
        return max(0, len(self._prompt.tokens) - len(self.session.journal))

    @property
    def session_id(self) -> str | None:
        """Of the session that it works on, or is to work on if the request says so."""
        return self._request.session_id if self.session is None else self.session.id

    @property
    def said_tokens(self) -> int:
        """Tokens of the reply so far."""
        return 0 if self._decode is None else self._decode.said

    @property
    def cancelled(self) -> bool:
        return self.turn.item.cancel.cancelled

    # -- one unit of work --------------------------------------------------------------------

    def advance(self) -> Ending | None:
        """Plan and take up, or prefill one chunk, or step once. None when there is more to do.

        Raises `SinkError`, NotFoundError for a session that is not there, or what the engine or
        the text layer raised. An error leaves the engine's state to nobody.
        """
        assert self._parked is None, "a parked turn is resumed first"
        if self.turn.life.state is TurnState.QUEUED:
            self.turn.life.to(TurnState.PREFILL)
        if self.cancelled:
            self._keep_what_was_done()
            return Cancelled()
        if self.session is None:
            self._take_up()
        elif self._decode is not None or not self.prefill_left_tokens:
            return self._step(self.session)
        else:
            self._read_chunk(self.session)
        return None

    def _take_up(self) -> None:
        bench, prompt, namespace = self._bench, self._prompt, self._request.namespace
        named = self._named()
        self._pin = bench.policy.pin_position(prompt, self._request.pin)
        at_most = None
        if self._pin == 0:
            self._tally.pin = "refused: shorter than one grid step"
            self._pin = None
        if self._pin is not None:
            self._tally.pin = bench.keeper.find_pin(
                namespace, prompt, self._pin, exact=bench.policy.exact
            )
            if self._tally.pin is None:
                # A state beyond the pin can't be cut back to it: pass the pin on the way.
                at_most = self._pin - 1
        lost: CapsuleKey | None = None
        while True:
            plan = plan_for(prompt, namespace, bench, at_most)
            assert plan.capsule is None or plan.capsule != lost, "a lost capsule is still listed"
            known_id = plan.session_id or plan.parent_id
            source = named or (None if known_id is None else bench.sessions.named(known_id))
            turns = [] if source is None else _turns_shared(source, prompt)
            started = time.monotonic()
            try:
                session, moved_bytes = bench.keeper.take_up(plan, namespace, prompt, named)
                break
            except CapsuleLostError:
                lost = plan.capsule
        self._tally.plan = plan
        self._tally.restore_ms = since_ms(started)
        if plan.tier is not None:
            bench.meter.saw_restore(plan.tier, moved_bytes, self._tally.restore_ms)
        if source is not None and source is not session:
            session.parent_id = source.id
        session.turns = turns
        session.busy = True
        self.session = session
        self._tally.session_id = session.id
        self._start = plan.position
        self._ahead = list(bench.policy.boundaries(prompt, plan.position, self._pin))
        if not self.prefill_left_tokens:
            self._prompt_is_read(session)

    def _named(self) -> Session | None:
        """The session that the request names. A session of another namespace is not there."""
        name = self._request.session_id
        if name is None:
            return None
        session = self._bench.sessions.named(name)
        if session is None or session.namespace != self._request.namespace:
            raise NotFoundError(f"session_id: there is no session {name!r}.", param="session_id")
        assert not session.busy, "turns that name one session run one after the other"
        return session

    def _read_chunk(self, session: Session) -> None:
        bench, tokens, position = self._bench, self._prompt.tokens, len(session.journal)
        limit = self._ahead[0] if self._ahead else len(tokens)
        end = bench.engine.limits.chunk_end(position, limit)
        began = time.monotonic()
        bench.engine.extend(tokens[position:end])
        elapsed_ms = since_ms(began)
        session.journal.append(tokens[position:end], SpanKind.PREFILL)
        self._tally.prefill_ms += elapsed_ms
        self._tally.new_prefill_tokens += end - position
        bench.meter.saw_prefill(end - position, elapsed_ms)
        if self._ahead and end == self._ahead[0]:
            self._ahead.pop(0)
            self._keep_boundary(session, end)
        if end == len(tokens):
            self._prompt_is_read(session)

    def _prompt_is_read(self, session: Session) -> None:
        # Only a prompt that was absorbed whole says where its messages end.
        session.journal.mark(self._prompt.prompt_end, len(self._prompt.chain) - 1)

    def _keep_boundary(self, session: Session, position: int) -> None:
        pin = position == self._pin
        refusal = self._bench.keeper.keep(session, pin=pin)
        if pin:
            self._tally.pin = "pinned" if refusal is None else f"refused: {refusal}"

    def _step(self, session: Session) -> Done | None:
        if self._decode is None:
            self._decode = DecodeRun(self.turn, session, self._bench)
        done = self._decode.step()
        if done is not None:
            session.journal.assert_in_step(self._bench.engine.position)
            self._commit(session, done)
        return done

    # -- making way --------------------------------------------------------------------------

    def park(self) -> bool:
        """Leave the engine to another turn, until `resume`. False: there is no room; go on."""
        assert self._parked is None, "parked twice"
        key = None
        if self.session is not None:
            key = self._bench.keeper.park(self.session)
            if key is None:
                return False
        self._parked = _Parked(time.monotonic(), key)
        self._tally.parks += 1
        return True

    def resume(self) -> None:
        """Take the engine again, exactly where it was left."""
        parked = self._parked
        assert parked is not None, "only a parked turn is resumed"
        if self.session is not None and parked.key is not None:
            self._bench.keeper.unpark(self.session, parked.key)
        self._parked = None  # not before: until the state is back, `close` has a hold to release
        self._tally.parked_ms += since_ms(parked.since)
        if self._decode is not None:
            self._decode.begin()

    def close(self) -> None:
        """The turn is over, however: nothing is held for it any more."""
        parked, self._parked = self._parked, None
        try:
            if parked is not None:
                self._tally.parked_ms += since_ms(parked.since)
                if self.session is not None and parked.key is not None:
                    keep = self._is_worth_keeping(self.session, parked.key.position)
                    self._bench.keeper.release(parked.key, keep=keep)
        finally:
            # Whatever became of the state: nobody else would ever free the session.
            if self.session is not None:
                self.session.busy = False

    # -- its end -----------------------------------------------------------------------------

    def _keep_what_was_done(self) -> None:
        """An impatient client's retry resumes here instead of reading all of it again.

        After a cancelled decode too: who goes on from the part that was heard finds its state.
        Either way it is found by its tokens alone; the session is not hot.
        """
        if self.session is None:
            return
        position = self._bench.engine.position
        self.session.journal.assert_in_step(position)
        if self._is_worth_keeping(self.session, position):
            self._bench.keeper.keep(self.session)

    def _is_worth_keeping(self, session: Session, position: int) -> bool:
        bench = self._bench
        exact = session.journal.bit_exact(position, bench.engine.limits.grid)
        said = None if self._decode is None else self.said_tokens
        return position > self._start and bench.policy.on_commit(
            position, bit_exact=exact, cancelled_after=said
        )

    def _commit(self, session: Session, done: Done) -> None:
        """Before the terminal event: the client may send its next turn the moment it sees it."""
        bench, asked = self._bench, self._prompt.conversation
        position = bench.engine.position
        messages = _with_reply(self._prompt, done.message)
        session.conversation = Conversation(messages, asked.tools, asked.template_kwargs)
        session.turns.append(TurnEnd(position, len(messages)))
        if self._prompt.continues_reply or not self._took_over(session.record):
            # The message that was continued is another one now, for records too.
            session.record = None
        session.chain = session.journal.chain = bench.records.chain(session.conversation)
        if done.clean:
            exact = session.journal.bit_exact(position, bench.engine.limits.grid)
            if bench.policy.on_commit(position, bit_exact=exact):
                bench.keeper.keep(session)
            if done.at_end_token:
                self._publish(session, done)
            bench.sessions.mark_hot(session, position)
        bench.archive.session_changed(session)

    def _took_over(self, record: TurnRecord | None) -> bool:
        """Does the conversation still start with that record's messages?"""
        return record is not None and self._prompt.spliced_messages == len(record.messages)

    def _publish(self, session: Session, done: Done) -> None:
        bench, prompt = self._bench, self._prompt
        whole = np.array(session.journal.tokens)  # prompt and reply, the end token included
        record = bench.records.make_record(prompt, done.message, whole)
        if record is None:
            return
        known = prompt.spliced_messages
        supersedes = prompt.chain[known] if known else None
        bench.archive.turn_ended(self._request.namespace, session.chain[-1], record, supersedes)
        session.record = record


def _with_reply(prompt: Prompt, reply: Message) -> tuple[Message, ...]:
    """What the client has seen: a reply that was continued is one message."""
    asked = prompt.conversation.messages
    if not prompt.continues_reply:
        return (*asked, reply)
    begun = asked[-1]
    reasoning = reply.reasoning if begun.reasoning is None else begun.reasoning
    whole = replace(reply, content=begun.content + reply.content, reasoning=reasoning)
    return (*asked[:-1], whole)


def plan_for(
    prompt: Prompt, namespace: str, bench: Bench, at_most: int | None = None
) -> PrefixPlan:
    """How a turn with this prompt would start now. Changes nothing."""
    sessions = bench.sessions
    hot = sessions.hot_view(bench.engine.limits.grid)
    rates = bench.meter.rates
    return bench.policy.plan(prompt, namespace, hot, sessions.views(), bench.index, rates, at_most)


def _turns_shared(session: Session, prompt: Prompt) -> list[TurnEnd]:
    """Its finished turns that the prompt goes on from: a divergence leaves the later ones."""
    tokens: TokenArray = session.journal.tokens
    shared = lcp(tokens, prompt.tokens)
    return [turn for turn in session.turns if turn.position <= shared]
