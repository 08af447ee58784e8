"""How many prompt tokens does a server read again over agent-like traffic?

Fourteen scenes against any OpenAI-compatible server (`--base-url`), or against capserve on the
embedded model in a process of its own. For each request: the prompt's tokens, what an ideal server
would have had to read (`scenarios/ledger.py` says what that is), and what this one read:
`prompt_tokens - cached_tokens` of its usage. Exit code 1 when a scene reads more than
1.05 x ideal + one checkpoint interval for each branch point.

After a prompt's end, before the reply, stand the few tokens of the generation prompt (5 to 7 on the
embedded model). capserve keeps the state before them, so that a resent prompt reads them again;
they count as read.

A server that shows no token ids (`return_token_ids`) is judged by an estimate from characters, `~`
in the table; it can say that a bound holds, and never that one is broken: only token ids show what
the template drops, such as reasoning.

A foreign server that is to be restarted needs `--restart-command`: a shell command that ends it by
the signal in $CAPSERVE_BENCH_SIGNAL (TERM or KILL) and starts it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import httpx

from benchmarks.card import card, write
from benchmarks.scenarios.client import Desk, Sizes
from benchmarks.scenarios.ledger import Account, Row, account
from benchmarks.scenarios.plays import SCENES, Stage
from benchmarks.scenarios.pulse import Pulse
from benchmarks.scenarios.server import ForeignServer, OwnServer, Server, leave_no_server_behind

INTERVAL_TOKENS = 2048
"""capserve's default; another server's is for the user to say."""
HEALTH_P99_MS = 50.0


def play(
    server: Server,
    *,
    model: str | None = None,
    api_key: str = "-",
    interval: int = INTERVAL_TOKENS,
    sizes: Sizes | None = None,
    only: Iterable[str] = SCENES,
    salt: str = "reuse",
    plain: bool = False,
) -> dict[str, Any]:
    """Play the scenes; returns rows, sums by scene, and the pulse (None without `/health`)."""
    desk = Desk(server.url, model, api_key, sizes or Sizes(), salt, plain=plain)
    root = server.url.removesuffix("/v1")
    pulse = Pulse(root) if _has_health(root) else None
    skipped = {}
    if pulse is not None:
        pulse.start()
    try:
        stage = Stage(desk, server, nullcontext if pulse is None else pulse.paused)
        for name in only:
            if name == "restart in between" and not server.can_restart:
                skipped[name] = "needs --restart-command"
                continue
            desk.scene = name
            SCENES[name](stage)
    finally:
        if pulse is not None:
            pulse.stop()
        desk.close()
    played = [name for name in only if name not in skipped]
    accounts = {
        name: account([row for row in desk.rows if row.scene == name], interval) for name in played
    }
    return {
        "interval_tokens": interval,
        "rows": desk.rows,
        "accounts": accounts,
        "skipped": skipped,
        "health": None if pulse is None else pulse.report(),
    }


def verdict(sums: Account) -> str:
    if sums.estimated and not sums.holds:
        return "unknown"  # an estimate can acquit, not convict
    return {None: "unknown", True: "holds", False: "BROKEN"}[sums.holds]


def health_holds(report: dict[str, Any] | None, p99_ms: float) -> bool:
    return report is None or (report["failures"] == 0 and report["p99_ms"] <= p99_ms)


def table(result: dict[str, Any], p99_ms: float) -> str:
    lines = [
        "| # | scene | requests | prompt | ideal | actual | branch points | bound | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, name in enumerate(SCENES, 1):
        if name in result["skipped"]:
            lines.append(f"| {number} | {name} | | | | | | | {result['skipped'][name]} |")
        if name not in result["accounts"]:
            continue
        sums: Account = result["accounts"][name]
        about = "~" if sums.estimated else ""
        actual = "unknown" if sums.actual is None else f"{sums.actual:,}"
        lines.append(
            f"| {number} | {name} | {sums.requests} | {sums.prompt:,} | {about}{sums.ideal:,} "
            f"| {actual} | {sums.branch_points} | {sums.bound:,} | {verdict(sums)} |"
        )
    health = result["health"]
    said = "no /health here"
    if health is not None:
        said = (
            f"{health['polls']} polls, {health['failures']} failed, p50 {health['p50_ms']:.1f}, "
            f"p99 {health['p99_ms']:.1f}, max {health['max_ms']:.1f} ms"
        )
    holds = "holds" if health_holds(health, p99_ms) else "BROKEN"
    lines.append(f"| {len(SCENES) + 1} | health during all of it: {said} | | | | | | | {holds} |")
    return "\n".join(lines)


def details(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        actual = "?" if row.actual is None else row.actual
        branch = "" if row.branch_at is None else f" branch at {row.branch_at}"
        why = f" {row.action or ''} {row.miss or ''}".rstrip()
        lines.append(
            f"  {row.scene:24} {row.label:24} prompt {row.prompt:6} ideal {row.ideal:6} "
            f"actual {actual:>6}{why}{branch}"
        )
    return "\n".join(lines)


def _has_health(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--restart-command")
    parser.add_argument(
        "--plain", action="store_true", help="send OpenAI's own fields only; the ideal is estimated"
    )
    parser.add_argument("--interval", type=int, default=INTERVAL_TOKENS)
    parser.add_argument("--health-p99-ms", type=float, default=HEALTH_P99_MS)
    parser.add_argument("--threads", type=int, default=2, help="of the own server")
    parser.add_argument("--only", type=int, nargs="*", help="scenes by number")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each request")
    options = parser.parse_args()
    leave_no_server_behind()
    names = list(SCENES)
    only = names if options.only is None else [names[number - 1] for number in options.only]
    with ExitStack() as stack:
        server: Server
        salt = "reuse"
        if options.base_url is None:
            own = {"threads": options.threads, "checkpoint_interval": options.interval}
            server = stack.enter_context(OwnServer(own))
        else:
            server = ForeignServer(options.base_url, options.restart_command)
            salt = uuid4().hex  # a server that ran before must not know these texts
        result = play(
            server,
            model=options.model,
            api_key=options.api_key,
            interval=options.interval,
            only=only,
            salt=salt,
            plain=options.plain,
        )
    if options.verbose:
        print(details(result["rows"]))
    print(table(result, options.health_p99_ms))
    accounts: dict[str, Account] = result["accounts"]
    holds = health_holds(result["health"], options.health_p99_ms) and not any(
        verdict(sums) == "BROKEN" for sums in accounts.values()
    )
    rows = [asdict(row) for row in result["rows"]]
    sums = {name: {**asdict(s), "verdict": verdict(s)} for name, s in accounts.items()}
    write(
        "reuse",
        {"card": card(options.threads), **result, "rows": rows, "accounts": sums, "holds": holds},
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
