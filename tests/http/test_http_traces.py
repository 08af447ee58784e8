"""Does what real agent clients send get replies that their SDKs read, and is none of it read twice?

`client_shapes.py` has conversations in each client's form; recordings of the clients themselves are
used where they are found beside the repository. `replay.py` holds each reply to the promises.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from client_shapes import SHAPES
from live_talks import Messages
from replay import as_recorded, replay, with_one_call_more, without_calls

Json = dict[str, Any]

BESIDE = Path(__file__).resolve().parents[2].parent / "shared"
TRACES = Path(os.environ.get("CAPSERVE_SHARED", BESIDE)) / "traces"
RECORDINGS = {f"{file.parent.name}/{file.stem}": file for file in sorted(TRACES.glob("*/*.jsonl"))}
NONE = "no recordings"
"""Stands in the place of the recordings where there are none, and is skipped."""

TWISTS = pytest.mark.parametrize("twist", [as_recorded, with_one_call_more, without_calls])


def recorded(name: str) -> list[Json]:
    if name == NONE:
        pytest.skip(f"no {TRACES}: CAPSERVE_SHARED can name the folder that has traces/")
    return [json.loads(line) for line in RECORDINGS[name].read_text("utf-8").splitlines()]


@TWISTS
@pytest.mark.parametrize("name", SHAPES)
def test_a_clients_conversation_is_answered_and_nothing_is_read_twice(
    name: str, twist: Any
) -> None:
    records = SHAPES[name].records()
    for telling, replies in replay(records, twist):
        assert len(replies) == len(records)
        appended = [said.record["prefix_action"] == "message_append" for said in replies]
        if twist is not without_calls:  # words of the user make the template drop old thinking
            assert sum(appended) >= 3, "a conversation that goes on is taken up where it stands"
        if twist is as_recorded and not isinstance(telling.dialect, Messages):
            assert_as_recorded(telling.histories, records)


@TWISTS
@pytest.mark.parametrize("name", RECORDINGS or [NONE])
def test_a_recorded_conversation_is_answered_and_nothing_is_read_twice(
    name: str, twist: Any
) -> None:
    records = recorded(name)
    for telling, replies in replay(records, twist):
        assert len(replies) == len(records)
        if twist is as_recorded and not isinstance(telling.dialect, Messages):
            assert_as_recorded(telling.histories, records)


@pytest.mark.parametrize("name", ["pi", "codex", "claude-code"])
def test_the_bound_notices_a_server_that_reads_everything_again(name: str) -> None:
    def nothing_in_common(number: int) -> Json:
        return {"cache_salt": f"salt {number}", "prompt_cache_key": None}

    with pytest.raises(AssertionError, match=r"\d+ tokens read, \d+ were new"):
        replay(SHAPES[name].records(), fields=nothing_in_common)


def assert_as_recorded(histories: list[list[Json]], records: list[Json]) -> None:
    """With the recorded replies, a history is the recorded one, but for ids and spaces."""
    sent = [record["body"].get("messages") or record["body"]["input"] for record in records]
    told = sorted(json.dumps([_meaning(part) for part in history]) for history in histories)
    assert told == sorted(json.dumps([_meaning(part) for part in history]) for history in sent)


def _meaning(part: Any) -> Any:
    if isinstance(part, list):
        return [_meaning(one) for one in part]
    if isinstance(part, str):
        return part.strip()
    if not isinstance(part, dict):
        return part
    kept = {k: v for k, v in part.items() if k not in ("id", "call_id", "tool_call_id")}
    if isinstance(arguments := kept.get("arguments"), str):
        kept["arguments"] = json.loads(arguments)
    return {key: _meaning(kept[key]) for key in sorted(kept)}
