"""The demo, as a person runs it: real server, real SDK, real tools, every reply checked cold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from capserve.cli.demo import run_demo
from capserve.config import load_settings


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_demo_reuses_and_every_reply_is_the_cold_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code = run_demo(load_settings({"threads": "1"}))
    out = capsys.readouterr().out
    assert code == 0, out
    assert "2 passed" in out, "the agent did not fix the bug"
    assert "0 differs, 0 text lost" in out
    for label in ("side request", "next turn", "branch", "client restart", "sampled turn", "retry"):
        assert label in out
