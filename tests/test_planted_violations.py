"""Does each invariant have a test that fails when it is broken? Breaks them, one by one, in a copy.

The copy keeps the compiled kernels between runs, so it is made once and patched in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.planted import IMPORT_CONTRACTS, PLANTED, Edit, Planted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
INVARIANTS = {f"I{number}" for number in range(1, 17)}

TESTS_FAILED = 1
"""pytest's exit status for failed tests; one that was not found or did not load has another."""

TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, to be put first on the import path."""
    source = tmp_path_factory.mktemp("planted") / "src"
    shutil.copytree(
        ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    return source


@contextmanager
def applied(edits: tuple[Edit, ...], source: Path) -> Iterator[None]:
    """The copy with these edits, as it was before once the block ends."""
    before: dict[Path, str] = {}
    try:
        for edit in edits:
            file = source / "capserve" / edit.file
            text = file.read_text(encoding="utf-8")
            before.setdefault(file, text)
            found = text.count(edit.old)
            assert found == 1, f"{edit.file} has {edit.old!r} {found} times, 1 is needed"
            file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
        yield
    finally:
        for file, text in before.items():
            file.write_text(text, encoding="utf-8")


def run(source: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    # Bytecode is told by size and second: within one second a patched file can look unpatched.
    env = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_tests(source: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    names = [f"tests/{test}" for test in tests]
    return run(source, ["-m", "pytest", "-q", "-x", "--timeout", "120", *names])


def check_imports(source: Path) -> subprocess.CompletedProcess[str]:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return run(source, ["-c", script, "--no-cache", str(ROOT / "pyproject.toml")])


def test_every_invariant_has_a_planted_violation() -> None:
    assert {planted.invariant for planted in PLANTED} == INVARIANTS


def test_the_named_tests_pass_on_an_unpatched_copy(copy: Path) -> None:
    where = run(copy, ["-c", "import capserve; print(capserve.__file__)"])
    assert where.stdout.startswith(str(copy)), "the copy is not what is imported"
    imports = check_imports(copy)
    assert imports.returncode == 0, imports.stdout
    tests = sorted({planted.test for planted in PLANTED} - {IMPORT_CONTRACTS})
    result = run_tests(copy, tests)
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.parametrize(
    "planted", PLANTED, ids=lambda planted: f"{planted.invariant}: {planted.violation}"
)
def test_a_planted_violation_fails_its_test(planted: Planted, copy: Path) -> None:
    with applied(planted.edits, copy):
        if planted.test == IMPORT_CONTRACTS:
            result = check_imports(copy)
            assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-2000:]
            assert "BROKEN" in result.stdout
        else:
            result = run_tests(copy, [planted.test])
            assert result.returncode == TESTS_FAILED, result.stdout[-4000:] + result.stderr[-2000:]
