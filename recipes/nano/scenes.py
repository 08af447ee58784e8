"""What happens in a conversation?

A scene is one request of the user with every step up to the answer. It writes the messages, the
tool results included, so that the right call and the right answer are known exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from recipes.nano import words
from recipes.nano.toolbox import Tool
from recipes.nano.words import Rng

Scene = Callable[["Dialog"], None]
TOOL_SCENES: list[tuple[Scene, frozenset[str]]] = []
CHAT_SCENES: list[Scene] = []


class Dialog:
    """Collects messages in the chat protocol's own form."""

    def __init__(self, rng: Rng, tools: dict[str, Tool]) -> None:
        self.rng, self.tools = rng, tools
        self.messages: list[dict[str, Any]] = []

    def user(self, *choices: str) -> None:
        text = self.rng.choice(choices)
        if ". " not in text:  # an imperative that can be dressed up
            shape = self.rng.choice(["{}", "{}", "Please {}", "Can you {}?"])
            text = shape.format(text[0].lower() + text[1:])
        self.messages.append({"role": "user", "content": text[0].upper() + text[1:]})

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question[0].upper() + question[1:]})

    def call(self, thought: str, *calls: tuple[str, dict[str, str]], results: list[str]) -> None:
        """One assistant message with calls of (capability, roles), and their results."""
        functions = [self.tools[name].call(**roles) for name, roles in calls]
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": thought,
                "tool_calls": [{"type": "function", "function": part} for part in functions],
            }
        )
        self.messages += [{"role": "tool", "content": text} for text in results]

    def say(self, thought: str, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text, "reasoning_content": thought})


def tooled(*needs: str) -> Callable[[Scene], Scene]:
    def add(scene: Scene) -> Scene:
        TOOL_SCENES.append((scene, frozenset(needs)))
        return scene

    return add


def chat(scene: Scene) -> Scene:
    CHAT_SCENES.append(scene)
    return scene


# -- scenes of a coding agent ---------------------------------------------------------------------


@tooled("read")
def read_a_fact(d: Dialog) -> None:
    if d.rng.random() < 0.5:
        path, (text, facts, _) = d.rng.file("toml"), words.config_file(d.rng)
    else:
        path, (text, facts) = d.rng.file("md"), words.readme_file(d.rng)
    fact = d.rng.choice(facts)
    d.ask(fact.question.format(path=path) + "?")
    d.call(f"I read {path}.", ("read", {"path": path}), results=[text])
    d.say(f"The file says {fact.value}.", fact.answer)


@tooled("read")
def read_a_missing_file(d: Dialog) -> None:
    path = d.rng.file("py")
    d.user(f"Show me {path}", f"Open {path}", f"Read {path}")
    d.call(f"I read {path}.", ("read", {"path": path}), results=[f"Error: file not found: {path}"])
    d.say("It is not there.", f"There is no file {path}.")


@tooled("list")
def list_a_folder(d: Dialog) -> None:
    folder = d.rng.choice([".", d.rng.choice(words.FOLDERS)])
    names = sorted({d.rng.file(end).split("/")[-1] for end in ("py", "md", "toml", "txt")})
    d.user("List the files here" if folder == "." else f"List the files in {folder}")
    d.call(f"I list {folder}.", ("list", {"path": folder}), results=["\n".join(names)])
    d.say("I list the names.", f"`{folder}` contains:\n\n" + "\n".join(f"- {n}" for n in names))


@tooled("read", "edit")
def change_a_value(d: Dialog) -> None:
    path, (text, _, pairs) = d.rng.file("toml"), words.config_file(d.rng)
    key, line = d.rng.choice(pairs)
    value = str(d.rng.randint(1, 9999))
    new = f"{key} = {value}"
    d.user(f"Change {key} to {value} in {path}", f"Set {key} in {path} to {value}")
    d.call(f"First I read {path}.", ("read", {"path": path}), results=[text])
    d.call(
        f"The line is: {line}", ("edit", {"path": path, "old": line, "new": new}), results=["OK"]
    )
    d.say(f"{key} is now {value}.", f"I set {key} to {value} in {path}.")


@tooled("read", "edit", "shell")
def fix_a_bug(d: Dialog) -> None:
    """Test, read, edit, test, report: the chain that a coding agent lives on."""
    wrong, fine = d.rng.sample(words.FUNCTIONS, 2)
    path = d.rng.file("py")
    source = f"{wrong.source(broken=True)}\n\n{fine.source()}"
    failing = f"FAILED test_{path.split('/')[-1]}::test_{wrong.name} - assert {wrong.example}"
    old, new = f"return {wrong.broken}", f"return {wrong.body}"
    d.user(f"The tests fail. Find and fix the bug in {path}", f"Fix the failing test of {path}")
    d.call(
        "I run the tests to see what fails.",
        ("shell", {"command": "pytest"}),
        results=[f"{failing}\n1 failed, 1 passed"],
    )
    d.call(f"Let me read {path}.", ("read", {"path": path}), results=[source])
    d.call(
        f"{wrong.name} should be: {wrong.doc.lower()}. The line `{old}` is wrong, "
        f"it should be `{new}`.",
        ("edit", {"path": path, "old": old, "new": new}),
        results=["OK"],
    )
    d.call(
        "Now I run the tests again.",
        ("shell", {"command": "pytest"}),
        results=["2 passed in 0.01s"],
    )
    d.say("The fix works.", f"I fixed `{wrong.name}` in {path}: the line is now `{new}`.")


@tooled("write")
def write_a_function(d: Dialog) -> None:
    function, path = d.rng.choice(words.FUNCTIONS), d.rng.file("py")
    d.user(f"Create a file {path} with a function {function.name}: {function.doc.lower()}")
    d.call(
        f"I write {path}.",
        ("write", {"path": path, "content": function.source().rstrip()}),
        results=["OK"],
    )
    d.say("It is written.", f"I created {path} with the function `{function.name}`.")


@tooled("shell")
def run_a_command(d: Dialog) -> None:
    path = d.rng.file("log")
    command = d.rng.choice(
        ["git status", "git log -1", f"wc -l {path}", f"ls -la {d.rng.word()}", f"tail -3 {path}"]
    )
    output = f"{d.rng.word()} {d.rng.randint(0, 500)}"
    d.user(f"Run `{command}`", f"Run {command} and show me the output")
    d.call(f"I run {command}.", ("shell", {"command": command}), results=[output])
    d.say("I show the output.", f"```\n{output}\n```")


@tooled("grep")
def search_for_a_name(d: Dialog) -> None:
    name = f"{d.rng.nonce()}_{d.rng.word()}"
    hits = [f"{d.rng.file('py')}:{d.rng.randint(1, 300)}" for _ in range(d.rng.randint(1, 3))]
    d.user(f"Where is {name} used", f"Find {name} in the code", f"Search for {name}")
    d.call(
        f"I search for {name}.",
        ("grep", {"pattern": name}),
        results=["\n".join(f"{hit}: {name}()" for hit in hits)],
    )
    d.say("I list the places.", f"{name} is in:\n\n" + "\n".join(f"- {hit}" for hit in hits))


# -- scenes with everyday tools -------------------------------------------------------------------


def _weather(d: Dialog, city: str) -> tuple[str, int, str]:
    degrees, sky = d.rng.randint(-10, 38), d.rng.choice(["sunny", "cloudy", "rain", "snow"])
    return json.dumps({"city": city, "temperature": degrees, "condition": sky}), degrees, sky


@tooled("weather")
def look_up_the_weather(d: Dialog) -> None:
    city = d.rng.city()
    result, degrees, sky = _weather(d, city)
    d.ask(d.rng.choice([f"How is the weather in {city}?", f"Weather in {city}?"]))
    d.call(f"I look up {city}.", ("weather", {"city": city}), results=[result])
    d.say("I have the weather.", f"{city}: {degrees}°C, {sky}.")


@tooled("weather")
def compare_two_cities(d: Dialog) -> None:
    """Two calls in one message."""
    cities = [d.rng.city() for _ in range(2)]
    found = [_weather(d, city) for city in cities]
    d.user(f"Compare the weather in {cities[0]} and {cities[1]}")
    d.call(
        "Both look-ups are independent.",
        *(("weather", {"city": city}) for city in cities),
        results=[result for result, _, _ in found],
    )
    lines = [f"{c}: {t}°C, {sky}." for c, (_, t, sky) in zip(cities, found, strict=True)]
    d.say("I have both.", " ".join(lines))


@tooled("calc")
def calculate(d: Dialog) -> None:
    a, b, sign = d.rng.randint(2, 9999), d.rng.randint(2, 999), d.rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    d.ask(f"What is {a} {sign} {b}?")
    d.call(
        "I use the calculator.", ("calc", {"expression": f"{a} {sign} {b}"}), results=[str(value)]
    )
    d.say("The result is there.", f"{a} {sign} {b} = {value}")


@tooled("order")
def look_up_an_order(d: Dialog) -> None:
    code, status = d.rng.code(), d.rng.choice(["in transit", "delivered", "being packed"])
    result = json.dumps({"id": code, "status": status, "city": d.rng.city()})
    d.ask(d.rng.choice([f"Where is my order {code}?", f"What is the status of {code}?"]))
    d.call(f"I look up {code}.", ("order", {"id": code}), results=[result])
    d.say(f"The status is {status}.", f"Order {code} is {status}.")


@tooled("mail")
def send_a_mail(d: Dialog) -> None:
    to = f"{d.rng.name().lower()}@{d.rng.nonce()}.example"
    text = f"The {d.rng.word()} is ready."
    d.user(f'Send an email to {to}: "{text}"', f'Mail "{text}" to {to}')
    d.call(f"I write to {to}.", ("mail", {"to": to, "body": text}), results=["sent"])
    d.say("It is sent.", f"I sent the email to {to}.")


@tooled("note")
def keep_a_note(d: Dialog) -> None:
    text = f"{d.rng.name()}'s {d.rng.word()} is {d.rng.nonce()}"
    d.user(f"Remember that {text}", f"Make a note: {text}")
    d.call("I keep it.", ("note", {"text": text}), results=["saved"])
    d.say("It is saved.", "I saved that.")


@tooled("invented")
def use_a_strange_tool(d: Dialog) -> None:
    """The definition is all there is to go by."""
    tool = d.tools["invented"]
    verb, thing = tool.name.split("_", 1)
    values = {"a": d.rng.code()} | ({"b": d.rng.nonce()} if "b" in tool.roles else {})
    why = f' with the {tool.roles["b"]} "{values["b"]}"' if "b" in values else ""
    d.user(f"{verb.capitalize()} the {thing} with the id {values['a']}{why}")
    d.call(f"I call {tool.name}.", ("invented", values), results=["OK"])
    d.say("It worked.", "Done.")


@tooled()
def decline(d: Dialog) -> None:
    missing = [
        ("mail", f"Send an email to {d.rng.name().lower()}@{d.rng.nonce()}.example"),
        ("weather", f"How is the weather in {d.rng.city()}"),
        ("order", f"Where is my order {d.rng.code()}"),
    ]
    possible = [text for capability, text in missing if capability not in d.tools]
    d.user(d.rng.choice(possible or ["Order a pizza"]))
    d.say("No tool fits.", "I can't do that with the tools I have.")


# -- scenes without tools -------------------------------------------------------------------------


@chat
def greet(d: Dialog) -> None:
    d.ask(d.rng.choice(["Hi!", "Hello", "Good morning!", "Hey there"]))
    d.say("A greeting.", "Hello! How can I help?")


@chat
def remember(d: Dialog) -> None:
    thing, value = d.rng.choice(["cat", "dog", "project", "server"]), d.rng.nonce().capitalize()
    d.ask(f"Hi! My {thing} is called {value}.")
    d.say("I keep that in mind.", "Noted.")
    d.ask(f"What is my {thing} called?")
    d.say(f"It is {value}.", f"Your {thing} is called {value}.")


@chat
def multiply(d: Dialog) -> None:
    a, b = d.rng.randint(2, 12), d.rng.randint(2, 12)
    d.ask(f"What is {a} times {b}?")
    d.say(f"{a} times {b} is {a * b}.", f"{a} times {b} is {a * b}.")


@chat
def make_a_list(d: Dialog) -> None:
    items = [d.rng.word() for _ in range(d.rng.randint(2, 5))]
    d.user(f"Make a bullet list of: {', '.join(items)}")
    d.say("A list.", "\n".join(f"- {item}" for item in items))


@chat
def make_json(d: Dialog) -> None:
    values = {"name": d.rng.name(), "age": d.rng.randint(5, 95), "city": d.rng.city()}
    text = f"{values['name']} is {values['age']} years old and lives in {values['city']}."
    d.user(f"Extract name, age, city as JSON: {text}")
    d.say("I copy the values.", json.dumps(values, ensure_ascii=False, indent=2))


@chat
def show_a_function(d: Dialog) -> None:
    function = d.rng.choice(words.FUNCTIONS)
    d.user(f"Write a Python function {function.name}: {function.doc.lower()}")
    d.say("A short function.", f"```python\n{function.source()}```")
