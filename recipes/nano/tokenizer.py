"""How is the vocabulary made?

Byte-level BPE over generated conversations and library code. Normalizer, pre-tokenizer and decoder
are the family's: they are read from the shipped tokenizer, and so are the control tokens, which
must keep their order at the end of the vocabulary.

    python -m recipes.nano.tokenizer OUT_DIR [--dialogs 14000]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from recipes.nano.dialogs import NANO, Renderer, make_sample
from recipes.nano.words import Rng


def library_files(limit: int | None = None) -> list[Path]:
    """Source files of Python's standard library: the only text that nobody had to write."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skipped & set(path.relative_to(root).parts)
    ]
    random.Random(0).shuffle(files)
    return files[:limit]


def library_texts(limit: int | None = None) -> Iterator[str]:
    for path in library_files(limit):
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def train_tokenizer(dialogs: int, code_files: int, base: Path = NANO) -> Tokenizer:
    """A tokenizer of the shipped one's size, trained on `dialogs` new conversations."""
    description = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    marks = sorted(description.pop("added_tokens"), key=lambda token: token["id"])
    size = len(description["model"]["vocab"])
    description["model"] |= {"vocab": {}, "merges": []}
    description["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(description))
    trainer = BpeTrainer(
        vocab_size=size,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        _texts(dialogs, code_files, [t["content"] for t in marks]), trainer
    )
    for token in marks:
        kind = {key: token[key] for key in ("special", "normalized")}
        tokenizer.add_tokens([AddedToken(token["content"], **kind)])
    return tokenizer


def _texts(dialogs: int, code_files: int, marks: list[str]) -> Iterator[str]:
    rng, renderer = Rng("tokenizer"), Renderer()
    for _ in range(dialogs):
        text = renderer.text(make_sample(rng))
        for mark in marks:  # control tokens are matched whole and teach no merges
            text = text.replace(mark, "\n\n")
        yield text
    yield from library_texts(code_files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dialogs", type=int, default=14_000)
    parser.add_argument("--code-files", type=int, default=400)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.dialogs, args.code_files)
    tokenizer.save(str(args.out / "tokenizer.json"))
    shutil.copy(NANO / "tokenizer_config.json", args.out)
    print(f"{tokenizer.get_vocab_size()} entries in {args.out}")


if __name__ == "__main__":
    main()
