"""How are the kernels of a decode step launched?

With programmatic dependent launch where the card can (compute capability 9.0 and later): the blocks
of a kernel are brought up while the one in front of it still runs. They may load weights and
constants at once and wait before the first access to what an earlier kernel writes or reads. About
five small kernels stand in every layer, so the gaps between them are a visible part of a step.

    PDL=launch.PDL, launch_pdl=launch.PDL        in the wrapper, read at each call

The wait covers only the kernel directly in front, so every kernel of the chain must wait, also one
that needs nothing: else its own successor starts before what came earlier is done.
"""

from __future__ import annotations

import os
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on the CPU: there is no card to compile for."""


@cache
def _dependent_launch() -> bool:
    if INTERPRETED or os.environ.get("CAPSERVE_PDL") == "0" or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def __getattr__(name: str) -> bool:
    """`PDL`, decided when it is first asked for: whoever only imports this has no card in hand.
    CAPSERVE_PDL=0 turns it off, to see what it brings or to look for a race."""
    if name == "PDL":
        return _dependent_launch()
    raise AttributeError(name)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability; (0, 0) for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run at the same time at least; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def readable_fp8(weight: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn as kernels can load it: as it is from compute capability 8.9, else as uint8."""
    native = INTERPRETED or capability(weight.device) >= (8, 9)
    return weight if native else weight.view(torch.uint8)
