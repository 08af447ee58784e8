"""What can a checkpoint do?

Every assistant turn of new conversations is judged with the true history before it, greedy, on
capserve's own engine: did it end, is the call right, is it the reply word for word, and how many
drafts were accepted. The last line is JSON.

    python -m recipes.nano.evaluate DIR [--turns 120]
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from recipes.nano.dialogs import Loss, Renderer, make_sample
from recipes.nano.words import Rng

MAX_REPLY_TOKENS = 400
SEED = "held out"
"""Training seeds are other strings: these conversations are new to the model."""

_CALLS = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


def turns(count: int) -> list[tuple[str, str]]:
    """(prompt text, expected reply text), reply with its end mark, for `count` turns."""
    rng, renderer, found = Rng(SEED), Renderer(), list[tuple[str, str]]()
    while len(found) < count:
        before = ""
        for text, kind in renderer.pieces(make_sample(rng)):
            if kind is Loss.REPLY and before.endswith(("<think>\n", "</think>\n\n")):
                # A reply whose reasoning the template dropped is history, never generated so.
                found.append((before, text))
            before += text
    return found[:count]


def reply(engine: TorchEngine, tokenizer: Tokenizer, prompt: str) -> tuple[str, int, int]:
    """Greedy text up to the end mark, drafts made and drafts accepted."""
    tokens = np.array(tokenizer.encode(prompt, add_special_tokens=False).ids, dtype=np.int32)
    end = tokenizer.token_to_id("<|im_end|>")
    engine.reset()
    engine.extend(tokens)
    engine.begin(Sampling(drafts=min(3, engine.limits.max_drafts), end_tokens=(end,)), tokens)
    out: list[int] = []
    drafted = accepted = 0
    while len(out) < MAX_REPLY_TOKENS:
        chunk = engine.step()
        out += chunk.tokens
        drafted, accepted = drafted + chunk.drafted, accepted + chunk.accepted
        if chunk.stop is not None:
            break
    return tokenizer.decode(out, skip_special_tokens=False), drafted, accepted


def evaluate(path: Path, count: int) -> dict[str, float | int]:
    engine = TorchEngine.load(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    seen: Counter[str] = Counter()
    for prompt, expected in turns(count):
        text, drafted, accepted = reply(engine, tokenizer, prompt)
        calls = _CALLS.findall(expected)
        seen["turns"] += 1
        seen["ended"] += text.endswith("<|im_end|>")
        seen["exact"] += text == expected
        seen["with_call"] += bool(calls)
        seen["call_right"] += bool(calls) and _CALLS.findall(text) == calls
        seen["drafted"] += drafted
        seen["accepted"] += accepted
    return dict(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--turns", type=int, default=120)
    args = parser.parse_args()
    seen = evaluate(args.checkpoint, args.turns)
    for part, whole in (
        ("ended", "turns"),
        ("exact", "turns"),
        ("call_right", "with_call"),
        ("accepted", "drafted"),
    ):
        share = seen[part] / max(1, seen[whole])
        print(f"{part:10s} {seen[part]:5d} of {seen[whole]:5d}  {share:.1%}")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
