"""What are the scenes? Each one a function of a `Desk`, short enough to be read as a script.

Every scene has a namespace of its own, and names itself in its system prompt, so that none lives on
what another one read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks.scenarios.client import Desk, Talk
from benchmarks.scenarios.material import SYSTEM, TITLE_SYSTEM, source
from benchmarks.scenarios.server import Server


@dataclass(frozen=True)
class Stage:
    """What a scene may use."""

    desk: Desk
    server: Server
    down: Callable[[], AbstractContextManager[None]]
    """Around a time in which the server does not answer on purpose."""

    def agent(self, *, seed: int = 1, **fields: Any) -> Talk:
        """A new session of an agent with tools and a long system prompt."""
        notes = source(seed, self.desk.sizes.prefix)
        system = f"{SYSTEM} {self.desk.session}\n\n# Project notes\n\n{notes}"
        return Talk(self.desk, [{"role": "system", "content": system}], **fields)

    def restart(self, *, kill: bool) -> None:
        with self.down():
            self.server.restart(kill=kill)


def hot_loop(stage: Stage) -> None:
    """An agent's loop of eight requests, with calls and results."""
    stage.agent().go(8)


def reserialised(stage: Stage) -> None:
    """The client writes arguments in its own way, and content null, "" or as parts."""
    talk = stage.agent()
    for i in range(6):
        talk.prepare()
        talk.send(f"turn {i + 1}")
        for j, message in enumerate(talk.messages):
            if message["role"] == "assistant":
                talk.messages[j] = _respelled(message, i)


def _respelled(message: dict[str, Any], variant: int) -> dict[str, Any]:
    """The same message as three clients would send it."""
    empty: tuple[Any, ...] = (None, "", [])
    content = message["content"] or empty[variant % 3]
    if isinstance(content, str) and content and variant % 3 == 2:
        content = [{"type": "text", "text": content}]
    calls = []
    for call in message.get("tool_calls", ()):
        try:
            values = json.loads(call["function"]["arguments"])
        except ValueError:  # of a server that lets broken calls through: clients echo those as is
            calls.append(call)
            continue
        turned = dict(reversed(values.items()))
        separators = ((",", ":"), (", ", ": "), (" , ", " : "))[variant % 3]
        arguments = json.dumps(turned, separators=separators, indent=variant % 2 or None)
        function = {"name": call["function"]["name"], "arguments": arguments}
        calls.append({**call, "id": f"call_{variant}", "function": function})
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def title_between(stage: Stage) -> None:
    """A side request with another system prompt and no tools between the turns."""
    talk = stage.agent()
    system = {"role": "system", "content": f"{TITLE_SYSTEM} {stage.desk.session}"}
    for i in range(3):
        talk.go(1, f"turn {i + 1}, step")
        side = Talk(stage.desk, [system], [], max_tokens=24)
        said = [m["content"] for m in talk.messages if m["role"] == "user"]
        side.say("\n".join(said))
        side.send(f"title {i + 1}")
    talk.go(1, "last turn")


def two_sub_agents(stage: Stage) -> None:
    """Two that share system and tools take turns."""
    first, second = stage.agent(), stage.agent(asked=1)
    for i in range(3):
        first.go(1, f"round {i + 1}, first")
        second.go(1, f"round {i + 1}, second")


def undo(stage: Stage) -> None:
    """Take back one turn, then two, and ask something else."""
    talk = stage.agent()
    marks = []
    for question in ("List the files here.", "Read config.toml and tell me the port."):
        marks.append(len(talk.messages))
        talk.say(question)
        talk.send("turn")
        if talk.waits:
            talk.send("after the tool")
    for mark, question in zip(
        reversed(marks),
        ("What is the capital of France?", "Find the bug in stats.py."),
        strict=True,
    ):
        del talk.messages[mark:]
        talk.say(question)
        talk.send("instead")


def four_branches(stage: Stage) -> None:
    """One long document, four different questions about it."""
    trunk = stage.agent()
    trunk.say(f"Here is a file.\n\n{source(7, stage.desk.sizes.prefix)}\n\nWhat is it about?")
    trunk.send("trunk")
    questions = ("What does it add?", "List the files here.", "Who wrote it?", "Is it tested?")
    for i, question in enumerate(questions):
        branch = trunk.copy()
        branch.say(question)
        branch.send(f"branch {i + 1}")


def fresh_session(stage: Stage) -> None:
    """A new session that shares only system and tools, its replies cut short."""
    stage.agent().go(2, "old session, turn")
    stage.agent(asked=3, max_tokens=24).go(2, "fresh session, turn")


def reasoning_lost(stage: Stage) -> None:
    """The model thinks; the client never sends the reasoning back."""
    talk = stage.agent(thinking=True)
    for i in range(5):
        talk.prepare()
        talk.send(f"turn {i + 1}")
        for message in talk.messages:
            message.pop("reasoning_content", None)


def disconnect(stage: Stage) -> None:
    """Leave in the middle of a reply and go on from what was seen; leave a long prefill, retry."""
    talk = stage.agent(max_tokens=48)
    talk.say("Write a Python function that checks whether a number is prime.")
    seen = stage.desk.leave(talk, "left while it wrote", after_deltas=6)
    talk.messages.append({"role": "assistant", "content": seen.content})
    talk.say("Go on.")
    talk.send("continued")
    talk.say(f"Here is a file.\n\n{source(9, stage.desk.sizes.prefix)}\n\nWhat is it about?")
    for i in range(2):
        stage.desk.abandon(talk, f"left while it read {i + 1}", after_s=0.6)
    talk.send("retried")


def restarted(stage: Stage) -> None:
    """Two sessions, SIGTERM, both go on; SIGKILL, both go on."""
    first, second = stage.agent(), stage.agent(seed=2, asked=1)
    for kill in (None, False, True):
        if kill is not None:
            stage.restart(kill=kill)
        when = {None: "before", False: "after SIGTERM", True: "after SIGKILL"}[kill]
        first.go(1, f"{when}, first")
        second.go(1, f"{when}, second")


def compaction(stage: Stage) -> None:
    """An old tool result is replaced by a note, as agents do when the context fills."""
    talk = stage.agent()
    for i in range(4):
        call = {"name": "read_file", "arguments": json.dumps({"path": f"part{i}.py"})}
        talk.say(f"Read part{i}.py.")
        made = {"id": f"call_{i}", "type": "function", "function": call}
        talk.messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        text = source(20 + i, stage.desk.sizes.part)
        talk.messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text})
        talk.send(f"result {i + 1}")
        while talk.waits:  # the model calls again: its results are not what this is about
            talk.messages.pop()
            talk.messages[-1].pop("tool_calls", None)
            talk.messages[-1]["content"] = talk.messages[-1]["content"] or "-"
    results = [m for m in talk.messages if m["role"] == "tool"]
    for note in results[1], results[2]:
        note["content"] = "[old tool result cleared]"
        talk.say("What is the capital of France?")
        talk.send("after the edit")


def four_at_once(stage: Stage) -> None:
    """Four agents with one system prompt, at the same time, two rounds."""
    talks = [stage.agent(asked=i) for i in range(4)]
    for i in range(2):
        for talk in talks:
            talk.prepare()
        for talk, reply in zip(talks, stage.desk.ask_all(talks, f"round {i + 1},"), strict=True):
            talk.take(reply)


def same_again(stage: Stage) -> None:
    """One request, three times. Only what follows the prompt's own end may be read again."""
    talk = stage.agent(thinking=True, max_tokens=48)
    talk.prepare()
    for i in range(3):
        stage.desk.ask(talk, f"time {i + 1}")


SCENES: dict[str, Callable[[Stage], None]] = {
    "hot loop of 8 turns": hot_loop,
    "arguments re-serialised": reserialised,
    "title between turns": title_between,
    "two sub-agents": two_sub_agents,
    "undo, ask another": undo,
    "four branches": four_branches,
    "fresh session": fresh_session,
    "reasoning not resent": reasoning_lost,
    "disconnect, continue": disconnect,
    "restart in between": restarted,
    "old tool result edited": compaction,
    "four at once": four_at_once,
    "the same again": same_again,
}
"""In the order of the table. The fourteenth, `/health` during all of it, is `pulse.Pulse`."""
