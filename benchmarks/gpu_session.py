"""What does an agent's turn cost at 32k tokens of context, by the openai SDK, on one card?

    python -m benchmarks.gpu_session --checkpoint DIR [--size 27B] [--form bf16|fp8]

The real server on loopback, and one coding agent: system prompt, tools and files fill `--context`
tokens by turn 1, each later turn adds a tool's result. In most gaps between turns come a title
request and a sub-agent with another system prompt, which take the hot state away; two gaps are
quiet. With `--size` weights are drawn at random on the card and DIR gives tokenizer and template;
without it DIR is loaded whole.

Random weights end no reply. The agent's replies are therefore held to a schema that one text length
fits, so that a turn ends as a real one does, on an end token, and the next goes on from its state;
titles and sub-agents write free text, `ignore_eos`, to their limit. Between client and engine every
call at the seam is timed: `in` is from the request to the first call, `engine` from there to the
end of the first step, `out` from there to the first delta. A call on a card returns before its work
is done; the first step waits for all of it.

At last turn 3 is asked again under other `cache_salt`s, so that nothing may be reused, as it was
and with a free reply, at temperature 0: tokens are compared, and log probabilities as far as they
agree.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from benchmarks.card import card, write
from benchmarks.gpu_session_desk import HEADER, Desk, Reply, Seam, polling
from benchmarks.scenarios.material import SYSTEM, TITLE_SYSTEM, source
from benchmarks.shapes import names
from capserve.api.server import running
from capserve.cli.compose import Assembly, assemble, load_engine, private_settings
from capserve.cli.serve import SWITCH_INTERVAL_S
from capserve.config import Settings, load_settings
from capserve.engine.runtime import TorchEngine
from capserve.text.tokenizer import Tokenizer

SYSTEM_TOKENS = 3_000
RESULT_TOKENS = (60, 100, 600, 150, 220, 300, 400)
"""Of the tool's result that turn 2, 3, ... bring."""
QUIET_GAPS = (3, 6)
"""Turns after which nothing comes between."""
SUB_SYSTEM_TOKENS, SUB_TASK_TOKENS = 1_500, 2_500
ROOM = 8_192
"""Of the context length, beyond what turn 1 fills."""
REPEATED = 3
"""The turn that is asked again."""


# ---- the session --------------------------------------------------------------------------------


class Text:
    """Source of a given number of tokens, within a few percent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        sample = source(0, 100_000)
        self._chars = len(sample) / len(tokenizer.encode(sample))

    def __call__(self, seed: int, tokens: int) -> str:
        return source(seed, int(tokens * self._chars))


def session(desk: Desk, text: Text, context: int) -> tuple[list[Any], Reply]:
    """All turns and what comes between; returns the repeated turn's messages and reply."""
    files = text(2, context - SYSTEM_TOKENS - 500)
    messages: list[Any] = [
        {"role": "system", "content": f"{SYSTEM}\n{text(1, SYSTEM_TOKENS)}"},
        {"role": "user", "content": f"The project:\n\n{files}\n\nFind the bug and fix it."},
    ]
    between = "-"
    repeated: tuple[list[Any], Reply] | None = None
    for turn in range(1, len(RESULT_TOKENS) + 2):
        reply = desk.ask(messages, agent=True, free=False)
        desk.note(f"turn {turn}", between, reply)
        if turn == REPEATED:
            repeated = list(messages), reply
        if turn > len(RESULT_TOKENS):
            break
        messages.append({"role": "assistant", "content": reply.text})
        result = text(10 + turn, RESULT_TOKENS[turn - 1])
        messages.append({"role": "user", "content": f"<result>\n{result}\n</result>"})
        between = "nothing" if turn in QUIET_GAPS else "title, sub-agent"
        if turn not in QUIET_GAPS:
            side_requests(desk, text, turn)
    assert repeated is not None
    return repeated


def side_requests(desk: Desk, text: Text, turn: int) -> None:
    title = [
        {"role": "system", "content": TITLE_SYSTEM},
        {"role": "user", "content": text(100 + turn, 60)},
    ]
    desk.note("title", "", desk.ask(title, agent=False, free=True))
    task = text(200 + turn, SUB_TASK_TOKENS)
    sub = [
        {"role": "system", "content": f"You search code.\n{text(3, SUB_SYSTEM_TOKENS)}"},
        {"role": "user", "content": f"{task}\n\nWhich of these are called with a limit?"},
    ]
    desk.note("sub-agent", "", desk.ask(sub, agent=False, free=True))


def cold_check(desk: Desk, messages: Sequence[Any], before: Reply) -> dict[str, Any]:
    """The same request where nothing may be reused; then one with a free reply, both ways."""
    cold = desk.ask(messages, agent=True, free=False, salt=uuid4().hex)
    desk.note(f"turn {REPEATED} again, cold", "", cold)
    warm_free = desk.ask(messages, agent=True, free=True, logprobs=True)
    desk.note(f"turn {REPEATED} free, warm", "", warm_free)
    cold_free = desk.ask(messages, agent=True, free=True, logprobs=True, salt=uuid4().hex)
    desk.note(f"turn {REPEATED} free, cold", "", cold_free)
    return {"as_it_was": compared(before, cold), "free": compared(warm_free, cold_free)}


def compared(a: Reply, b: Reply) -> dict[str, Any]:
    same = next(
        (i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y),
        min(len(a.ids), len(b.ids)),
    )
    equal = a.ids == b.ids
    apart = [abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=False)]
    return {
        "same_prompt": a.prompt_ids == b.prompt_ids,
        "tokens": [len(a.ids), len(b.ids)],
        "equal": equal,
        "first_difference": None if equal else same,
        "most_logprob_apart": max(apart, default=None),
    }


# ---- the server ---------------------------------------------------------------------------------


@contextmanager
def served(
    options: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Assembly, TorchEngine, Seam, str]]:
    path = Path(options.checkpoint)
    vocab = Tokenizer.from_dir(path).vocab_size
    if options.size is None:
        engine = load_engine(settings, path, vocab)
    else:
        from benchmarks.gpu import engine_of  # needs a card

        positions, chunk = int(settings.max_model_len or 0), settings.prefill_chunk
        engine = engine_of(options.size, options.form, positions, chunk)
    assert engine.limits.vocab_size == vocab, "the checkpoint's tokenizer is another one"
    seam = Seam(engine)
    assembly = assemble(private_settings(settings), engine=engine)
    assembly.worker.start()
    try:
        with running(assembly.app) as url:
            yield assembly, engine, seam, url
    finally:
        assembly.stop()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    flags = {
        "model": options.checkpoint,
        "max_model_len": options.context + ROOM,
        "device": options.device,
        "prefill_chunk": options.chunk,
        "disk_budget_bytes": 0,
    }
    settings = load_settings(flags)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as `capserve serve` does
    began = perf_counter()
    with served(options, settings) as (assembly, engine, seam, url):
        start_s = perf_counter() - began
        on_card = engine.limits.device.startswith("cuda")
        captured = engine.graph_capture_count
        desk = Desk(f"{url}/v1", assembly, seam)
        hello = [{"role": "user", "content": "Hello."}]
        desk.ask(hello, agent=False, free=True, salt="warm-up")  # the SDK's and the socket's firsts
        text = Text(assembly.state.tokenizer)
        began = perf_counter()
        with polling(f"{url}/health") as polls:
            messages, reply = session(desk, text, options.context)
            session_s = perf_counter() - began
            during = list(polls)
            check = cold_check(desk, messages, reply)
        gc.collect()
        limits = engine.limits
        return {
            "card": card(threads=torch.get_num_threads())
            | ({"gpu": torch.cuda.get_device_name()} if on_card else {}),
            "question": __doc__,
            "model": options.size or limits.model_name,
            "form": options.form if options.size else limits.dtype,
            "settings": {
                name: getattr(settings, name)
                for name in (
                    *("max_model_len", "prefill_chunk", "drafts", "checkpoint_interval"),
                    *("gpu_budget_bytes", "capsule_budget_bytes", "disk_budget_bytes"),
                )
            },
            "small_state_bytes": limits.small_state_bytes,
            "kv_bytes_per_token": limits.kv_bytes_per_token,
            "start_s": start_s,
            "session_s": session_s,
            "graph_captures": {"before": captured, "after": engine.graph_capture_count},
            "health_ms": {
                **{f"p{p}": float(np.percentile(during, p)) for p in (50, 99)},
                "max": max(during),
                "n": len(during),
            },
            "cold_check": check,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_card else None,
            "rows": [asdict(row) for row in desk.rows],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--size", choices=names(), help="random weights at that size, on the card")
    parser.add_argument("--form", choices=["bf16", "fp8"], default="bf16", help="of these weights")
    parser.add_argument("--context", type=int, default=32_768, help="tokens by turn 1")
    parser.add_argument("--chunk", type=int, help="tokens of one prefill chunk")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    print(HEADER + "\n" + "|---" * HEADER.count(" | ") + "|---|", flush=True)
    result = measure(options)
    for name in ("graph_captures", "health_ms", "cold_check", "start_s", "session_s"):
        print(f"{name}: {result[name]}")
    if result["card"].get("gpu"):
        write("gpu-session", result)


if __name__ == "__main__":
    main()
