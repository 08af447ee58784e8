"""Can a person see in a minute that reuse works, and that it changes nothing?

A real server, a real agent on the official SDK, tools that really run in a temporary folder:
several turns, a side request, a branch, a restarted client, a retry. Then every reply is checked
against a cold run. Exit code 0: something was reused, and every reply was the one a cold run gives.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from capserve.cli.cold_check import Outcome, Verdict, check, lost_text
from capserve.cli.compose import Running, load_engine, serving
from capserve.cli.workbench import TOOLS, Workbench
from capserve.config import Settings
from capserve.engine.seam import MAX_TOP_LOGPROBS, Engine, Sampling
from capserve.errors import StartupError
from capserve.text.tokenizer import Tokenizer

try:
    from openai import OpenAI

    from capserve.cli.agent import Conversation, Exchange
except ModuleNotFoundError as error:
    raise StartupError(
        f"the demo needs the package {error.name}: pip install 'capserve[demo]'"
    ) from None

SYSTEM = "You are a coding agent. Keep answers short."
FIX = "The tests fail. Please find and fix the bug in stats.py."
PORT = "Change the port to 9090 in config.toml."
LIST = "List the files here."
WRITE = "Create a file utils.py with a function called clip to limit a value to a range."
READ = "Read config.toml and tell me the port."
SIDE = "Make a bullet list of: run the tests, fix stats.py, set the port"
"""Small talk beside the agent's own session, as clients send for titles and summaries."""


def run_demo(settings: Settings) -> int:
    """Play the conversation, check it, print the table; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="capserve-demo-") as folder:
        bench = Workbench(Path(folder))
        with serving(settings, console) as server:
            console.print(f"An agent works in {folder}, served at {server.url}.\n", markup=False)
            exchanges = _Play(console, server, bench).run()
        tests = bench.call("run_shell", json.dumps({"command": "pytest"}))
    last_line = tests.splitlines()[-1]
    console.print(f"\nThe folder's own tests, run once more: {last_line}\n", markup=False)
    verdicts = _check_all(console, settings, server, exchanges)
    console.print(_table(exchanges, verdicts))
    return judge(console, exchanges, verdicts)


class _Play:
    """The script of the demo: who says what, in which order."""

    def __init__(self, console: Console, server: Running, bench: Workbench) -> None:
        self._console, self._server, self._bench = console, server, bench
        model = server.assembly.state.model
        drafts = min(model.default_drafts, model.max_drafts)
        self._greedy = Sampling(drafts=drafts, end_tokens=model.end_tokens)
        self._exchanges: list[Exchange] = []

    def run(self) -> list[Exchange]:
        main = self._start([{"role": "system", "content": SYSTEM}])
        self._ask(main, "fix the bug", FIX)
        fork = list(main.messages)

        side = self._start([{"role": "user", "content": SIDE}])
        side.tools, side.thinking = [], False
        self._head("side request", SIDE)
        self._show(side.request("side request"))

        self._ask(main, "next turn", PORT)

        branch = self._start(fork)
        self._ask(branch, "branch", LIST)

        # A restarted client has nothing but the history that it saved.
        saved = json.dumps(main.messages)
        restarted = self._start(json.loads(saved))
        restarted.thinking = False
        self._ask(restarted, "client restart", WRITE)

        restarted.sampling = replace(self._greedy, temperature=0.7, top_p=0.9, seed=7)
        self._ask(restarted, "sampled turn", READ)
        del restarted.messages[-1]
        self._head("retry", "the same request again")
        self._show(restarted.request("retry"))
        return self._exchanges

    def _start(self, messages: list[dict[str, Any]]) -> Conversation:
        """A conversation with an SDK client of its own."""
        client = OpenAI(base_url=self._server.url, api_key="none", max_retries=0)
        name = self._server.assembly.name
        return Conversation(client, name, self._greedy, messages, TOOLS)

    def _ask(self, conversation: Conversation, label: str, question: str) -> None:
        self._head(label, question)
        conversation.ask(label, question, self._run_tool, self._show)

    def _head(self, label: str, question: str) -> None:
        self._console.print(f"[bold cyan]{label}[/]  {question}")

    def _show(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        message = exchange.message
        if thought := message.get("reasoning_content", "").strip():
            self._console.print(f"  {thought}", style="dim italic", markup=False)
        if content := message.get("content", "").strip():
            self._console.print("  " + content.replace("\n", "\n  "), markup=False)

    def _run_tool(self, name: str, arguments: str) -> str:
        answer = self._bench.call(name, arguments)
        first, *rest = answer.splitlines() or [""]
        more = f" (+{len(rest)} lines)" if rest else ""
        self._console.print(f"  {name}{arguments} -> {first}{more}", style="yellow", markup=False)
        return answer


def _check_all(
    console: Console, settings: Settings, server: Running, exchanges: list[Exchange]
) -> list[Verdict]:
    state = server.assembly.state
    with console.status("checking every reply against a cold run"):
        cold = load_engine(settings, server.assembly.path, state.tokenizer.vocab_size)
        return [_check(cold, state.tokenizer, each) for each in exchanges]


def _check(cold: Engine, tokenizer: Tokenizer, exchange: Exchange) -> Verdict:
    text = b"".join(tokenizer.token_bytes(token) for token in exchange.prompt).decode()
    lost = lost_text(text, exchange.sent)
    if lost is not None:
        return Verdict(Outcome.LOST, lost=lost)
    return check(cold, exchange.prompt, exchange.output, exchange.sampling)


COLOURS = {
    Outcome.EXACT: "green",
    Outcome.NEAR_TIE: "yellow",
    Outcome.DIFFERS: "bold red",
    Outcome.LOST: "bold red",
}


def _table(exchanges: list[Exchange], verdicts: list[Verdict]) -> Table:
    table = Table(
        title="Turns", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("#", justify="right")
    table.add_column("what")
    table.add_column("action")
    for name in ("prompt", "cached", "new", "TTFT ms", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("cold run")
    for i, (each, verdict) in enumerate(zip(exchanges, verdicts, strict=True), 1):
        metrics = each.metrics
        speed = metrics["decode_tok_per_s"]
        table.add_row(
            str(i),
            each.label,
            metrics["prefix_action"],
            str(len(each.prompt)),
            str(each.cached_tokens),
            str(metrics["new_prefill_tokens"]),
            f"{each.first_chunk_ms:.0f}",
            "-" if speed is None else f"{speed:.0f}",
            f"[{COLOURS[verdict.outcome]}]{verdict.outcome}[/]",
        )
    return table


def judge(console: Console, exchanges: list[Exchange], verdicts: list[Verdict]) -> int:
    """Say what was shown, and fail unless it was reuse without a difference."""
    total = sum(len(each.prompt) for each in exchanges)
    cached = sum(each.cached_tokens for each in exchanges)
    console.print(f"\n{cached} of {total} prompt tokens were not read again.")
    for i, verdict in enumerate(verdicts, 1):
        if verdict.outcome is not Outcome.EXACT:
            console.print(f"turn {i}: {_explain(verdict)}", markup=False)
    counts = {outcome: sum(v.outcome is outcome for v in verdicts) for outcome in Outcome}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".")
    if counts[Outcome.DIFFERS] or counts[Outcome.LOST]:
        console.print("FAILED: reuse changed an answer.", style="bold red")
        return 1
    if cached == 0:
        console.print("FAILED: nothing was reused.", style="bold red")
        return 1
    console.print("Every reuse was token-exact against a cold run.", style="bold green")
    return 0


def _explain(verdict: Verdict) -> str:
    if verdict.lost is not None:
        return f"the prompt lacks a text that was sent: {verdict.lost[:60]!r}"
    if verdict.margin is None:
        return f"the cold run ends at token {verdict.at}, the reply goes on"
    if math.isinf(verdict.margin):
        return (
            f"{verdict.outcome} at token {verdict.at}, where the reply's token is not among the "
            f"cold run's {MAX_TOP_LOGPROBS} most likely"
        )
    return (
        f"{verdict.outcome} at token {verdict.at}, where the cold run scores its own token "
        f"{verdict.margin:.2e} above the reply's"
    )
