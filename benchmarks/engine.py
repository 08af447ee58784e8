"""How fast are prefill and decode on nano, beside transformers on the same machine in the same run?

Engine alone, float32, two threads each. The prompt is a rendered conversation whose reply is long
enough; end tokens are ignored on both sides. Rounds alternate between the two, so that a noisy
neighbour hits both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import capserve.nano
from benchmarks.card import card, matmul_gflops, read_gb_per_s, spread, write
from capserve.engine.memory import plan
from capserve.engine.models.config import ModelConfig
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.text.messages import Conversation, Message
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

DECODE_TOKENS = 128
PREFILL_TOKENS = 8192
TASK = "Write a Python function that checks whether a number is prime."


def prompts(path: Path) -> tuple[TokenArray, TokenArray]:
    """A short prompt to decode from, and 8,192 tokens of library source to read."""
    tokenizer = Tokenizer.from_dir(path)
    builder = PromptBuilder(tokenizer, ChatTemplate.from_dir(path))
    short = builder.build(Conversation((Message("user", TASK),), (), {"enable_thinking": False}))
    source = "".join(
        file.read_text(encoding="utf-8") for file in sorted(Path(np.__file__).parent.glob("*.py"))
    )
    while len(tokens := tokenizer.encode(source)) < PREFILL_TOKENS:
        source += source
    return short.tokens, tokens[:PREFILL_TOKENS]


class Ours:
    def __init__(self, path: Path, threads: int) -> None:
        self.engine = TorchEngine.load(path, max_model_len=16384, threads=threads)

    def decode(self, prompt: TokenArray, drafts: int) -> tuple[float, float]:
        """Tokens a second, and tokens a step."""
        self.engine.reset()
        self.engine.extend(prompt)
        self.engine.begin(Sampling(drafts=drafts), prompt)
        self.engine.step()  # the first token costs no forward pass: not decode
        count = steps = 0
        began = perf_counter()
        while count < DECODE_TOKENS:
            count += len(self.engine.step().tokens)
            steps += 1
        return count / (perf_counter() - began), count / steps

    def prefill(self, prompt: TokenArray) -> float:
        self.engine.reset()
        began = perf_counter()
        self.engine.extend(prompt)
        return len(prompt) / (perf_counter() - began)


class Theirs:
    def __init__(self, path: Path, threads: int) -> None:
        import transformers

        self.threads = threads

        loaded: Any = transformers.AutoModelForCausalLM
        self.model = loaded.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode(self, prompt: TokenArray) -> float:
        """`generate`, without the time of its prefill and first token."""
        torch.set_num_threads(self.threads)  # the engine left it at one, for its decode

        def run(count: int) -> float:
            began = perf_counter()
            self.model.generate(
                torch.from_numpy(prompt).long()[None],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            return perf_counter() - began

        return DECODE_TOKENS / (run(DECODE_TOKENS + 1) - run(1))

    @torch.inference_mode()
    def prefill(self, prompt: TokenArray) -> float:
        """One forward call over the whole prompt, logits of the last position only."""
        torch.set_num_threads(self.threads)
        began = perf_counter()
        self.model(torch.from_numpy(prompt).long()[None], use_cache=True, logits_to_keep=1)
        return len(prompt) / (perf_counter() - began)


def measure(rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    path = Path(capserve.nano.__file__).parent
    ours, theirs = Ours(path, threads), Theirs(path, threads)
    short, long = prompts(path)
    samples: dict[str, list[float]] = {
        name: [] for name in ("decode_k0", "decode_k3", "tokens_per_step_k3", "prefill",
                              "transformers_decode", "transformers_prefill")
    }  # fmt: skip
    for _ in range(rounds + 1):
        samples["transformers_decode"].append(theirs.decode(short))
        samples["decode_k0"].append(ours.decode(short, 0)[0])
        rate, per_step = ours.decode(short, 3)
        samples["decode_k3"].append(rate)
        samples["tokens_per_step_k3"].append(per_step)
        samples["transformers_prefill"].append(theirs.prefill(long))
        samples["prefill"].append(ours.prefill(long))
    torch.set_num_threads(threads)  # of the ceilings, too
    figures = {name: spread(values[1:]) for name, values in samples.items()}  # first: warm-up
    config = ModelConfig.from_dir(path)
    weights = plan(
        config, torch.float32, torch.device("cpu"), positions=1, prefill_chunk=512,
        vocab=config.vocab_size,
    ).weights_bytes  # fmt: skip
    embedding = config.vocab_size * config.hidden_size * 4
    step_bytes = weights - embedding  # a step reads every matrix once, and one embedding row
    ceilings = {
        "copy_gb_per_s": read_gb_per_s(),
        "matmul_gflops": matmul_gflops(),
        "decode_k0_tok_per_s": read_gb_per_s() * 1e9 / step_bytes,
        "prefill_tok_per_s": matmul_gflops() * 1e9 / (2 * step_bytes / 4),
    }
    medians = {name: figure["p50"] for name, figure in figures.items()}
    ratios = {
        "decode_k0_vs_transformers": medians["decode_k0"] / medians["transformers_decode"],
        "decode_k3_vs_transformers": medians["decode_k3"] / medians["transformers_decode"],
        "prefill_vs_transformers": medians["prefill"] / medians["transformers_prefill"],
        "prefill_vs_matmul_ceiling": medians["prefill"] / ceilings["prefill_tok_per_s"],
    }
    return {"card": card(threads), "ceilings": ceilings, "figures": figures, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    figures = {name: figure["p50"] for name, figure in result["figures"].items()}
    ratios = result["ratios"]
    rows = [
        ("decode, K = 0", "decode_k0", "transformers_decode", ratios["decode_k0_vs_transformers"]),
        ("decode, K = 3", "decode_k3", "transformers_decode", ratios["decode_k3_vs_transformers"]),
        ("prefill, 8k", "prefill", "transformers_prefill", ratios["prefill_vs_transformers"]),
    ]
    lines = ["| nano, tokens/s | capserve | transformers | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {figures[a]:,.0f} | {figures[b]:,.0f} | {ratio:.1f} |"
        for name, a, b, ratio in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    result = measure(options.rounds, options.threads)
    print(table(result))
    write("engine", result)


if __name__ == "__main__":
    main()
