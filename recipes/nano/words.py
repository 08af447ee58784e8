"""What do generated conversations talk about?

Random names, paths, values and small files with known facts in them. Rare strings matter more than
pretty ones: a model that has only seen a list of cities learns the list, one that has seen made-up
names learns to copy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CITIES = "Paris London Tokyo Berlin Madrid Rome Lisbon Vienna Oslo Dublin Athens Cairo Lima".split()
PEOPLE = "Ana Ben Carla David Elena Farid Grace Hugo Ines Jonas Kira Liam Maya Noah Olga".split()
NOUNS = "cache config report parser session queue worker token user order invoice event log".split()
FOLDERS = "src lib app tests docs tools config data api core utils".split()
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


class Rng(random.Random):
    """A seeded source of everything random in the generator."""

    def nonce(self) -> str:
        """A pronounceable word that exists nowhere."""
        return "".join(
            self.choice(CONSONANTS) + self.choice(VOWELS) for _ in range(self.randint(2, 4))
        )

    def word(self) -> str:
        return self.choice(NOUNS) if self.random() < 0.5 else self.nonce()

    def name(self) -> str:
        return self.choice(PEOPLE) if self.random() < 0.6 else self.nonce().capitalize()

    def city(self) -> str:
        return self.choice(CITIES) if self.random() < 0.6 else self.nonce().capitalize()

    def code(self) -> str:
        """An id such as TCK-404."""
        letters = "".join(self.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=self.randint(2, 4)))
        return f"{letters}-{self.randint(10, 99999)}"

    def file(self, ending: str) -> str:
        stem = self.word() if self.random() < 0.6 else f"{self.word()}_{self.word()}"
        folder = f"{self.choice(FOLDERS)}/" if self.random() < 0.4 else ""
        return f"{folder}{stem}.{ending}"


@dataclass(frozen=True)
class Fact:
    """Something a file says: a question about it, and the answer."""

    question: str
    answer: str
    value: str


def config_file(rng: Rng) -> tuple[str, list[Fact], list[tuple[str, str]]]:
    """A toml file, facts about it, and its (key, line) pairs."""
    numbers = {"port": rng.randint(1000, 9999), "workers": rng.randint(1, 32)}
    keys = [*numbers, f"max_{rng.word()}", "timeout"]
    rng.shuffle(keys)
    section = rng.choice(["server", "app", rng.word()])
    lines, facts, pairs = [f"[{section}]", f'host = "{rng.nonce()}.example"'], [], []
    for key in keys:
        value = str(numbers.get(key, rng.randint(1, 5000)))
        line = f"{key} = {value}"
        lines.append(line)
        pairs.append((key, line))
        facts.append(Fact(f"what {key} does {{path}} use", f"The {key} is {value}.", value))
    return "\n".join(lines) + "\n", facts, pairs


def readme_file(rng: Rng) -> tuple[str, list[Fact]]:
    title = f"{rng.nonce().capitalize()} {rng.word().capitalize()}"
    purpose = f"Helpers for {rng.word()} and {rng.word()}."
    text = f"# {title}\n\n{purpose}\n\n## Usage\n\n- import {rng.nonce()}\n- call {rng.nonce()}\n"
    return text, [Fact("what is {path} about", f"It is titled “{title}”. {purpose}", title)]


@dataclass(frozen=True)
class Function:
    """A small function, what it is for, and a way to get it wrong."""

    name: str
    args: str
    doc: str
    body: str
    broken: str
    example: str

    def source(self, broken: bool = False) -> str:
        line = self.broken if broken else self.body
        return f'def {self.name}({self.args}):\n    """{self.doc}."""\n    return {line}\n'


FUNCTIONS = [
    Function("mean", "xs", "Arithmetic mean of a list", "sum(xs) / len(xs)",
             "sum(xs) / (len(xs) - 1)", "mean([1, 2, 3]) == 2"),
    Function("spread", "xs", "Largest minus smallest", "max(xs) - min(xs)",
             "max(xs) + min(xs)", "spread([4, 1, 9]) == 8"),
    Function("clip", "value, low, high", "Limit a value to a range",
             "max(low, min(value, high))", "min(low, max(value, high))", "clip(7, 0, 5) == 5"),
    Function("is_even", "n", "Whether a number is even", "n % 2 == 0", "n % 2 == 1",
             "is_even(4)"),
    Function("area", "width, height", "Area of a rectangle", "width * height",
             "width + height", "area(2, 5) == 10"),
    Function("double", "x", "Twice a number", "2 * x", "x ** 2", "double(4) == 8"),
    Function("last", "xs", "Last element of a list", "xs[-1]", "xs[0]", "last([1, 2]) == 2"),
    Function("shout", "text", "Text in capital letters", "text.upper()", "text.lower()",
             'shout("a") == "A"'),
    Function("initials", "name", "First letters of a name",
             '"".join(part[0] for part in name.split())',
             '"".join(part[-1] for part in name.split())', 'initials("Ada Byron") == "AB"'),
    Function("celsius", "f", "Fahrenheit to Celsius", "(f - 32) * 5 / 9", "(f - 32) * 9 / 5",
             "celsius(212) == 100"),
]  # fmt: skip
