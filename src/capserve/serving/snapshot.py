"""What may other threads know of the worker thread's things?

A frozen value, made by that thread and replaced whole after each turn: nobody who looks at
`/health` reaches for the engine, the sessions or the store. And where the worker stands, which is
read under its condition.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from capserve.serving.capsules.footprint import Footprint
from capserve.serving.watch import Overdue

Status = Literal["ok", "starting", "draining", "stopping", "stuck", "error"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    sessions: int
    hot_position: int | None
    capsules: Footprint
    graph_capture_count: int

    def health(self) -> dict[str, Any]:
        """Its part of `/health`. `degraded`: what is switched off while the rest goes on."""
        tiers = self.capsules.tiers
        return {
            "degraded": [f"{name}: {t.fault}" for name, t in tiers.items() if t.fault is not None],
            "sessions": self.sessions,
            "hot_position": self.hot_position,
            "capsules": asdict(self.capsules),
        }


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the worker stands at one moment."""

    started: bool
    draining: bool
    stopping: bool
    running: str | None
    """Request id of the running turn."""
    parked: int
    fault: str | None
    faults: int
    overdue: Overdue | None

    @property
    def leaving(self) -> bool:
        return self.draining or self.stopping

    @property
    def open(self) -> bool:
        """Turns are taken."""
        return self.started and not self.leaving and self.fault is None

    @property
    def status(self) -> Status:
        if self.fault is not None:
            return "error"
        # Before draining: an engine that hangs is why a drain will not end.
        if self.overdue is not None:
            return "stuck"
        if self.stopping:
            return "stopping"
        if self.draining:
            return "draining"
        return "ok" if self.started else "starting"

    def health(self) -> dict[str, Any]:
        """Its part of `/health`."""
        return {
            "status": self.status,
            "ready": self.status == "ok",
            "draining": self.leaving,
            "running": self.running,
            "parked": self.parked,
            "faults": self.faults,
            "fault": self.fault,
            "stuck": None if self.overdue is None else str(self.overdue),
        }
