"""Is each behaviour that the compatibility table promises shown by a test that exists?"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "compatibility.md"

FEWEST = 60
TOPICS = {
    "Requests",
    "Messages",
    "Tools",
    "Reasoning",
    "Streaming",
    "Errors",
    "Sessions and reuse",
    "Limits",
}
HEADER = ["client", "sends or expects", "capserve", "test"]
NAMED = re.compile(r"`([\w/.]+\.py)::(test_\w+)(?:\[([^`]+)\])?`")


@dataclass(frozen=True)
class Row:
    """A row of the table, below the heading `topic`."""

    topic: str
    cells: tuple[str, ...]

    @property
    def habit(self) -> tuple[str, ...]:
        """Who does what, however it is spaced and written large: no two rows tell the same."""
        return tuple(" ".join(cell.lower().split()) for cell in self.cells[:2])


def rows_of(text: str) -> list[Row]:
    """All rows of all tables, without their headers."""
    topic, rows = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            topic = line.removeprefix("## ").strip()
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if cells != HEADER and set("".join(cells)) != {"-"}:
                rows.append(Row(topic, tuple(cells)))
    return rows


@functools.cache
def defined_in(path: Path) -> dict[str, bool]:
    """The tests that a file defines, and whether each of them has parameters."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    shared = {
        target.id
        for statement in module.body
        if isinstance(statement, ast.Assign) and "parametrize" in ast.unparse(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return {
        node.name: any(
            "parametrize" in (mark := ast.unparse(decorator)) or mark in shared
            for decorator in node.decorator_list
        )
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@functools.cache
def values_in(path: Path) -> set[str]:
    """What may be a part of a parametrised id: constants of a file and of what it imports from
    this repository."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    values = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported = (TESTS.parent / node.module.replace(".", "/")).with_suffix(".py")
            if imported.is_file():
                values |= values_in(imported)
    return values


def fault_of(file: str, test: str, id_: str) -> str | None:
    """Why there is no such test; `id_` is empty or what stands in its brackets."""
    path = TESTS / file
    if not path.is_file():
        return f"no such file: {file}"
    if test not in (known := defined_in(path)):
        return f"no such test: {file}::{test}"
    if id_ and not known[test]:
        return f"it has no parameters: {file}::{test}[{id_}]"
    if id_ and not {id_, *id_.split("-")} & values_in(path):
        return f"no such parameter: {file}::{test}[{id_}]"
    return None


def faults_of(text: str) -> list[str]:
    """What is wrong with a table; empty when nothing is."""
    rows = rows_of(text)
    faults = []
    if len(rows) < FEWEST:
        faults.append(f"{len(rows)} rows, and {FEWEST} are promised")
    if missing := TOPICS - {row.topic for row in rows}:
        faults.append(f"no row about {sorted(missing)}")
    for habit, count in Counter(row.habit for row in rows).items():
        if count > 1:
            faults.append(f"{count} rows are the same: {habit}")
    for row in rows:
        if len(row.cells) != len(HEADER) or not all(row.cells):
            faults.append(f"not {len(HEADER)} filled cells: {row.cells}")
            continue
        named, between = NAMED.findall(row.cells[-1]), NAMED.sub("", row.cells[-1])
        if not named or between.strip(" ,"):
            faults.append(f"no test, or more than tests: {row.cells[-1]}")
        faults += [fault for name in named if (fault := fault_of(*name))]
    return faults


def test_every_row_is_told_once_and_names_tests_that_exist() -> None:
    assert faults_of(TABLE.read_text(encoding="utf-8")) == []


CHAT = "http/test_http_chat.py::test_two_clients_at_once_each_get_their_own_reply"
SWITCH = "http/test_http_attack.py::test_a_template_switch_may_have_any_name"


def sound(count: int = FEWEST) -> str:
    """A table of `count` rows without a fault."""
    head = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    rows = [f"| any | habit {number} | copes | `{CHAT}`, `{SWITCH}` |" for number in range(count)]
    lines: list[str] = []
    for number, topic in enumerate(sorted(TOPICS)):
        lines += [f"## {topic}", "", *head, *rows[number :: len(TOPICS)], ""]
    return "\n".join(lines)


@pytest.mark.parametrize("id_", ["", "[self]", "[kwargs]"])
def test_a_sound_table_has_no_fault(id_: str) -> None:
    assert faults_of(sound().replace(SWITCH, SWITCH + id_)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        (CHAT, f"{CHAT}_or_not", f"no such test: {CHAT}_or_not"),
        (CHAT, CHAT.replace("_chat.", "_chats."), "no such file: http/test_http_chats.py"),
        (CHAT, f"{CHAT}[7]", f"it has no parameters: {CHAT}[7]"),
        (SWITCH, f"{SWITCH}[a name of nobody]", f"no such parameter: {SWITCH}[a name of nobody]"),
        (f"`{CHAT}`, `{SWITCH}`", "see there", "no test, or more than tests: see there"),
        (f"`{SWITCH}`", "and more", f"no test, or more than tests: `{CHAT}`, and more"),
        ("| copes ", "", "not 4 filled cells"),
        ("| copes ", "| ", "not 4 filled cells"),
        ("habit 1 ", "Habit  0 ", "2 rows are the same: ('any', 'habit 0')"),
        ("## Limits", "## Errors", "no row about ['Limits']"),
    ],
)
def test_a_planted_fault_is_the_one_that_is_noticed(right: str, wrong: str, fault: str) -> None:
    assert right in sound()
    [noticed] = faults_of(sound().replace(right, wrong, 1))
    assert noticed.startswith(fault)


def test_too_few_rows_are_noticed() -> None:
    assert faults_of(sound(FEWEST - 1)) == [f"{FEWEST - 1} rows, and {FEWEST} are promised"]
