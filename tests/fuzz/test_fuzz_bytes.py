"""A small share of the byte fuzz, and the smallest inputs of what it has found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from capserve.api.relay import Prepared
from capserve.api.state import ServerState
from capserve.errors import EngineError, InvalidRequestError
from tests.fuzz import seeds
from tests.fuzz.run_bytes import WEIGHTS, signature
from tests.fuzz.targets import ServerFaultError, Stage, Target, output, stage, told

CHANGES = 60
"""Of each target here; `make fuzz-bytes` runs for an hour."""


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.fixture(scope="module")
def targets(running: Stage) -> Mapping[str, Target]:
    return running.targets()


def test_the_long_run_has_every_target(targets: Mapping[str, Target]):
    assert targets.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_changed_input_breaks_the_property_of_its_target(
    targets: Mapping[str, Target], name: str
):
    target, rng = targets[name], random.Random(name)
    found = target.seeds()
    for data in rng.sample(found, min(8, len(found))):
        target.run(data)
    for _ in range(CHANGES):
        data = rng.choice(found)
        for _ in range(rng.choice((1, 1, 2, 3))):
            data = target.change(data, rng)
        target.run(data[: target.max_bytes])


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", **fields}


FOUND = {
    # The response that shows its tools again could not be written: a 500.
    "tools that can be read and not be written": (
        "responses",
        {"input": "x", "tools": [_tool(parameters=_deep(300))]},
    ),
    "an item that can be read and not be written": (
        "responses",
        {"input": [{"role": "user", "content": "x", "more": _deep(300)}]},
    ),
    # A kind of tool that is no text was looked up in a set: a 500.
    "an allowed tool whose type is an object": (
        "responses",
        {
            "input": "x",
            "tools": [_tool()],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": {}, "name": "f"}],
            },
        },
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_is_found_no_more(targets: Mapping[str, Target], what: str):
    name, body = FOUND[what]
    targets[name].run(json.dumps(body).encode())


# -- the property can fail ------------------------------------------------------------------------


def test_a_refusal_that_is_our_own_fault_is_a_finding():
    with pytest.raises(ServerFaultError):
        told(EngineError("broken"))
    told(InvalidRequestError("yours"))


def test_a_parser_that_raises_something_else_is_a_finding(running: Stage):
    def broken(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
        raise KeyError("messages")

    with pytest.raises(KeyError) as caught:
        running.turn(broken, b"{}")
    assert signature(caught.value).startswith("KeyError")


def test_a_reply_that_depends_on_its_cuts_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    text = seeds.replies()[0]
    output(text)
    monkeypatch.setattr("capserve.text.channels.unfinished", lambda *_: 0)
    with pytest.raises(AssertionError):
        _read_all()


def _read_all() -> None:
    for reply in seeds.replies():
        output(reply)
