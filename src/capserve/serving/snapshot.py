"""What may other threads know of the worker thread's things?

A frozen value, made by that thread and replaced whole after each turn: nobody who looks at
`/health` reaches for the engine, the sessions or the store.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from capserve.serving.capsules.footprint import Footprint


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
