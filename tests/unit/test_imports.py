"""I10: do the import contracts hold, and does each of them notice when it is broken?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "pyproject.toml"
CONTRACTS = [
    contract["name"]
    for contract in tomllib.loads(CONFIG.read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
]

PLANTED = {
    "imports point from cli to api to serving to engine, never back": (
        "serving/limits.py",
        "import capserve.api.errors",
    ),
    "only the engine imports torch": ("serving/rates.py", "import torch"),
    "only the api imports FastAPI": ("serving/worker.py", "import fastapi"),
    "serving and api see of the engine its seam file alone": (
        "api/state.py",
        "import capserve.engine.runtime",
    ),
    "text does no I/O on the wire and knows no engine": (
        "text/stops.py",
        "import capserve.engine.seam",
    ),
}
"""For each contract a file below src/capserve, and the import that must not stand in it."""


def check(source: Path) -> tuple[int, list[str], str]:
    """Exit status, names of the broken contracts, and all that was printed."""
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run(
        [sys.executable, "-c", script, "--no-cache", "--config", str(CONFIG)],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    lines = result.stdout.splitlines()
    broken = [name for name in CONTRACTS if f"{name} BROKEN" in lines]
    return result.returncode, broken, result.stdout + result.stderr


def test_imports_point_from_cli_to_api_to_serving_to_engine() -> None:
    status, broken, said = check(ROOT / "src")
    assert status == 0, said
    assert not broken
    assert f"{len(CONTRACTS)} kept, 0 broken" in said


def test_every_contract_has_a_planted_violation() -> None:
    assert set(PLANTED) == set(CONTRACTS)


@pytest.mark.parametrize("contract", PLANTED)
def test_a_forbidden_import_breaks_its_contract_and_no_other(contract: str, tmp_path: Path) -> None:
    file, line = PLANTED[contract]
    source = tmp_path / "src"
    # Modules only: the checkpoint is large, and imports are all that is read.
    modules = ROOT / "src" / "capserve"
    for module in modules.rglob("*.py"):
        copy = source / "capserve" / module.relative_to(modules)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, copy)
    with (source / "capserve" / file).open("a", encoding="utf-8") as end:
        end.write(f"\n{line}\n")
    status, broken, said = check(source)
    assert status == 1, said
    assert broken == [contract], said
