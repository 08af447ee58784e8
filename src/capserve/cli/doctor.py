"""Would a server start here, and what would it run on?

A list of checks, each with the numbers behind it: versions, processor, memory, the model, its text
files and if it fits, the port. Printed as a table, or as one JSON object for a bug report.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from capserve import __version__
from capserve.cli import machine
from capserve.cli.models import resolve_model
from capserve.config import Settings
from capserve.errors import CapserveError

GIB = 2**30


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing fails for it."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    detail: str


def run_doctor(settings: Settings, *, as_json: bool) -> int:
    """Print every check; returns 1 when one is bad, else 0."""
    found = list(checks(settings))
    healthy = all(check.verdict is not Verdict.BAD for check in found)
    if as_json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in found]}, indent=2))
        return 0 if healthy else 1
    table = Table(box=None, pad_edge=False)
    table.add_column("check", style="bold")
    table.add_column("")
    table.add_column("found")
    colours = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "bold red"}
    for check in found:
        colour = colours[check.verdict]
        table.add_row(check.name, f"[{colour}]{check.verdict}[/]", escape(check.detail))
    console = Console()
    console.print(table)
    console.print("A server would start." if healthy else "A server would not start.")
    return 0 if healthy else 1


def checks(settings: Settings) -> Iterator[Check]:
    yield Check("capserve", Verdict.OK, __version__)
    yield _python()
    yield from _packages()
    yield _processor()
    yield _memory()
    yield from _model(settings)
    yield _capsules(settings)
    yield _port(settings)


def _python() -> Check:
    version = platform.python_version()
    enough = sys.version_info >= (3, 11)
    detail = version if enough else f"{version}, 3.11 or newer is needed"
    return Check("python", Verdict.OK if enough else Verdict.BAD, detail)


def _packages() -> Iterator[Check]:
    for name, version in machine.versions(machine.NEEDED).items():
        verdict = Verdict.BAD if version is None else Verdict.OK
        yield Check(name, verdict, version or "missing")
    optional = machine.versions(machine.OPTIONAL).items()
    installed = ", ".join(f"{name} {version}" for name, version in optional if version)
    yield Check("optional packages", Verdict.OK, installed or "none")


def _processor() -> Check:
    name, features = machine.processor()
    cores = machine.usable_cores()
    detail = f"{name}, {cores} usable cores"
    if features:
        detail += f", {' '.join(features)}"
    return Check("processor", Verdict.OK, detail)


def _memory() -> Check:
    found = machine.memory_bytes()
    if found is None:
        return Check("host memory", Verdict.NOTE, "the system does not tell")
    available, total = found
    detail = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    return Check("host memory", Verdict.OK, detail)


def _model(settings: Settings) -> Iterator[Check]:
    # torch takes a second to import: after the checks that need none of it.
    from capserve.cli.compose import memory_plan, plan_line

    try:
        path, name = resolve_model(settings.model)
    except CapserveError as error:
        yield Check("model", Verdict.BAD, error.message)
        return
    yield Check("model", Verdict.OK, f"{name} in {path}")
    yield _text(settings, path)
    try:
        plan = memory_plan(settings, path)
    except CapserveError as error:
        yield Check("model fit", Verdict.BAD, error.message)
        return
    yield Check("model fit", Verdict.OK if plan.fits else Verdict.BAD, plan_line(plan))


def _text(settings: Settings, path: Path) -> Check:
    """Everything of the checkpoint that a server reads besides the network itself."""
    from capserve.api.state import SamplingDefaults
    from capserve.cli.compose import _end_tokens, read_generation_config
    from capserve.text.prompt import PromptBuilder
    from capserve.text.template import ChatTemplate
    from capserve.text.tokenizer import Tokenizer

    override = None if settings.chat_template is None else Path(settings.chat_template)
    try:
        tokenizer = Tokenizer.from_dir(path)
        prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path, override))
        generation = read_generation_config(path)
        ends = _end_tokens(generation, prompts, tokenizer)
        SamplingDefaults.from_generation_config(generation)
    except CapserveError as error:
        return Check("model text", Verdict.BAD, error.message)
    detail = f"{tokenizer.vocab_size:,} tokens, a chat template, end tokens {list(ends)}"
    return Check("model text", Verdict.OK, detail)


def _capsules(settings: Settings) -> Check:
    """Where a server would keep what outlives it."""
    from capserve.serving.disk.tier import default_capsule_dir

    if settings.disk_budget_bytes == 0:
        return Check("capsules on disk", Verdict.NOTE, "switched off by --disk-budget 0")
    root = default_capsule_dir() if settings.capsule_dir is None else Path(settings.capsule_dir)
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK):
        return Check("capsules on disk", Verdict.BAD, f"{root} can't be written")
    free, wanted = shutil.disk_usage(there).free, settings.disk_budget_bytes
    detail = f"{root}: {free / GIB:.1f} GiB free, {wanted / GIB:.1f} GiB may be taken"
    return Check("capsules on disk", Verdict.OK if free >= wanted else Verdict.NOTE, detail)


def _port(settings: Settings) -> Check:
    where = f"{settings.host}:{settings.port}"
    problem = machine.port_problem(settings.host, settings.port)
    if problem is None:
        return Check("port", Verdict.OK, f"{where} is free")
    return Check("port", Verdict.BAD, f"{where}: {problem}")
