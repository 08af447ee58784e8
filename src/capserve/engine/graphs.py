"""How is a fixed chain of launches replayed with one call?

As a captured CUDA graph. Everything that a piece reads or writes lies at a fixed address, and what
changes from step to step is read from device memory, so one capture serves for good. All captures
happen in `record`; nothing is captured in a live request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launches = Callable[[], None]


class Graphs:
    """Pieces by name. Without capture a piece is launched anew at each `run`: the same kernels,
    the same bits."""

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self._device = device
        self._capture = capture
        self._pieces: dict[str, Launches] = {}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def record(self, name: str, launches: Launches) -> None:
        """Run the launches once, which compiles their kernels, then capture them."""
        self._pieces[name] = launches
        if not self._capture:
            return
        launches()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            launches()
        self._graphs[name] = graph

    def run(self, name: str) -> None:
        graph = self._graphs.get(name)
        if graph is None:
            self._pieces[name]()
        else:
            graph.replay()
