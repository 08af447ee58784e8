"""What did the reuse tests of all processes compare? Printed at the end of a run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.reuse.ledger import account_of


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its account to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["reuse_ledger"] = pickle.dumps(account_of(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    data = getattr(node, "workeroutput", {}).get("reuse_ledger")
    if data is not None:  # our own worker's bytes
        account_of(node.config).add(pickle.loads(data))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    account = account_of(terminalreporter.config)
    if account.tokens:
        terminalreporter.section("state reuse against cold runs")
        for line in account.lines():
            terminalreporter.write_line(line)
