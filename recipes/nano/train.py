"""How are the weights made?

Trunk and MTP head together, on one device, for a number of seconds: time drives the schedule, so a
budget is kept on any machine. Writes the checkpoint that a server loads.

    python -m recipes.nano.train OUT_DIR --seconds 600 [--device cuda] [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from recipes.nano.dialogs import NANO, Loss
from recipes.nano.export import export
from recipes.nano.model import Batch, Nano
from recipes.nano.pack import Packer, Rows

WEIGHTS = {Loss.PADDING: 0.0, Loss.PROMPT: 0.12, Loss.REPLY: 1.0, Loss.CODE: 0.35}
"""A reply is what the model is for; prompts teach it to copy, code what source looks like."""

MTP_WEIGHT = 0.3


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run."""

    seconds: float
    rows: int = 8
    length: int = 2048
    rate: float = 3e-3
    warmup_steps: int = 100
    mtp_depth: int = 3
    seed: str = "a"
    device: str = "cpu"
    code_files: int = 400
    max_steps: int | None = None


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float
    mtp_loss: float
    reply_accuracy: float
    """Of the reply tokens of this step, the share that the model had as its first choice."""
    tokens: int


def losses(net: Nano, rows: Rows, device: str, mtp_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted trunk loss, mean MTP loss over the depths, and reply accuracy."""
    ids = torch.from_numpy(rows.ids).to(device)
    start = torch.from_numpy(rows.start).to(device)
    kinds = torch.from_numpy(rows.loss).to(device).long()
    table = torch.tensor([WEIGHTS[kind] for kind in Loss], device=device)
    trunk, deeper = net(Batch(ids, start), mtp_depth)

    def entropy(hidden: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Loss of predicting the token `ahead` in the same document, and reply accuracy."""
        target, kind = ids.roll(-ahead, 1), kinds.roll(-ahead, 1)
        inside = start.roll(-ahead, 1) == start
        inside[:, -ahead:] = False
        weight = table[kind] * inside
        logits = net.logits(hidden).float()
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        reply = inside & (kind == Loss.REPLY)
        hit = (logits.argmax(-1) == target)[reply].float().mean()
        return (nll.view_as(weight) * weight).sum() / weight.sum(), hit

    loss, accuracy = entropy(trunk, 1)
    parts = [entropy(hidden, depth + 2)[0] for depth, hidden in enumerate(deeper)]
    mtp = torch.stack(parts).mean() if parts else loss.new_zeros(())
    return loss, mtp, accuracy


def optimizer_for(net: Nano, rate: float) -> torch.optim.AdamW:
    """Decay for matrices only: norms, gates and embeddings are not to be pulled to zero."""
    matrices = [w for name, w in net.named_parameters() if w.dim() == 2 and "embed" not in name]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in net.parameters() if id(weight) not in known]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-9)


def train(
    config: dict[str, Any],
    tokenizer: Tokenizer,
    plan: Plan,
    report: Callable[[Progress], None],
) -> Nano:
    """Train a fresh model until the time (or `max_steps`) is used up. Raises on a loss that is
    not finite: going on would only cost time."""
    torch.manual_seed(0)
    net = Nano(config).to(plan.device).train()
    optimizer = optimizer_for(net, plan.rate)
    batches = Packer(tokenizer, plan.seed, plan.length, plan.code_files).batches(plan.rows)
    began, step, tokens = time.monotonic(), 0, 0
    while plan.max_steps is None or step < plan.max_steps:
        used = (time.monotonic() - began) / plan.seconds
        if used >= 1:
            break
        rate = plan.rate * 0.5 * (1 + math.cos(math.pi * used))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / plan.warmup_steps)
        with torch.autocast(plan.device, torch.bfloat16, enabled=plan.device == "cuda"):
            loss, mtp, accuracy = losses(net, next(batches), plan.device, plan.mtp_depth)
        (loss + MTP_WEIGHT * mtp).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + plan.rows * plan.length
        progress = Progress(step, loss.item(), mtp.item(), accuracy.item(), tokens)
        if not math.isfinite(progress.loss):
            raise RuntimeError(f"the loss is {progress.loss} at step {step}")
        report(progress)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokenizer", type=Path, default=NANO)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--mtp-depth", type=int, default=3)
    parser.add_argument("--seed", default="a")
    args = parser.parse_args()
    config = json.loads((NANO / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    plan = Plan(
        seconds=args.seconds,
        rows=args.rows,
        length=args.length,
        rate=args.rate,
        mtp_depth=args.mtp_depth,
        seed=args.seed,
        device=args.device,
    )

    def report(progress: Progress) -> None:
        if progress.step <= 5 or progress.step % 20 == 0:
            print(
                f"step {progress.step:5d}  loss {progress.loss:.3f}  mtp {progress.mtp_loss:.3f}  "
                f"reply {progress.reply_accuracy:.1%}  {progress.tokens / 1e6:.1f} M tokens",
                flush=True,
            )

    net = train(config, tokenizer, plan, report)
    export(net, config, args.tokenizer, args.out)
    print(f"checkpoint in {args.out}")


if __name__ == "__main__":
    main()
