"""When do two engines give the same bits?

When their fingerprints are equal: a digest of everything that decides what a state holds after the
same calls. Not in it, since they change no bit (docs/engine.md): the number of prefill threads, the
longest context, how many ids the head has and how many drafts a step makes.
"""

from __future__ import annotations

import json
import platform
from functools import cache
from hashlib import blake2b, file_digest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numba
import numpy as np
import torch

from capserve.engine import packing
from capserve.engine.loading import index_tensors

WHOLE_BYTES = 2 << 30
"""Checkpoints below this are digested whole, at about 1 GB/s."""

_SAMPLE_BYTES = 4096


def fingerprint_of(path: Path, dtype: torch.dtype, device: torch.device, prefill_chunk: int) -> str:
    """32 hex digits, of an engine for the checkpoint in `path`.

    Weights count by their whole content when the checkpoint is smaller than 2 GiB. Of a larger one
    the safetensors headers (names, types, shapes) and the first 4 KiB of every tensor count: a
    checkpoint that differs from another only deeper inside its tensors goes unnoticed.
    """
    values = {
        "format": packing.FORMAT,
        "dtype": str(dtype),
        "prefill_chunk": prefill_chunk,
        "machine": machine_kind(device),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "triton": _triton_version() if device.type == "cuda" else "",
        "source": source_digest(),
    }
    digest = blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16)
    digest.update(blake2b((path / "config.json").read_bytes()).digest())
    files = sorted(set(index_tensors(path).values()))
    whole = sum(file.stat().st_size for file in files) < WHOLE_BYTES
    for file in files:
        digest.update(content_digest(file) if whole else sample_digest(file))
    return digest.hexdigest()


@cache
def source_digest() -> str:
    """Of the engine's code: another block size or another order of a sum is another engine."""
    digest = blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def machine_kind(device: torch.device) -> str:
    """What decides which compiled code runs: the card, or the processor and its vector width."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu {platform.machine()} {_processor()} {capability}"


def _processor() -> str:
    """The processor's model name where the system tells it; libraries choose kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def content_digest(file: Path) -> bytes:
    """Of the whole file."""
    with file.open("rb") as handle:
        return file_digest(handle, blake2b).digest()


def sample_digest(file: Path) -> bytes:
    """Of a safetensors file's header and the first 4 KiB of each of its tensors."""
    digest = blake2b()
    with file.open("rb") as handle:
        length = handle.read(8)
        text = handle.read(int.from_bytes(length, "little"))
        digest.update(text)
        start = handle.tell()
        for name, entry in sorted(json.loads(text).items()):
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                handle.seek(start + first)
                digest.update(handle.read(min(_SAMPLE_BYTES, end - first)))
    return digest.digest()
