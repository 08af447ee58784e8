"""Runs the agents one after the other and says what each of them met. See the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.card import card, write
from benchmarks.clients.agents import AGENTS
from benchmarks.clients.install import install
from benchmarks.clients.trial import Account, Turn, play
from benchmarks.scenarios.server import OwnServer, leave_no_server_behind

OUTPUT_TOKENS = 512
"""The server's limit. Under a prompt too long for it, nano may repeat itself without end."""

COLUMNS = (
    *("agent", "version", "dialect", "exit codes", "s", "requests", "calls made", "tool ran"),
    *("tokens reused", "read", "written", "complaints"),
)


def table(accounts: Sequence[Account]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for account in accounts:
        requests = account.requests
        calls = Counter(name for request in requests for name in request.calls)
        statuses = Counter(f"{r.status} {r.path}" for r in requests)
        cells = (
            account.agent,
            account.version,
            account.dialect,
            ", ".join(_code(turn) for turn in account.turns),
            f"{sum(turn.seconds for turn in account.turns):.0f}",
            ", ".join(f"{n} x {what}" for what, n in statuses.items()),
            ", ".join(f"{n} x {name}" for name, n in calls.items()) or "none",
            f"{sum(turn.worked for turn in account.turns)} of {len(account.turns)}",
            f"{sum(r.cached_tokens for r in requests):,}",
            f"{sum(r.read_tokens for r in requests):,}",
            f"{sum(r.written_tokens for r in requests):,}",
            "; ".join(account.complaints) or "none",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(turn: Turn) -> str:
    return "late" if turn.exit_code is None else str(turn.exit_code)


def verdict(accounts: Sequence[Account]) -> list[str]:
    """What does not hold. An agent must do its tasks in one of its forms; all must be clean."""
    wrong = [f"{a.agent}: {complaint}" for a in accounts for complaint in a.complaints]
    names = dict.fromkeys(a.agent.split()[0] for a in accounts)
    done = {a.agent.split()[0] for a in accounts if a.worked}
    idle = [f"{a.agent}: sent no request" for a in accounts if not a.requests]
    return [
        *wrong,
        *idle,
        *(f"{name}: no tool ran in every task" for name in names if name not in done),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="agents by name")
    parser.add_argument("--threads", type=int, default=2, help="of the server")
    options = parser.parse_args()
    leave_no_server_behind()
    chosen = [a for a in AGENTS if not options.only or a.name in options.only]
    with tempfile.TemporaryDirectory(
        prefix="capserve-clients-", ignore_cleanup_errors=True
    ) as place:
        folder = Path(place)
        programs = install(chosen, folder / "programs")
        settings = {"threads": options.threads, "max_output_tokens": OUTPUT_TOKENS}
        accounts = []
        with OwnServer(settings) as server:
            root = server.url.removesuffix("/v1")
            for number, agent in enumerate(chosen):
                account = play(agent, programs, root, folder / str(number))
                accounts.append(account)
                print(f"\n== {account.agent} {account.version}", flush=True)
                for turn in account.turns:
                    print(
                        f"\n$ {turn.command}\n{turn.printed.strip()}\n[exit {_code(turn)}]",
                        flush=True,
                    )
    print(f"\n{table(accounts)}\n")
    for account in accounts:
        if account.elsewhere:
            print(f"{account.agent} asked elsewhere, in vain: {', '.join(account.elsewhere)}")
    wrong = verdict(accounts)
    print("\n".join(wrong) or "No complaints.")
    result: dict[str, Any] = {"accounts": [asdict(a) for a in accounts], "wrong": wrong}
    write("clients", {"card": card(options.threads), **result, "holds": not wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
