"""The heap with lazy updates against a list that is searched each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from capserve.serving.capsules.greedy_dual import GreedyDual

KEYS = st.integers(0, 9)
VALUES = st.floats(0.0, 8.0)


def test_what_is_dear_lives_long_but_not_forever_without_use() -> None:
    order: GreedyDual[str] = GreedyDual()
    order.use("dear", 5.0)
    left = []
    for turn in range(8):
        order.use(f"cheap {turn}", 1.0)
        lowest = order.lowest(lambda key: True)
        assert lowest is not None
        order.evict(lowest)
        left.append(lowest)
    assert left.index("dear") == 4, "four evictions at 1.0 each, and a new one is as dear"


def test_nothing_is_lowest_where_nothing_may_go() -> None:
    order: GreedyDual[str] = GreedyDual()
    order.use("a", 1.0)
    assert order.lowest(lambda key: False) is None
    assert order.lowest(lambda key: True) == "a"


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order: GreedyDual[int] = GreedyDual()
        self.model: dict[int, tuple[float, float, int]] = {}  # floor at last use, value, use
        self.floor = 0.0
        self.uses = 0

    def lowest(self, staying: frozenset[int]) -> int | None:
        ranks = {k: (f + v, used) for k, (f, v, used) in self.model.items() if k not in staying}
        return min(ranks, key=lambda key: ranks[key], default=None)

    @rule(key=KEYS, value=VALUES)
    def use(self, key: int, value: float) -> None:
        self.uses += 1
        self.order.use(key, value)
        self.model[key] = (self.floor, value, self.uses)

    @rule(key=KEYS, value=VALUES)
    def reprice(self, key: int, value: float) -> None:
        if key in self.model:
            self.order.reprice(key, value)
            floor, _, used = self.model[key]
            self.model[key] = (floor, value, used)

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        self.order.discard(key)
        self.model.pop(key, None)

    @rule(staying=st.frozensets(KEYS, max_size=4))
    def evict(self, staying: frozenset[int]) -> None:
        lowest = self.order.lowest(lambda key: key not in staying)
        assert lowest == self.lowest(staying)
        if lowest is not None:
            floor, value, _ = self.model.pop(lowest)
            self.floor = max(self.floor, floor + value)
            self.order.evict(lowest)

    @invariant()
    def the_heap_stays_small(self) -> None:
        assert len(self.order) == len(self.model)
        assert len(self.order._heap) <= 2 * len(self.model) + 64


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
