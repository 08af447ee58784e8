"""The doctor's verdict is what a server would meet."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from capserve.cli import machine
from capserve.cli.doctor import run_doctor
from capserve.config import load_settings


def report(capsys: pytest.CaptureFixture[str], **flags: Any) -> tuple[int, dict[str, Any]]:
    code = run_doctor(load_settings({"port": "0", **flags}), as_json=True)
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] == (code == 0)
    return code, {check["name"]: check for check in body["checks"]}


def test_a_machine_that_runs_these_tests_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = report(capsys)
    assert code == 0
    assert {"python", "torch", "processor", "host memory", "model", "port"} <= checks.keys()
    assert "MiB available" in checks["model fit"]["detail"]


def test_a_model_that_does_not_fit_is_bad_with_both_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, checks = report(capsys, capsule_budget_bytes="900TiB")
    assert code == 1
    assert checks["model fit"]["verdict"] == "bad"
    assert "capsules 943,718,400" in checks["model fit"]["detail"]


def test_a_missing_model_is_bad_and_the_other_checks_still_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, checks = report(capsys, model="/no/such/model")
    assert code == 1
    assert checks["model"]["verdict"] == "bad"
    assert checks["port"]["verdict"] == "ok"


def test_a_taken_port_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, checks = report(capsys, port=str(port))
    assert code == 1
    assert str(port) in checks["port"]["detail"]


def test_the_table_says_the_verdict_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(load_settings({"port": "0"}), as_json=False) == 0
    assert "A server would start." in capsys.readouterr().out


def test_a_missing_package_has_no_version() -> None:
    assert machine.versions(("numpy", "no-such-package-here"))["no-such-package-here"] is None


def test_memory_and_cores_are_those_of_this_process() -> None:
    found = machine.memory_bytes()
    assert found is None or 0 < found[0] <= found[1]
    assert machine.usable_cores() >= 1
