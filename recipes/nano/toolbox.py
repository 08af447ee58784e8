"""Which tools does an agent declare, and under which names?

Every agent has its own words for the same thing. A capability has many names, argument names and
descriptions; a conversation draws one of each, so that the model learns to read the definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.nano.words import Rng

Argument = tuple[str, tuple[str, ...], str]
"""(role in the scenes, names, description)."""

CAPABILITIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[Argument, ...]]] = {
    "read": (
        ("read_file", "Read", "view_file", "open_file", "cat_file"),
        ("Read a file.", "Return the contents of a file.", "Show the text of a file."),
        (("path", ("path", "file_path", "filename"), "Path of the file"),),
    ),
    "write": (
        ("write_file", "Write", "create_file", "save_file"),
        ("Write a file.", "Save text to a file, replacing what was there."),
        (
            ("path", ("path", "file_path", "filename"), "Path of the file"),
            ("content", ("content", "contents", "text"), "The full text"),
        ),
    ),
    "edit": (
        ("edit_file", "Edit", "str_replace", "replace_in_file"),
        ("Replace text in a file.", "Change one exact string in a file."),
        (
            ("path", ("path", "file_path", "filename"), "Path of the file"),
            ("old", ("old_string", "old_text", "search"), "Text to replace"),
            ("new", ("new_string", "new_text", "replacement"), "New text"),
        ),
    ),
    "list": (
        ("list_dir", "LS", "list_files", "ls"),
        ("List a directory.", "Show the files of a folder."),
        (("path", ("path", "directory", "folder"), "Directory"),),
    ),
    "grep": (
        ("grep", "Grep", "search_files", "search_code"),
        ("Search for text in files.", "Find lines that match a pattern."),
        (("pattern", ("pattern", "query", "regex"), "Text to look for"),),
    ),
    "shell": (
        ("run_shell", "Bash", "execute_command", "shell"),
        ("Run a shell command.", "Execute a command and return its output."),
        (("command", ("command", "cmd", "command_line"), "Command line"),),
    ),
    "weather": (
        ("get_weather", "weather", "current_weather"),
        ("Current weather for a city.", "Look up the weather in a place."),
        (("city", ("city", "location", "place"), "City name"),),
    ),
    "calc": (
        ("calculate", "calculator", "eval_math"),
        ("Evaluate an arithmetic expression.", "Work out a calculation."),
        (("expression", ("expression", "input", "formula"), "What to work out"),),
    ),
    "mail": (
        ("send_email", "send_mail", "mail"),
        ("Send an email.",),
        (
            ("to", ("to", "recipient", "address"), "Address"),
            ("body", ("body", "text", "message"), "Text"),
        ),
    ),
    "order": (
        ("get_order", "order_status", "lookup_order"),
        ("Look up an order.", "Status of an order."),
        (("id", ("order_id", "id", "number"), "Id of the order"),),
    ),
    "note": (
        ("save_note", "remember", "add_memory"),
        ("Keep a note.", "Remember something for later."),
        (("text", ("text", "note", "content"), "What to keep"),),
    ),
}


@dataclass(frozen=True)
class Tool:
    """One capability as one agent declares it."""

    capability: str
    schema: dict[str, Any]
    roles: dict[str, str]
    """Role in the scenes -> the argument's name here."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def call(self, **values: str) -> dict[str, Any]:
        """The `function` part of a call, arguments as an object in the order of the schema."""
        arguments = {name: values[role] for role, name in self.roles.items()}
        return {"name": self.name, "arguments": arguments}


def schema(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def make_tool(rng: Rng, capability: str) -> Tool:
    names, descriptions, arguments = CAPABILITIES[capability]
    roles = {role: rng.choice(options) for role, options, _ in arguments}
    texts = {roles[role]: text for role, _, text in arguments}
    return Tool(capability, schema(rng.choice(names), rng.choice(descriptions), texts), roles)


def invent_tool(rng: Rng) -> Tool:
    """A tool that no list holds: verb, object, one or two arguments."""
    verb, thing = rng.choice(["archive", "start", "track", "rename", "close"]), rng.nonce()
    roles = {"a": f"{thing}_id"} | (
        {"b": rng.choice(["reason", "label"])} if rng.random() < 0.5 else {}
    )
    texts = dict.fromkeys(roles.values(), f"For the {thing}")
    definition = schema(f"{verb}_{thing}", f"{verb.capitalize()} a {thing}.", texts)
    return Tool("invented", definition, roles)


def make_toolset(rng: Rng, needed: set[str], extra: int) -> dict[str, Tool]:
    """A tool for each needed capability and a few more, in random order."""
    others = [name for name in CAPABILITIES if name not in needed]
    wanted = [*(needed - {"invented"}), *rng.sample(others, min(extra, len(others)))]
    rng.shuffle(wanted)
    tools = {name: make_tool(rng, name) for name in wanted}
    if "invented" in needed:
        tools["invented"] = invent_tool(rng)
    return tools
