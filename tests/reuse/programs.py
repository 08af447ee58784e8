"""What may happen to a server, in any order: random programs of turns, and how one is run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from capserve.engine.seam import Sampling
from capserve.serving.turn import Finished
from tests.reuse.desk import Ask, Desk
from tests.reuse.talks import RESULTS, SYSTEM, TOOLS, WORDS, Talk

MOVES = (*["next"] * 8, "edit", "branch", "again", "go on", "side")

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.2, top_k=20),
    Sampling(temperature=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.4),
    Sampling(frequency_penalty=0.3, logit_bias=((100, 1.5), (271, -2.0))),
)


@dataclass(frozen=True)
class Move:
    """One request of one client."""

    talk: int | None
    """None stays with the talk of the move before."""
    move: str
    back: int
    words: int
    result: int
    flip_thinking: bool
    loses: bool
    sampling: int
    seed: int
    drafts: int
    logprobs: bool
    max_tokens: int
    stop: bool
    pin: bool
    cancel: tuple[str, int] | None
    on: bool
    thinking: int | None


moves = st.builds(
    Move,
    talk=st.sampled_from([None, None, None, 0, 1, 2]),
    move=st.sampled_from(MOVES),
    back=st.integers(1, 3),
    words=st.integers(0, len(WORDS) - 1),
    result=st.integers(0, len(RESULTS) - 1),
    flip_thinking=st.sampled_from([*[False] * 7, True]),
    loses=st.booleans(),
    sampling=st.sampled_from([0, 0, 0, *range(len(SAMPLINGS))]),
    seed=st.integers(0, 2),
    drafts=st.sampled_from([0, 1, 3, 4]),
    logprobs=st.booleans(),
    max_tokens=st.sampled_from([1, 9, 100, 100, 100]),
    stop=st.sampled_from([*[False] * 7, True]),
    pin=st.sampled_from([*[False] * 5, True]),
    cancel=st.sampled_from([*[None] * 9, ("extend", 2), ("step", 1), ("step", 5)]),
    on=st.booleans(),
    thinking=st.sampled_from([*[None] * 4, 0, 5, 20]),
)


@dataclass(frozen=True)
class Setting:
    """What the person who started the server chose."""

    chunk: int
    checkpoint_interval: int
    budget_bytes: int
    max_active_sessions: int


settings_of_a_server = st.builds(
    Setting,
    chunk=st.sampled_from([64, 128]),
    checkpoint_interval=st.sampled_from([64, 256]),
    # Nothing fits; some three capsules fit; everything fits.
    budget_bytes=st.sampled_from([0, 6 << 20, *[256 << 20] * 4]),
    max_active_sessions=st.sampled_from([2, 64, 64]),
)


def run(server: Desk, program: list[Move]) -> None:
    """Every finished or cancelled turn is compared with a cold run inside `ask`."""
    # Two talks share system prompt and tools, two share the API key: there is much to confuse.
    talks = [
        Talk(tools=TOOLS, thinking=False),
        Talk(tools=TOOLS, thinking=True, preserve=True),
        Talk(SYSTEM, thinking=True),
    ]
    spaces = ["key/a", "key/a", "other/a"]
    here = 0
    for move in program:
        here = here if move.talk is None else move.talk
        talk, space = talks[here], spaces[here]
        if move.move == "side":
            talk = Talk(system="Give a title to the text.", thinking=False)
        elif move.move == "branch":
            talk = talks[here] = talk.branch()
        _change(talk, move)
        thinking = talk.thinking != move.flip_thinking
        end = server.ask(
            talk.conversation(thinking=thinking),
            Ask(
                replace(
                    SAMPLINGS[move.sampling],
                    seed=move.seed,
                    drafts=move.drafts,
                    top_logprobs=0 if move.logprobs else None,
                ),
                max_tokens=move.max_tokens,
                namespace=space,
                stop=(" is",) if move.stop else (),
                pin=move.pin,
                cancel=move.cancel,
                on=move.on,
                thinking=move.thinking,
            ),
        )
        if isinstance(end, Finished):
            talk.take_back_reply()  # a continued reply is given back whole
            talk.heard(end.message, loses=move.loses)


def _change(talk: Talk, move: Move) -> None:
    words, result = WORDS[move.words], RESULTS[move.result]
    if move.move == "go on" and talk.may_go_on:
        return
    if move.move in ("edit", "branch"):
        talk.edit(move.back, words)
    elif move.move == "again" and talk.messages:
        talk.take_back_reply()
    else:
        talk.say(words, result)
