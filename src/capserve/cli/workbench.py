"""What may the demo's agent touch, and what do its tools answer?

A temporary folder with a small broken project. The tools really read, write and run there: paths
are resolved and must stay inside, and `run_shell` starts a known program without a shell. The one
program that can do more is pytest, since it runs the code that the model wrote.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = {
    "stats.py": (
        '"""Small statistics helpers."""\n\n\n'
        'def mean(xs):\n    """Arithmetic mean of a list."""\n'
        "    return sum(xs) / (len(xs) - 1)\n\n\n"
        'def spread(xs):\n    """Largest minus smallest."""\n    return max(xs) - min(xs)\n'
    ),
    "test_stats.py": (
        "from stats import mean, spread\n\n\n"
        "def test_mean():\n    assert mean([1, 2, 3]) == 2\n\n\n"
        "def test_spread():\n    assert spread([4, 1, 9]) == 8\n"
    ),
    "config.toml": '[server]\nhost = "0.0.0.0"\nport = 8080\nworkers = 4\n',
    "README.md": "# Tiny Stats\n\nHelpers for small lists of numbers.\n\n"
    "## Usage\n\n- import stats\n- call mean or spread\n",
}

TIMEOUT_S = 30
"""Longest a command may run: pytest starts in one second; anything else is stuck."""

PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")

PROGRAMS: dict[str, tuple[str, ...]] = {
    "pytest": PYTEST,
    "ls": ("ls",),
    "cat": ("cat",),
    "head": ("head",),
    "tail": ("tail",),
    "wc": ("wc",),
    "grep": ("grep",),
    "pwd": ("pwd",),
}
"""First word of a command line -> what is started for it."""


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(arguments),
            },
        },
    }


TOOLS: list[dict[str, Any]] = [
    _tool("read_file", "Read a file.", path="Path of the file"),
    _tool("write_file", "Write a file.", path="Path of the file", content="The full text"),
    _tool(
        "edit_file",
        "Replace text in a file.",
        path="Path of the file",
        old_string="Text to replace",
        new_string="New text",
    ),
    _tool("list_dir", "List a directory.", path="Directory"),
    _tool("run_shell", "Run a shell command.", command="Command line"),
]
"""Definitions as they are sent to the model."""


class ToolError(Exception):
    """The tool refuses or fails; the text is its answer to the model."""


class Workbench:
    """The folder and the tools that work in it. Tools answer text; a failure is text too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        for name, text in PROJECT.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        self._tools: dict[str, Callable[..., str]] = {
            "read_file": self._read_file,
            "write_file": self._write_file,
            "edit_file": self._edit_file,
            "list_dir": self._list_dir,
            "run_shell": self._run_shell,
        }

    def call(self, name: str, arguments: str) -> str:
        """Run one tool call; `arguments` is the JSON text that the model's call carries."""
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: there is no tool called {name}"
        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                return "Error: arguments must be a JSON object"
            return tool(**values)
        except (ToolError, OSError, TypeError, ValueError) as error:
            return f"Error: {error}"

    def _inside(self, path: str) -> Path:
        target = (self.folder / path).resolve()
        if not target.is_relative_to(self.folder):
            raise ToolError(f"{path} is outside the working folder")
        return target

    def _read_file(self, path: str) -> str:
        target = self._inside(path)
        if not target.is_file():
            raise ToolError(f"file not found: {path}")
        return target.read_text(encoding="utf-8")

    def _write_file(self, path: str, content: str) -> str:
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content if content.endswith("\n") else content + "\n", encoding="utf-8")
        return "OK"

    def _edit_file(self, path: str, old_string: str, new_string: str) -> str:
        text = self._read_file(path)
        if not old_string or old_string not in text:
            raise ToolError("text not found")
        self._inside(path).write_text(text.replace(old_string, new_string, 1), encoding="utf-8")
        return "OK"

    def _list_dir(self, path: str) -> str:
        target = self._inside(path)
        if not target.is_dir():
            raise ToolError(f"no such directory: {path}")
        names = (child.name + "/" * child.is_dir() for child in target.iterdir())
        return "\n".join(sorted(name for name in names if not name.startswith((".", "__"))))

    def _run_shell(self, command: str) -> str:
        words = shlex.split(command)
        if words[:3] in (["python", "-m", "pytest"], ["python3", "-m", "pytest"]):
            words = words[2:]
        if not words or words[0] not in PROGRAMS:
            raise ToolError(f"only these programs run here: {', '.join(PROGRAMS)}")
        for word in words[1:]:
            # A path may hide in an option (`--file=/x`, `-f/x`): from its first dot or slash on.
            self._inside(re.sub(r"^-[^./]*", "", word) or ".")
        done = subprocess.run(
            [*PROGRAMS[words[0]], *words[1:]],
            cwd=self.folder,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return (done.stdout + done.stderr).strip() or "(no output)"
