"""The demo's tools really work in their folder, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capserve.cli.workbench import PROJECT, TOOLS, Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("outside")
    return Workbench(folder)


def call(bench: Workbench, name: str, **arguments: str) -> str:
    return bench.call(name, json.dumps(arguments))


def test_reading_and_listing_show_the_project(bench: Workbench) -> None:
    assert call(bench, "list_dir", path=".").split() == sorted(PROJECT)
    assert call(bench, "read_file", path="stats.py") == PROJECT["stats.py"]


def test_fixing_the_bug_turns_the_tests_green(bench: Workbench) -> None:
    red = call(bench, "run_shell", command="pytest")
    assert "1 failed, 1 passed" in red
    assert "test_stats.py::test_mean - assert 3.0 == 2" in red
    edit = call(
        bench, "edit_file", path="stats.py", old_string="(len(xs) - 1)", new_string="len(xs)"
    )
    assert edit == "OK"
    assert "2 passed" in call(bench, "run_shell", command="python -m pytest")


def test_writing_makes_folders_and_replaces_files(bench: Workbench) -> None:
    assert call(bench, "write_file", path="a/b.py", content="x = 1") == "OK"
    assert (bench.folder / "a" / "b.py").read_text() == "x = 1\n"
    assert call(bench, "write_file", path="a/b.py", content="x = 2\n") == "OK"
    assert call(bench, "run_shell", command="cat a/b.py") == "x = 2"


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "a/../../secret.txt", "link"])
def test_no_tool_leaves_the_folder(bench: Workbench, path: str) -> None:
    (bench.folder / "link").symlink_to(bench.folder.parent / "secret.txt")
    for answer in (
        call(bench, "read_file", path=path),
        call(bench, "list_dir", path=path),
        call(bench, "write_file", path=path, content="x"),
        call(bench, "edit_file", path=path, old_string="o", new_string="x"),
        call(bench, "run_shell", command=f"cat {path}"),
    ):
        assert answer == f"Error: {path} is outside the working folder"
    assert (bench.folder.parent / "secret.txt").read_text() == "outside"


@pytest.mark.parametrize(
    "command", ["grep --file=/etc/passwd x", "grep -f/etc/passwd x", "grep -f../secret.txt x"]
)
def test_a_path_in_an_option_does_not_leave_the_folder_either(
    bench: Workbench, command: str
) -> None:
    assert "is outside the working folder" in call(bench, "run_shell", command=command)


def test_options_without_a_path_work(bench: Workbench) -> None:
    assert call(bench, "run_shell", command="head -n1 config.toml") == "[server]"
    assert call(bench, "run_shell", command="grep -c port config.toml") == "1"


@pytest.mark.parametrize(
    "command", ["rm -rf .", "python -c 'print(1)'", "bash -c ls", "", "curl http://example.com"]
)
def test_only_known_programs_are_started(bench: Workbench, command: str) -> None:
    assert call(bench, "run_shell", command=command).startswith("Error: only these programs")


@pytest.mark.parametrize("command", ["ls; touch made", "ls && touch made", "ls $(touch made)"])
def test_no_shell_reads_the_command_line(bench: Workbench, command: str) -> None:
    call(bench, "run_shell", command=command)
    assert not (bench.folder / "made").exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("no_such_tool", "{}"),
        ("read_file", "not json"),
        ("read_file", "[1]"),
        ("read_file", '{"paths": "stats.py"}'),
        ("read_file", '{"path": "missing.py"}'),
        ("read_file", '{"path": 3}'),
        ("edit_file", '{"path": "stats.py", "old_string": "", "new_string": "x"}'),
        ("run_shell", '{"command": "ls \\"open"}'),
    ],
)
def test_a_call_that_makes_no_sense_is_answered_in_words(
    bench: Workbench, name: str, arguments: str
) -> None:
    assert bench.call(name, arguments).startswith("Error: ")


def test_every_declared_tool_exists(bench: Workbench) -> None:
    for tool in TOOLS:
        assert "there is no tool" not in bench.call(tool["function"]["name"], "{}")
