"""What does a grammar cost: before the first token, at each token, and when it is hostile?

Compile time for schemas of growing size and for 1, 20 and 200 tools in the family's call form; the
time of a mask along a real call, on a first and on a second pass; copy and rollback; and the
slowest refusal among schemas made to hurt. `--tokenizer` takes a folder with another tokenizer.json
than the embedded one: masks grow with the vocabulary. The ceiling of a mask is the time to write
its bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.card import card, spread, write
from capserve.errors import InvalidRequestError
from capserve.nano import checkpoint_dir
from capserve.text.grammar import Grammar, GrammarCompiler
from capserve.text.grammar_rules import Constraint
from capserve.text.markup import spell_call, spell_parameter
from capserve.text.tokenizer import Tokenizer

SIZES_BYTES = (1_000, 10_000, 50_000, 100_000)
TOOLS = (1, 20, 200)
CODE = (
    "import os\n\n\ndef f(x):\n    # a < b, <b>text</b>\n    return [x, 'y'] if x < 3 else None\n"
)
CALL = spell_call(
    "tool_0",
    spell_parameter("path", CODE * 4)
    + spell_parameter("count", "12")
    + spell_parameter("flags", json.dumps(["one", "two words"])),
)


def shape(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:2],
        "additionalProperties": False,
    }


def schema_of(size_bytes: int) -> dict[str, Any]:
    """Objects in an object until its JSON has that many bytes."""
    properties: dict[str, Any] = {}
    one = shape(a={"type": "string"}, b={"type": "integer", "minimum": 0}, c={"enum": ["x", "y"]})
    for i in range(size_bytes // (len(json.dumps(one)) + 14)):
        properties[f"field_{i}"] = one
    return shape(**properties)


def tools_of(count: int) -> tuple[Mapping[str, Any], ...]:
    parameters = shape(
        path={"type": "string"},
        count={"type": "integer"},
        mode={"type": "string", "enum": ["a", "b"]},
        flags={"type": "array", "items": {"type": "string"}},
        note={"type": ["string", "null"], "maxLength": 200},
    )
    return tuple(
        {"function": {"name": f"tool_{i}", "strict": True, "parameters": parameters}}
        for i in range(count)
    )


HOSTILE: dict[str, Any] = {
    "keys": {"properties": {f"k{i}": {"type": "string"} for i in range(3000)}, "type": "object"},
    "values": {"enum": [f"value {i}" for i in range(9000)]},
    "product": {
        "allOf": [{"anyOf": [shape(**{f"a{i}{j}": {}}) for j in range(4)]} for i in range(6)]
    },
    "pattern": {"type": "string", "pattern": "a.{50}b.{50}c"},
    "multiple": {"type": "integer", "multipleOf": 99991, "minimum": 5},
}


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}


def timed_compile(
    compiler: GrammarCompiler, constraint: Constraint
) -> tuple[Grammar | None, float]:
    """The grammar, or None when it was refused, and milliseconds."""
    began = perf_counter()
    try:
        grammar = compiler.compile(constraint)
    except InvalidRequestError:
        grammar = None
    return grammar, 1e3 * (perf_counter() - began)


def masks_us(grammar: Grammar, tokens: list[int]) -> tuple[list[float], list[float]]:
    """Microseconds of each mask along `tokens`, on two passes."""
    matcher = grammar.matcher()
    passes: list[list[float]] = []
    for _ in range(2):
        matcher.restart()
        passes.append([])
        for token in tokens:
            began = perf_counter()
            matcher.mask()
            passes[-1].append(1e6 * (perf_counter() - began))
            matcher.advance(token)
    return passes[0], passes[1]


def measure(tokenizer: Tokenizer) -> dict[str, Any]:
    began = perf_counter()
    compiler = GrammarCompiler(tokenizer, (tokenizer.specials["<|im_end|>"],))
    result: dict[str, Any] = {
        "vocabulary": tokenizer.vocab_size,
        "set_up_s": perf_counter() - began,
        "compile_ms_by_bytes": {
            size: timed_compile(compiler, Constraint(response_format=json_format(schema_of(size))))[
                1
            ]
            for size in SIZES_BYTES
        },
        "compile_ms_by_tools": {},
        "mask_us": {},
        "hostile_ms": {
            name: timed_compile(compiler, Constraint(response_format=json_format(schema)))[1]
            for name, schema in HOSTILE.items()
        },
    }
    tokens = tokenizer.encode(CALL).tolist()
    grammar: Grammar | None = None
    for count in TOOLS:
        demand = Constraint(tools=tools_of(count), choice="required")
        grammar, result["compile_ms_by_tools"][count] = timed_compile(compiler, demand)
        assert grammar is not None
        first, second = masks_us(grammar, tokens)
        result["mask_us"][count] = {"first": spread(first), "second": spread(second)}
    assert grammar is not None
    matcher = grammar.matcher()
    for token in tokens:
        matcher.advance(token)
    result["copy_us"] = spread([_us(grammar.matcher) for _ in range(50)])

    def back_and_forth() -> None:
        matcher.rollback(8)
        for token in tokens[-8:]:
            matcher.advance(token)

    result["rollback_8_us"] = spread([_us(back_and_forth) for _ in range(50)])
    words = (tokenizer.vocab_size + 31) // 32
    result["ceiling_us"] = min(_us(lambda: np.zeros(words, np.int32).fill(1)) for _ in range(50))
    return result


def _us(call: Any) -> float:
    began = perf_counter()
    call()
    return 1e6 * (perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, action="append", default=[])
    folders = [Path(checkpoint_dir()), *parser.parse_args().tokenizer]
    runs = [measure(Tokenizer.from_dir(folder)) for folder in folders]
    console = Console()
    for run in runs:
        console.print(f"{run['vocabulary']} ids: set-up {run['set_up_s']:.2f} s")
        console.print(f"  compile by bytes, ms: {_short(run['compile_ms_by_bytes'])}")
        console.print(f"  compile by tools, ms: {_short(run['compile_ms_by_tools'])}")
        for count, passes in run["mask_us"].items():
            p50, p95 = passes["first"]["p50"], passes["first"]["p95"]
            console.print(f"  mask, {count} tools: p50 {p50:.0f} us, p95 {p95:.0f} us")
        console.print(f"  hostile, ms: {_short(run['hostile_ms'])}")
    write("grammar", {"card": card(1), "runs": runs})


def _short(values: Mapping[Any, float]) -> str:
    return ", ".join(f"{name}: {value:.0f}" for name, value in values.items())


if __name__ == "__main__":
    main()
