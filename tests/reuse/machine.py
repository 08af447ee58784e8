"""Whatever happens to a server, in any order: is every reply still that of a server without reuse?

A Hypothesis state machine over one `Desk` with a disk. Its rules are what clients do (turns, edits,
retries, named sessions, undo, fork), how they leave (in prefill, in decode, while parked), what the
server does by itself (make room) and what befalls it (a restart, a kill, a full, slow or damaged
disk). After every turn its tokens and log probabilities are those of a cold run and the accounts
are counted afresh; after every start a session is what it was, or, if the process was killed or the
disk refused to write, what it was at some time before.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.errors import CapsuleError, ConflictError
from capserve.serving.disk.tier import DiskTier
from capserve.serving.misses import owner_of
from capserve.serving.sessions.desk import OverBudgetError
from capserve.serving.sessions.orders import (
    DeleteSession,
    ForkSession,
    ListSessions,
    PinSession,
    SessionInfo,
    UndoSession,
)
from capserve.serving.turn import Failed, Finished
from capserve.text.messages import Conversation, Message
from tests.reuse.cold import ColdRun
from tests.reuse.desk import Ask, Desk, Guest, continued, desk
from tests.reuse.faults import DiskSeam, damage, damage_manifest, part_files
from tests.reuse.ledger import Ledger
from tests.reuse.past import Messages, Past, alike, before
from tests.reuse.programs import SAMPLINGS
from tests.reuse.talks import LISTING, TOOLS, Talk
from tests.reuse.wire import WAIT_S

MOST_TOKENS = 200
"""A talk whose prompt is longer is begun anew: a cold run takes its time."""

SYSTEM = (
    "You are a careful assistant. Use a tool where one fits. Answer in one or two sentences. The "
    "user writes about a small program with files notes.txt, stats.py and table.csv."
)
WORDS = (
    "What is 12 times 7?",
    "Read notes.txt and tell me what it says.",
    "What is the capital of France?",
    "And now write a function that adds two numbers. Think about negative ones, and about zero.",
    "Name three colours, then three animals, then three rivers, and say which one you like best.",
)
LONG = LISTING[:280]
RESULTS = ("84", "The meeting is on Tuesday at 10.", "error: no such file")
SPACES = ("key/a", "key/b", "other/a")
OWNERS = ("key", "other")

ENDS = ("restart", "restart", "crash", "crash", "crash", "damage: manifest")
CHECKED_EVERY = 8
"""Steps from one count of all accounts to the next: on disk it waits for what is to be written."""


@dataclass(frozen=True)
class Words:
    """What a client says next, and how it wants to be answered."""

    text: str
    result: str
    sampling: Sampling
    max_tokens: int
    loses: bool


words = st.builds(
    Words,
    text=st.sampled_from(WORDS),
    result=st.sampled_from(RESULTS),
    sampling=st.builds(
        lambda known, seed, drafts, logprobs: replace(
            SAMPLINGS[known], seed=seed, drafts=drafts, top_logprobs=0 if logprobs else None
        ),
        known=st.sampled_from([0, 0, 0, 0, 1, 4, 5]),
        seed=st.sampled_from([0, 0, 0, 1]),
        drafts=st.sampled_from([0, 1, 3, 4]),
        logprobs=st.booleans(),
    ),
    max_tokens=st.sampled_from([1, 8, 12]),
    loses=st.booleans(),
)
clients = st.integers(0, 3)
picks = st.integers(0, 1 << 16)


@dataclass
class Client:
    """One that keeps its history itself and names no session."""

    talk: Talk
    namespace: str
    tokens: int = 0
    """Of its last prompt."""


@dataclass
class World:
    """What a machine needs from outside, for all its runs."""

    hot: TorchEngine
    cold: ColdRun
    """One for all runs: it need not say twice what it has said before."""
    ledger: Ledger
    root: Path
    runs: count[int] = field(default_factory=lambda: count(1))


def machine(world: World) -> RuleBasedStateMachine:
    made = Machine()
    made.world = world
    return made


class Machine(RuleBasedStateMachine):
    world: World
    server: Desk

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._past: dict[str, Past] = {}
        self._clients: list[Client] = []
        self._seam = DiskSeam()
        self._steps = 0
        self._damaged: set[bytes] = set()
        """Names of parts whose file was damaged at some time. A kill may come between the end of a
        bad file and that of its row: then it is found missing once more."""

    @initialize(
        budget_bytes=st.sampled_from([5 << 20, 12 << 20, 64 << 20]),
        disk_bytes=st.sampled_from([10 << 20, 1 << 30, 1 << 30]),
        interval=st.sampled_from([64, 128]),
        sessions=st.sampled_from([4, 64, 64]),
    )
    def begin(self, budget_bytes: int, disk_bytes: int, interval: int, sessions: int) -> None:
        self._directory = self.world.root / str(next(self.world.runs))
        self._stack.enter_context(self._seam.installed())
        self.server = self._stack.enter_context(
            desk(
                self.world.hot,
                self.world.cold,
                self.world.ledger,
                seam=self._seam,
                budget_bytes=budget_bytes,
                disk_bytes=disk_bytes,
                checkpoint_interval=interval,
                max_active_sessions=sessions,
                directory=self._directory,
            )
        )
        self._clients = [
            Client(Talk(SYSTEM, thinking=False), "key/a"),
            Client(Talk(SYSTEM, thinking=False), "key/b"),
            Client(Talk(SYSTEM, TOOLS[:1], thinking=True, preserve=True), "key/a"),
            Client(Talk(SYSTEM, thinking=False), "other/a"),
        ]

    def teardown(self) -> None:
        with self._stack:
            if hasattr(self, "server"):
                self._seam.set_full(False)
                self._find_damage()
                self.server.check()

    def _step(self, name: str) -> None:
        self.world.ledger.steps[name] += 1
        self._steps += 1
        if self._steps % CHECKED_EVERY == 0:
            self._find_damage()
            self.server.check()

    # -- turns ---------------------------------------------------------------------------------

    @rule(who=clients, say=words)
    def turn(self, who: int, say: Words) -> None:
        self._step("turn")
        self._turn(self._saying(who, say), say)

    @rule(who=clients, say=words, back=st.integers(1, 2))
    def edit(self, who: int, say: Words, back: int) -> None:
        self._step("edit")
        client = self._short(who)
        client.talk.edit(back, say.text)
        self._turn(client, say)

    @rule(who=clients, say=words, again=st.booleans())
    def retry(self, who: int, say: Words, again: bool) -> None:
        """The same request again, or one whose reply is to go on."""
        client = self._short(who)
        if not client.talk.messages:
            client.talk.say(say.text, say.result)
        if again or not client.talk.may_go_on:
            self._step("retry")
            client.talk.take_back_reply()
        else:
            self._step("go on")
        self._turn(client, say)

    @rule(who=clients, say=words, how=st.sampled_from(["next", "again", "on"]))
    def usual(self, who: int, say: Words, how: str) -> None:
        """What agents do most, in two requests with nothing between them: the next turn after a
        whole reply, the same request again, or a reply that was cut and goes on. Left to chance,
        these leave the hot state to be continued too seldom for `message_append` and `append`."""
        first = {
            "next": replace(say, max_tokens=40),
            "again": replace(say, max_tokens=1),
            "on": replace(say, max_tokens=7, sampling=replace(say.sampling, drafts=0)),
        }[how]
        self.turn(who, first)
        if how == "next":
            self.turn(who, first)
        else:
            self.retry(who, say, again=how == "again")

    @rule(pick=picks, say=words)
    def named_turn(self, pick: int, say: Words) -> None:
        session = self._picked(pick)
        if session is None:
            return
        self._step("named turn")
        talk, ask = self._named(session, say)
        end = self.server.ask(talk, ask)
        assert isinstance(end, Finished)
        assert end.metrics.session_id == session.id
        self._saw(end, talk, ask.namespace)

    @rule(who=clients, say=words, call=st.sampled_from(["extend", "step"]), at=st.integers(1, 4))
    def leave(self, who: int, say: Words, call: str, at: int) -> None:
        """In prefill or in decode, if the turn gets so far."""
        client = self._saying(who, say)
        say = replace(say, max_tokens=16)
        end = self._turn(client, say, cancel=(call, at))
        where = {"extend": "prefill", "step": "decode"}[call]
        self._step(f"cancel in {where}" if isinstance(end, Failed) else "turn")

    @rule(
        who=clients,
        say=words,
        guest=clients,
        call=st.sampled_from(["extend", "step"]),
        at=st.integers(1, 2),
        ends_host=st.booleans(),
    )
    def short_turn_inside(
        self, who: int, say: Words, guest: int, call: str, at: int, ends_host: bool
    ) -> None:
        """While a long turn runs a short one comes; the long one's client may leave meanwhile."""
        host, visitor = self._client(who), self._clients[guest]
        host.talk.messages.clear()
        # Long, and in words that nobody read before.
        host.talk.say(f"{next(self.world.runs)} is a number. {say.text}\n\n{LONG}", say.result)
        host.tokens = MOST_TOKENS + 1  # the next turn of this client is a short one again
        talk = Talk(system="", thinking=False)
        talk.say(WORDS[at], RESULTS[0])
        ask = Ask(Sampling(), max_tokens=1, namespace=visitor.namespace, on=False)
        inside = Guest(talk.conversation(), ask, (call, at), ends_host)
        end = self._turn(host, replace(say, max_tokens=16), guest=inside)
        came = self.server.guest_end
        if isinstance(came, Finished):
            self._saw(came, inside.talk, ask.namespace)
        if end.metrics.parks:
            self._step("cancel while parked" if isinstance(end, Failed) else "park")
        else:
            self._step("two at once")

    # -- orders --------------------------------------------------------------------------------

    @rule(pick=picks, turns=st.integers(1, 2))
    def undo(self, pick: int, turns: int) -> None:
        session = self._picked(pick)
        if session is None or session.turns < turns:
            return
        self._step("undo")
        done = self.server.order(UndoSession(self._owner(session), session.id, turns=turns))
        past = self._past[session.id]
        past.versions.append(before(past.versions[-1], turns))
        self._written(past)
        assert done.removed_turns == turns
        self._same(session.id, past.versions[-1])

    @rule(pick=picks, n=st.integers(1, 2), turns=st.integers(0, 2))
    def fork(self, pick: int, n: int, turns: int) -> None:
        session = self._picked(pick)
        if session is None or session.turns < turns:
            return
        self._step("fork")
        order = ForkSession(self._owner(session), session.id, n, turns=turns or None)
        past = self._past[session.id]
        then = before(past.versions[-1], turns) if turns else past.versions[-1]
        for made in self.server.order(order).sessions:
            assert made.parent_id == session.id
            self._past[made.id] = branch = Past(past.namespace, [then])
            self._written(branch)
            self._same(made.id, then)

    @rule(pick=picks, how=st.sampled_from(["pin", "unpin", "unpin", "delete"]))
    def pin_or_delete(self, pick: int, how: str) -> None:
        session = self._picked(pick)
        if session is None:
            return
        owner = self._owner(session)
        if how == "delete":
            self._step("delete")
            self.server.order(DeleteSession(owner, session.id))
            assert self.server.known(session.id) is None
            past = self._past[session.id]
            past.deleted = True
            self._written(past)
            return
        try:
            self.server.order(PinSession(owner, session.id, pinned=how == "pin"))
        except (ConflictError, OverBudgetError):
            self._step("pin refused")
        else:
            self._step(how)

    # -- what the store does by itself ---------------------------------------------------------

    @rule(pick=picks, space=st.sampled_from(SPACES), times=st.integers(0, 4))
    def room_is_made(self, pick: int, space: str, times: int) -> None:
        """So many capsules leave memory; or one leaves every tier, whichever it is."""
        store = self.server.store

        def drop() -> bool:
            keys = store.entries_in(space)
            return bool(keys) and store.drop(keys[pick % len(keys)])

        def demote() -> bool:
            return sum(store.demote("host") is not None for _ in range(times)) > 0

        name, action = ("demote", demote) if times else ("evict", drop)
        self._step(name if self.server.do(action) else f"nothing to {name}")

    # -- what befalls a server -----------------------------------------------------------------

    @rule(how=st.sampled_from(ENDS), writes=st.integers(0, 6))
    def end_of_the_process(self, how: str, writes: int) -> None:
        """And the start of the next one, perhaps on a damaged manifest."""
        self._step(how)
        if how == "crash":
            self.server.die(writes=writes)
        else:
            self.server.stop()
        if how == "damage: manifest":
            damage_manifest(self._directory, ("head", "middle", "cut")[writes % 3])
        self._begin_again(killed=how != "restart")

    @rule(
        who=clients,
        say=words,
        call=st.sampled_from(["extend", "step", "snapshot", "restore"]),
        at=st.integers(1, 3),
        writes=st.integers(0, 6),
    )
    def crash_in_a_turn(self, who: int, say: Words, call: str, at: int, writes: int) -> None:
        self._step("crash in a turn")
        client = self._saying(who, say)
        talk = client.talk.conversation()
        ask = Ask(say.sampling, say.max_tokens, client.namespace, on=False)
        end = self.server.ask_and_die(talk, ask, (call, at), writes)
        if isinstance(end, Finished):
            client.talk.heard(end.message, loses=say.loses)
            self._heard(end, talk, client.namespace)
        self._begin_again(killed=True)

    @rule(how=st.sampled_from(["slow", "slow", "full", "has room", "has room"]))
    def disk_is(self, how: str) -> None:
        """Full, or so slow that what is saved waits until something needs it written."""
        self._step(f"disk {how}")
        if how == "full":
            self._flush()  # what is lost by it is what comes from now on
            self._seam.set_full(True)
        elif how == "has room":
            self._seam.set_full(False)
        else:
            self._seam.slow()

    @rule(pick=picks, how=st.sampled_from(["flip", "cut", "lose"]), at=picks)
    def part_is_damaged(self, pick: int, how: str, at: int) -> None:
        self._flush()
        if not part_files(self._directory):
            return
        self._step(f"damage: {how}")
        self._flush()
        files = part_files(self._directory)  # a step may have thrown away some
        if not files:
            return
        file = files[pick % len(files)]
        damage(file, how, at)
        self._damaged.add(bytes.fromhex(file.name.split(".")[0]))

    # -- inside --------------------------------------------------------------------------------

    def _client(self, who: int) -> Client:
        return self._clients[who]

    def _short(self, who: int) -> Client:
        client = self._client(who)
        if client.tokens > MOST_TOKENS:
            client.talk.messages.clear()
            client.tokens = 0
        return client

    def _saying(self, who: int, say: Words) -> Client:
        client = self._short(who)
        client.talk.say(say.text, say.result)
        return client

    def _turn(self, client: Client, say: Words, **how: Any) -> Finished | Failed:
        talk = client.talk.conversation()
        ask = Ask(say.sampling, say.max_tokens, client.namespace, on=False, **how)
        end = self.server.ask(talk, ask)
        client.tokens = max(client.tokens, end.metrics.prompt_tokens)
        if isinstance(end, Finished):
            client.talk.take_back_reply()  # a continued reply is given back whole
            client.talk.heard(end.message, loses=say.loses)
            self._saw(end, talk, client.namespace)
        return end

    def _named(self, session: SessionInfo, say: Words) -> tuple[Conversation, Ask]:
        known = self.server.known(session.id)
        assert known is not None
        assert known.conversation is not None
        said = known.conversation.messages
        talk = Talk(system="", messages=list(said))
        if not said:
            talk.messages.append(Message("system", SYSTEM))
        if talk.answered or len(talk.messages) < 2:
            talk.say(say.text, say.result)
        else:
            talk.messages.append(Message("user", say.text))
        new = talk.messages[len(said) :]
        ask = Ask(say.sampling, say.max_tokens, known.namespace, on=False, session_id=session.id)
        return continued(known, *new), ask

    def _saw(self, end: Finished, asked: Conversation, namespace: str) -> None:
        """A turn ended: its session's conversation is what was asked, with the reply."""
        session_id = self._heard(end, asked, namespace)
        self._same(session_id, self._past[session_id].versions[-1])

    def _heard(self, end: Finished, asked: Conversation, namespace: str) -> str:
        session_id = end.metrics.session_id
        assert session_id is not None
        past = self._past.setdefault(session_id, Past(namespace, []))
        assert past.namespace == namespace, "a session changed its namespace"
        past.heard(asked.messages, end.message, sure=not self._seam.full)
        return session_id

    def _written(self, past: Past) -> None:
        past.uncertain = self._seam.full

    def _same(self, session_id: str, expected: Messages) -> None:
        known = self.server.known(session_id)
        assert known is not None, "a live session is not known by its name"
        assert known.conversation is not None
        assert alike(known.conversation, expected), (
            f"the session's conversation is\n{known.conversation.messages}\nnot\n{expected}"
        )

    def _live(self) -> list[SessionInfo]:
        """Sessions that have a conversation; of the same order in every run."""
        found = [s for owner in OWNERS for s in self.server.order(ListSessions(owner)).sessions]
        order = {session_id: place for place, session_id in enumerate(self._past)}
        unknown = [s.id for s in found if s.id not in order and self._talks(s.id)]
        assert not unknown, f"nobody ever had these sessions: {unknown}"
        return sorted((s for s in found if s.id in order), key=lambda s: order[s.id])

    def _talks(self, session_id: str) -> bool:
        """It has a conversation; one whose first turn was cancelled has none."""
        known = self.server.known(session_id)
        return known is not None and known.conversation is not None

    def _picked(self, pick: int) -> SessionInfo | None:
        live = [s for s in self._live() if self._talks(s.id) and s.tokens < MOST_TOKENS]
        return live[pick % len(live)] if live else None

    def _owner(self, session: SessionInfo) -> str:
        return owner_of(self._past[session.id].namespace)

    def _flush(self) -> DiskTier:
        disk = self.server.server.disk
        assert disk is not None
        self._seam.ready()
        assert disk.flush(WAIT_S) or disk.fault is not None
        return disk

    def _find_damage(self) -> None:
        """Read what was damaged: it is refused, or it was written anew in the meantime."""
        disk = self._flush()
        for name in sorted(self._damaged):
            with suppress(CapsuleError):
                disk.read(name)
        bad = list(self._flush().verify())  # the writer is idle: nothing goes while it is read
        assert not bad, f"bad files that were not refused: {bad}"

    def _begin_again(self, *, killed: bool) -> None:
        full = self._seam.full
        self.server.start()
        if killed or full:
            for past in self._past.values():
                past.uncertain = True
        live = {s.id for s in self._live()}
        for session_id, past in self._past.items():
            known = self.server.known(session_id) if session_id in live else None
            past.came_back(known, sure=not (past.uncertain or self._may_be_trimmed))

    @property
    def _may_be_trimmed(self) -> bool:
        return self.server.setup.max_active_sessions < 64
