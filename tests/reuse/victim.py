"""A process that may be killed at any moment: a desk with a disk, and clients that keep it busy.

Run as a program it loads the model once and then, for each line `seed directory` on its input,
forks a child that serves the directory's sessions until it is killed. The parent prints the child's
process id; no thread runs before a fork. A child begins with what the last one left.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.errors import CapserveError
from capserve.nano import checkpoint_dir
from capserve.serving.sessions.orders import (
    DeleteSession,
    ForkSession,
    ListSessions,
    PinSession,
    SessionInfo,
    SessionOrder,
    UndoSession,
)
from capserve.serving.sessions.transcripts import KnownSession
from capserve.serving.turn import Finished
from capserve.text.messages import Conversation, Message
from tests.reuse.cold import ColdRun
from tests.reuse.desk import Ask, Desk, continued
from tests.reuse.faults import DiskSeam
from tests.reuse.ledger import Ledger
from tests.reuse.machine import MOST_TOKENS, RESULTS, SYSTEM, WORDS
from tests.reuse.server import Server, Setup, texts
from tests.reuse.talks import TOOLS, Talk
from tests.reuse.wire import Wire

OWNER = "key"
CLIENTS = 3
DISK_BYTES = 48 << 20
"""Small: room has to be made, so a kill falls into evictions, too."""


def load() -> TorchEngine:
    """The engine that victims run on, and whoever looks at what they left."""
    return TorchEngine.load(
        checkpoint_dir(),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        prefill_chunk=64,
        threads=1,
    )


def setup(directory: Path) -> Setup:
    # Memory for some five states: others are on disk alone.
    return Setup(budget_bytes=8 << 20, directory=directory, disk_bytes=DISK_BYTES)


def serve(engine: TorchEngine, seed: int, directory: Path) -> None:
    """Serve until killed."""
    wire, chosen = Wire(engine), setup(directory)
    server = Desk(wire, chosen, Server.start(wire, chosen), ColdRun(engine), Ledger(), DiskSeam())
    clients = [
        threading.Thread(target=_client, args=(server, random.Random(f"{seed} {number}")))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def _client(server: Desk, rng: random.Random) -> None:
    """Turns, named and not, undo, fork and pin, without an end. Whoever has more to do is parked
    for the others."""
    talk = Talk(SYSTEM, TOOLS[:1] if rng.random() < 0.3 else (), thinking=False)
    ask = Ask(Sampling(), namespace=rng.choice(["key/a", "key/b"]))
    while True:
        ask = replace(
            ask,
            sampling=Sampling(rng.choice([0.0, 0.8]), seed=rng.randrange(3), drafts=3),
            max_tokens=rng.choice([1, 12]),
        )
        session = _any_session(server, rng)
        # Refused: another client was there first. It tries something else.
        with suppress(CapserveError):
            if session is not None and rng.random() < 0.4:
                server.order(_any_order(session, rng))
            elif session is not None and rng.random() < 0.4:
                _named_turn(server, session, ask, rng)
            else:
                talk.say(rng.choice(WORDS), rng.choice(RESULTS))
                end = server.submitted(server.prepared(talk.conversation(), ask)).sink.wait()
                if isinstance(end, Finished) and end.prompt_tokens < MOST_TOKENS:
                    talk.heard(end.message, loses=False)
                else:
                    talk.messages.clear()


def _any_session(server: Desk, rng: random.Random) -> SessionInfo | None:
    sessions = [s for s in server.order(ListSessions(OWNER)).sessions if s.turns]
    return rng.choice(sessions) if sessions else None


def _any_order(session: SessionInfo, rng: random.Random) -> SessionOrder:
    match rng.randrange(4):
        case 0:
            return UndoSession(OWNER, session.id)
        case 1:
            return ForkSession(OWNER, session.id, turns=rng.choice([None, 1]))
        case 2:
            return PinSession(OWNER, session.id, pinned=rng.random() < 0.3)
        case _:
            return DeleteSession(OWNER, session.id)


def _named_turn(server: Desk, session: SessionInfo, ask: Ask, rng: random.Random) -> None:
    known = server.known(session.id)
    if known is None or session.tokens > MOST_TOKENS:
        return
    talk = next_words(known, rng.choice(WORDS))
    ask = replace(ask, namespace=known.namespace, session_id=session.id)
    server.submitted(server.prepared(talk, ask)).sink.wait()


def next_words(known: KnownSession, text: str) -> Conversation:
    """What its client says next."""
    assert known.conversation is not None
    new = [Message("user", text)]
    if not known.conversation.messages:
        new.insert(0, Message("system", SYSTEM))
    return continued(known, *new)


def main() -> None:
    torch.set_num_threads(1)
    engine = load()
    texts()
    print("ready", flush=True)
    for line in sys.stdin:
        seed, directory = line.split(maxsplit=1)
        assert threading.active_count() == 1, "a fork takes one thread along, no more"
        child = os.fork()
        if child == 0:
            try:
                serve(engine, int(seed), Path(directory.strip()))
            finally:
                os._exit(1)  # it should have been killed
        print(child, flush=True)
        # A child that ended by itself says so in its status.
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
