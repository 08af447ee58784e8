"""A whole agent framework runs on the server: pydantic-ai, in each of the three protocols.

The fake engine says what a model would; tools are run on real files, results go back, and the next
request must find the state of the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from agent_models import PROTOCOLS, model
from harness import Replies, Served, fake_engine, serving
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput

from capserve.text.markup import spell_call, spell_parameter

EVERY = pytest.mark.parametrize("protocol", PROTOCOLS)


class Verdict(BaseModel):
    """What a reviewer finds."""

    fine: bool
    worst: Literal["none", "style", "bug"]


def call(tool: str, /, **parameters: str) -> str:
    return spell_call(tool, "".join(spell_parameter(k, v) for k, v in parameters.items()))


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.fixture
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "area.py").write_text("def area(r):\n    return 3 * r + r\n")
    (tmp_path / "notes.md").write_text("# Notizen — größer als π\n")
    return tmp_path


def coder(served: Served, protocol: str, project: Path, **options: Any) -> Agent[None, Any]:
    """An agent that works on the files of `project`."""
    agent: Agent[None, Any] = Agent(
        model(protocol, served.url), instructions="You mend code. Use the tools.", **options
    )

    @agent.tool_plain
    def read_file(name: str) -> str:
        """The text of a file."""
        if not (project / name).is_file():
            raise ModelRetry(f"there is no file {name}")
        return (project / name).read_text()

    @agent.tool_plain
    def write_file(name: str, text: str) -> str:
        """Write a file whole."""
        (project / name).write_text(text)
        return f"{len(text)} characters written"

    return agent


def actions(served: Served) -> list[str]:
    served.worker.wait_idle()
    return [end.metrics.prefix_action or "" for end in served.worker.ends]


MENDED = 'def area(r):\n    """πr²"""\n    return 3.14159 * r * r\n'


def speak(replies: Replies, protocol: str, **said: str) -> None:
    """A reply for each key, whose `_` are blanks. Anthropic's dialect thinks when asked."""
    thinks = "" if protocol == "messages" else "Hm.\n</think>\n\n"
    replies.say |= {key.replace("_", " "): thinks + text for key, text in said.items()}


def script_of_a_mend(replies: Replies, protocol: str) -> None:
    """Two files at once, a file that isn't there, a change, and words."""
    files = "\n".join(call("read_file", name=name) for name in ("area.py", "notes.md"))
    written = call("write_file", name="area.py", text=MENDED)
    speak(
        replies,
        protocol,
        characters_written="`area.py` is right now ✅",
        there_is_no_file=f"Then not that one.\n\n{written}",
        größer_als=call("read_file", name="missing.py"),
        mend_it=f"I look.\n\n{files}",
    )


@EVERY
def test_a_run_calls_its_tools_on_real_files_and_reads_nothing_twice(
    served: Served, replies: Replies, project: Path, protocol: str
) -> None:
    script_of_a_mend(replies, protocol)
    agent = coder(served, protocol, project)
    result = agent.run_sync("mend it")
    assert result.output == "`area.py` is right now ✅"
    assert (project / "area.py").read_text() == MENDED
    assert actions(served) == ["rebuild", *["message_append"] * 3]
    usage = result.usage
    assert usage.requests == 4
    assert usage.tool_calls == 3, "the one that failed is not counted"
    ends = served.worker.ends
    assert usage.input_tokens == sum(end.metrics.prompt_tokens for end in ends)
    assert usage.cache_read_tokens == sum(end.metrics.cached_tokens for end in ends)
    assert usage.output_tokens == sum(end.metrics.output_tokens for end in ends)


@EVERY
def test_a_second_run_goes_on_where_the_first_ended(
    served: Served, replies: Replies, project: Path, protocol: str
) -> None:
    speak(replies, protocol, and_now="Nothing is left to do.", first="Done.")
    agent = coder(served, protocol, project)
    first = agent.run_sync("first")
    second = agent.run_sync("and now?", message_history=first.all_messages())
    assert second.output == "Nothing is left to do."
    served.worker.wait_idle()
    begun, gone_on = (end.metrics for end in served.worker.ends)
    assert gone_on.prefix_action in ("message_append", "truncate")
    assert gone_on.new_prefill_tokens < begun.prompt_tokens / 4


@EVERY
def test_a_streamed_run_tells_words_as_they_come_and_runs_tools_between(
    served: Served, replies: Replies, project: Path, protocol: str
) -> None:
    script_of_a_mend(replies, protocol)
    agent = coder(served, protocol, project)

    async def hear() -> tuple[list[str], list[str]]:
        kinds, deltas = [], []
        async with agent.run_stream_events("mend it") as events:
            async for event in events:
                kinds.append(event.event_kind)
                if event.event_kind == "part_delta" and event.delta.part_delta_kind == "text":
                    deltas.append(event.delta.content_delta)
        return kinds, deltas

    kinds, deltas = asyncio.run(hear())
    assert kinds.count("function_tool_result") == 4
    assert kinds[-1] == "agent_run_result"
    assert len(deltas) >= 3
    assert "".join(deltas).endswith("is right now ✅")
    assert actions(served) == ["rebuild", *["message_append"] * 3]


@EVERY
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_an_output_type_is_what_comes_back(
    served: Served, replies: Replies, protocol: str, form: Any
) -> None:
    """As a call that is demanded, or as JSON of a schema. The fake would rather chat."""
    agent: Agent[None, Any] = Agent(
        model(protocol, served.url, max_tokens=600), output_type=form(Verdict), retries=0
    )
    verdict = agent.run_sync("review it").output
    assert isinstance(verdict, Verdict)
    assert len(served.worker.items) == 1, "at the first try"


@EVERY
def test_an_agent_that_hands_over_to_another_finds_its_own_state_again(
    served: Served, replies: Replies, project: Path, protocol: str
) -> None:
    speak(
        replies,
        protocol,
        a_word_of_the_reviewer="It is mended, and reviewed.",
        look_at_it="a word of the reviewer: good",
        have_it_reviewed=call("review", what="look at it"),
    )
    reviewer: Agent[None, str] = Agent(model(protocol, served.url), instructions="You review.")
    agent = coder(served, protocol, project)

    @agent.tool_plain
    async def review(what: str) -> str:
        """Ask the reviewer."""
        return (await reviewer.run(what)).output

    result = agent.run_sync("have it reviewed")
    assert result.output == "It is mended, and reviewed."
    first, other, back = actions(served)
    assert (first, other) == ("rebuild", "rebuild")
    assert back in ("message_append", "restore")
    metrics = served.worker.ends[-1].metrics
    assert metrics.new_prefill_tokens < 40, "its own conversation, but for the tool's result"


@EVERY
def test_a_run_that_is_cancelled_in_a_stream_ends_its_turn(replies: Replies, protocol: str) -> None:
    speak(replies, protocol, talk="word " * 900)
    engine = fake_engine(replies)
    with serving(engine) as served:
        agent: Agent[None, str] = Agent(model(protocol, served.url))

        async def leave() -> None:
            gate = engine.hold("step", at=20)
            async with agent.run_stream("talk") as running:
                async for _ in running.stream_text(delta=True, debounce_by=None):
                    break
                gate.wait_arrived()
                await running.cancel()
            served.worker.wait_cancelled(served.worker.items[0])
            gate.open()
            served.worker.wait_idle()
            assert engine.calls("step") == 20
            assert (await agent.run("hello")).output == "I heard: hello"

        asyncio.run(leave())
