"""What machine is this: versions, processor, memory, ports?

Facts only, from the standard library and the kernel's own files; what they mean is for the doctor.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from pathlib import Path

NEEDED = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "fastapi",
    "uvicorn",
    "pydantic",
    "huggingface-hub",
)
OPTIONAL = ("openai", "transformers", "triton")

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "asimddp", "bf16", "sve")
"""The ones that decide how fast float32 and bfloat16 products are."""


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Installed version of each package, None where it is missing."""
    out: dict[str, str | None] = {}
    for name in packages:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


def processor() -> tuple[str, tuple[str, ...]]:
    """Name and the `CPU_FEATURES` it has; the features are empty where the system won't say."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        match key.strip():
            case "model name":
                name = value.strip()
            case "flags" | "Features":
                flags = frozenset(value.split())
    return name, tuple(feature for feature in CPU_FEATURES if feature in flags)


def usable_cores() -> int:
    """Cores that this process may run on, which a container may keep below the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> tuple[int, int] | None:
    """(available, total) bytes of host memory, or None where the system won't say."""
    found = {}
    for line in _lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        if key in ("MemTotal", "MemAvailable"):
            found[key] = int(value.split()[0]) * 1024
    if len(found) == 2:
        return found["MemAvailable"], found["MemTotal"]
    return None


def port_problem(host: str, port: int) -> str | None:
    """Why a server can't listen on `host:port`, or None when it can. Port 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
