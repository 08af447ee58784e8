"""The reuse policy against brute force, and its words case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_harness import chain_of, ids, make_prompt, some_words, system, user

from capserve.serving.capsules.catalog import Loss
from capserve.serving.capsules.footprint import Location
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.tiers import DISK
from capserve.serving.journal import JournalView, TurnMark, block_digests, prefix_digests
from capserve.serving.misses import MissKind
from capserve.serving.prefix import AutoPrefixPolicy, HotView, PrefixAction, Rates
from capserve.testing.fake_engine import fake_limits
from capserve.text.messages import Conversation
from capserve.text.prompt import Prompt

LIMITS = fake_limits(prefill_chunk=16, grid=4, small_state_bytes=100, kv_bytes_per_token=3)
POLICY = AutoPrefixPolicy(LIMITS, checkpoint_interval=32)
EXACT = replace(POLICY, exact=True)


def rates_of(prefill: float, restore: float, disk: float = 0.004) -> Rates:
    return Rates(prefill, 1.0, {"host": restore, DISK: disk})


RATES = rates_of(1.0, 0.001)


@dataclass
class Index:
    keys: set[CapsuleKey] = field(default_factory=set)
    lost: dict[CapsuleKey, Loss] = field(default_factory=dict)
    on_disk: dict[CapsuleKey, int] = field(default_factory=dict)
    """Those that lie there alone, and the bytes to read."""
    decoded: set[CapsuleKey] = field(default_factory=set)
    """Those that a cold run would not come to."""

    def exact(self, key: CapsuleKey) -> bool:
        return key not in self.decoded

    def add(
        self, namespace: str, tokens: Sequence[int], read_bytes: int | None = None
    ) -> CapsuleKey:
        key = CapsuleKey(namespace, len(tokens), prefix_digests(ids(tokens), [len(tokens)])[0])
        self.keys.add(key)
        if read_bytes is not None:
            self.on_disk[key] = read_bytes
        return key

    def locate(self, key: CapsuleKey) -> Location:
        if key in self.on_disk:
            return Location(DISK, self.on_disk[key])
        return Location("host", LIMITS.capsule_bytes(key.position))

    def lose(self, namespace: str, tokens: Sequence[int], loss: Loss) -> None:
        key = self.add(namespace, tokens)
        self.keys.remove(key)
        self.lost[key] = loss

    def positions(self, namespace: str) -> list[int]:
        return sorted({key.position for key in self.keys if key.namespace == namespace})

    def holds(self, key: CapsuleKey) -> bool:
        return key in self.keys

    def lost_positions(self, namespace: str) -> list[int]:
        return sorted({key.position for key in self.lost if key.namespace == namespace})

    def loss(self, key: CapsuleKey) -> Loss | None:
        return self.lost.get(key)


def raw_prompt(tokens: Sequence[int], spliced: int = 0, prompt_end: int | None = None) -> Prompt:
    end = len(tokens) if prompt_end is None else prompt_end
    return Prompt(ids(tokens), Conversation(()), (b"",), 0, end, spliced)


def journal(
    name: str, tokens: Sequence[int], namespace: str = "k/a", busy: bool = False
) -> JournalView:
    return JournalView(name, namespace, ids(tokens), (), (), busy, block_digests(ids(tokens)))


# -- against brute force ---------------------------------------------------------------------

HISTORY = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=400, deadline=None)
@given(
    prompt=HISTORY,
    histories=st.lists(
        st.tuples(HISTORY, st.sampled_from(["k/a", "k/a", "k/b"]), st.booleans()), max_size=4
    ),
    hot=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 1), st.booleans())),
    kept=st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(1, 9)),
        st.one_of(st.none(), st.integers(1, 400)),
        max_size=8,
    ),
    spliced=st.integers(0, 9),
    exact=st.booleans(),
    rates=st.sampled_from([RATES, rates_of(1.0, 1.0), rates_of(0.01, 0.001, 0.0001)]),
    at_most=st.one_of(st.none(), st.integers(0, 9)),
)
def test_the_plan_is_the_cheapest_state_that_starts_the_prompt(
    prompt: list[int],
    histories: list[tuple[list[int], str, bool]],
    hot: tuple[int, int, bool] | None,
    kept: dict[tuple[int, int], int | None],
    spliced: int,
    exact: bool,
    rates: Rates,
    at_most: int | None,
) -> None:
    journals = [journal(f"s{i}", h, ns, busy) for i, (h, ns, busy) in enumerate(histories)]
    index = Index()
    capsules: dict[tuple[str, tuple[int, ...]], int | None] = {}
    for (which, position), read_bytes in kept.items():
        if which < len(histories) and position <= len(histories[which][0]):
            tokens, namespace = histories[which][0][:position], histories[which][1]
            if capsules.setdefault((namespace, tuple(tokens)), read_bytes) == read_bytes:
                index.add(namespace, tokens, read_bytes)
    view = None
    if hot is not None and hot[0] < len(journals):
        it = journals[hot[0]]
        view = HotView(it, len(it.tokens) - hot[1], bit_exact=hot[2])
    policy = EXACT if exact else POLICY
    plan = policy.plan(raw_prompt(prompt, spliced), "k/a", view, journals, index, rates, at_most)

    limit = len(prompt) if at_most is None else min(len(prompt), at_most)
    live = 0
    costs: list[tuple[float, int]] = []
    if view is not None and view.journal.namespace == "k/a":
        absorbed = view.journal.tokens.tolist()[: view.position]
        while live < min(len(absorbed), len(prompt)) and absorbed[live] == prompt[live]:
            live += 1
        fits = 0 < len(absorbed) <= limit and prompt[: len(absorbed)] == absorbed
        fits = fits and not view.journal.busy
        if fits and not (exact and (len(absorbed) % 4 or not view.bit_exact)):
            left = len(prompt) - len(absorbed)
            costs.append((left * rates.prefill_ms_per_token, len(absorbed)))
    for (namespace, tokens), read_bytes in capsules.items():
        position = len(tokens)
        if namespace != "k/a" or position > limit or tuple(prompt[:position]) != tokens:
            continue
        if exact and position % 4:
            continue
        moved = 100 + 3 * max(0, position - live)
        cost = moved * rates.restore_ms_per_byte["host"]
        cost += (read_bytes or 0) * rates.restore_ms_per_byte["disk"]
        costs.append((cost + (len(prompt) - position) * rates.prefill_ms_per_token, position))
    if not costs:
        assert plan.action is PrefixAction.REBUILD
        assert plan.position == 0
        assert plan.miss is not None, "a silent zero"
        return
    best = min(cost for cost, _ in costs)
    assert abs(plan.estimated_ms - best) < 1e-9
    assert (plan.estimated_ms, plan.position) in [(c, p) for c, p in costs if abs(c - best) < 1e-9]
    check_words(plan, prompt, spliced, view, journals)


def check_words(plan, prompt, spliced, view, journals) -> None:  # type: ignore[no-untyped-def]
    """The definitions of prefix.py's docstring, read one by one."""
    p = plan.position
    lengths = {
        j.session_id: len(j.tokens)
        for j in journals
        if j.namespace == "k/a" and j.tokens.tolist()[:p] == prompt[:p] and len(j.tokens) >= p
    }
    idle = {j.session_id for j in journals if not j.busy}
    assert plan.session_id is None or plan.session_id in idle, "a busy session is nobody else's"
    assert (plan.tier is None) == (plan.capsule is None)
    match plan.action:
        case PrefixAction.EXACT:
            assert plan.capsule is None
            assert p == len(prompt)
        case PrefixAction.APPEND | PrefixAction.MESSAGE_APPEND:
            assert plan.capsule is None
            assert plan.session_id == view.journal.session_id
            assert (spliced >= p) == (plan.action is PrefixAction.MESSAGE_APPEND)
        case PrefixAction.TRUNCATE:
            assert lengths[view.journal.session_id] > p + 1
            assert plan.session_id is None
        case PrefixAction.FORK:
            assert plan.session_id is None
            assert lengths
            assert all(length > p + 1 for name, length in lengths.items() if name in idle)
        case PrefixAction.RESTORE:
            assert plan.capsule is not None
            if plan.session_id is None:
                assert not lengths
            else:
                assert lengths[plan.session_id] <= p + 1


# -- the words, case by case -----------------------------------------------------------------

A = list(range(20, 60))


def test_all_seven_actions_can_be_reached() -> None:
    long = journal("long", A)
    hot = HotView(long, 39, bit_exact=False)
    tip = journal("tip", A[:30])
    seen = {}
    for name, prompt, view, journals, capsules in (
        ("exact", raw_prompt(A[:39]), hot, [long], []),
        ("append", raw_prompt([*A, 1]), hot, [long], []),
        ("message_append", raw_prompt([*A, 1], spliced=40), hot, [long], []),
        ("truncate", raw_prompt([*A[:20], 1]), hot, [long], [A[:20]]),
        ("fork", raw_prompt([*A[:20], 1]), None, [long], [A[:20]]),
        ("restore", raw_prompt([*A[:30], 1]), None, [long, tip], [A[:30]]),
        ("rebuild", raw_prompt([1, 2]), hot, [long], [A[:20]]),
    ):
        index = Index()
        for tokens in capsules:
            index.add("k/a", tokens)
        seen[name] = POLICY.plan(prompt, "k/a", view, journals, index, RATES).action.value
    assert seen == {action.value: action.value for action in PrefixAction}


def test_the_pending_token_may_be_decided_differently() -> None:
    hot = HotView(journal("s", A), 39, bit_exact=False)
    plan = POLICY.plan(raw_prompt([*A[:39], 7, 7]), "k/a", hot, [hot.journal], Index(), RATES)
    assert (plan.action, plan.position) == (PrefixAction.APPEND, 39)
    assert plan.miss is None, "no state had absorbed it"


def test_the_cheaper_of_hot_state_and_capsule_is_taken() -> None:
    hot = HotView(journal("s", A[:2]), 2, bit_exact=False)
    index = Index()
    index.add("k/a", A)
    args = (raw_prompt([*A, 1]), "k/a", hot, [hot.journal], index)
    assert POLICY.plan(*args, rates_of(1.0, 0.001)).action is PrefixAction.RESTORE
    assert POLICY.plan(*args, rates_of(0.001, 1.0)).action is PrefixAction.APPEND


def test_a_short_capsule_in_memory_is_weighed_against_a_long_one_on_disk() -> None:
    index = Index()
    index.add("k/a", A[:30])
    index.add("k/a", A, read_bytes=100)
    args = (raw_prompt([*A, 1]), "k/a", None, [], index)
    near = POLICY.plan(*args, rates_of(1.0, 0.001, disk=1.0))
    assert (near.position, near.tier) == (30, "host")
    far = POLICY.plan(*args, rates_of(1.0, 0.001, disk=0.05))
    assert (far.position, far.tier) == (40, DISK)
    assert far.estimated_ms == 1.0 + 220 * 0.001 + 100 * 0.05


def test_a_busy_session_is_forked_from_and_never_continued() -> None:
    index = Index()
    index.add("k/a", A[:30])
    busy = journal("busy", A[:30], busy=True)
    prompt = raw_prompt([*A[:30], 1])
    plan = POLICY.plan(prompt, "k/a", None, [busy], index, RATES)
    assert (plan.action, plan.session_id, plan.parent_id) == (PrefixAction.FORK, None, "busy")
    idle = journal("idle", A[:30])
    for journals in ([busy, idle], [idle, busy]):
        plan = POLICY.plan(prompt, "k/a", None, journals, index, RATES)
        assert (plan.action, plan.session_id) == (PrefixAction.RESTORE, "idle")
    hot = HotView(busy, 30, bit_exact=True)
    assert POLICY.plan(prompt, "k/a", hot, [busy], Index(), RATES).position == 0


def test_an_old_tool_result_that_was_edited_costs_no_more_than_what_comes_after_it() -> None:
    # Four turns, each with a boundary at its prompt's end and at its own; the third is edited.
    journal_tokens = list(range(10, 410))
    ends = [(80, 95), (180, 195), (280, 295), (385, 399)]
    index = Index()
    for pair in ends:
        for end in pair:
            index.add("k/a", journal_tokens[:end])
    known = journal("s", journal_tokens)
    hot = HotView(known, 399, bit_exact=False)
    for edited, resumes_at in ((250, 195), (195, 195), (194, 180), (283, 280), (60, 0)):
        prompt = raw_prompt([*journal_tokens[:edited], 9, *journal_tokens[edited + 1 :]])
        plan = POLICY.plan(prompt, "k/a", hot, [known], index, RATES)
        assert plan.position == resumes_at
        if resumes_at:
            assert (plan.action, plan.parent_id) == (PrefixAction.TRUNCATE, "s")
        assert plan.miss is not None
        assert plan.miss.token == edited


def test_exact_mode_takes_neither_decoded_nor_off_grid_states() -> None:
    index = Index()
    index.add("k/a", A[:10])
    prompt = raw_prompt([*A, 1])
    for hot in (HotView(journal("s", A[:36]), 36, False), HotView(journal("s", A[:35]), 35, True)):
        plan = EXACT.plan(prompt, "k/a", hot, [hot.journal], index, RATES)
        assert plan.action is PrefixAction.REBUILD
        assert plan.miss is not None
        assert plan.miss.kind is MissKind.NOT_ON_GRID
    clean = HotView(journal("s", A[:36]), 36, True)
    assert EXACT.plan(prompt, "k/a", clean, [clean.journal], index, RATES).position == 36


def test_exact_mode_never_starts_from_a_capsule_that_is_not_exact_whoever_kept_it() -> None:
    index = Index()
    clean, decoded = index.add("k/a", A[:8]), index.add("k/a", A[:32])
    index.decoded.add(decoded)
    prompt = raw_prompt([*A, 1])
    assert POLICY.plan(prompt, "k/a", None, [], index, RATES).capsule == decoded
    assert EXACT.plan(prompt, "k/a", None, [], index, RATES).capsule == clean
    index.keys.remove(clean)
    plan = EXACT.plan(prompt, "k/a", None, [], index, RATES)
    assert plan.action is PrefixAction.REBUILD
    assert plan.miss is not None
    assert plan.miss.kind is MissKind.NOT_ON_GRID


def test_a_divergence_names_the_message_and_the_token() -> None:
    first = [system(some_words(10)), user(some_words(20, seed=1)), user(some_words(5, seed=2))]
    tokens = make_prompt(first).tokens
    known = JournalView("s", "k/a", tokens, chain_of(first), (TurnMark(len(tokens) - 1, 3),))
    edited = make_prompt([*first[:1], user(some_words(20, seed=9)), *first[2:]])
    plan = POLICY.plan(edited, "k/a", None, [known], Index(), RATES)
    assert str(plan.miss) == "diverged(message 1, token 13)"
    retooled = replace(edited, chain=tuple(bytes([7]) + digest for digest in edited.chain))
    plan = POLICY.plan(retooled, "k/a", None, [known], Index(), RATES)
    assert str(plan.miss) == "diverged(tools_or_switches, token 13)"


def test_a_divergence_inside_messages_that_mean_the_same_is_found_by_its_marks() -> None:
    messages = [user(some_words(4)), user(some_words(4, seed=1)), user(some_words(4, seed=2))]
    prompt = make_prompt(messages)
    tokens = prompt.tokens.copy()
    tokens[8] = 9  # the journal has a hidden control token where the prompt has none
    known = JournalView("s", "k/a", tokens, prompt.chain, (TurnMark(6, 1), TurnMark(18, 3)))
    plan = POLICY.plan(prompt, "k/a", None, [known], Index(), RATES)
    assert str(plan.miss) == "diverged(message 1, token 8)"


def test_lost_capsules_name_their_reason_only_when_they_would_have_helped() -> None:
    index = Index()
    index.lose("k/a", A[:30], Loss.EVICTED)
    prompt = raw_prompt([*A, 1])
    plan = POLICY.plan(prompt, "k/a", None, [], index, RATES)
    assert str(plan.miss) == "evicted"
    index.add("k/a", A[:35])
    index.lose("k/a", A[:38], Loss.OVER_BUDGET)
    plan = POLICY.plan(prompt, "k/a", None, [], index, RATES)
    assert (plan.position, str(plan.miss)) == (35, "over_budget")
    index.add("k/a", A)
    plan = POLICY.plan(prompt, "k/a", None, [], index, RATES)
    assert (plan.position, plan.miss) == (40, None)


def test_another_owners_journal_is_never_a_reason() -> None:
    prompt = make_prompt([system(some_words(10)), user(some_words(5))])
    for namespace, expected in (("k/b", "namespace"), ("z/b", "no_candidate")):
        known = JournalView("s", namespace, prompt.tokens, prompt.chain)
        plan = POLICY.plan(prompt, "k/a", None, [known], Index(), RATES)
        assert str(plan.miss) == expected


def test_the_boundaries_of_a_prefill_are_the_places_worth_coming_back_to() -> None:
    prompt = replace(raw_prompt(list(range(100)), prompt_end=97), system_end=21)
    assert POLICY.boundaries(prompt, 0) == (21, 32, 64, 96, 97)
    assert POLICY.boundaries(prompt, 32) == (64, 96, 97)
    assert POLICY.boundaries(prompt, 0, pin=50) == (21, 32, 50, 64, 96, 97)
    assert EXACT.boundaries(prompt, 0, pin=50) == (20, 32, 48, 64, 96)
    marked = replace(prompt, breakpoints=(40, 97))
    assert POLICY.boundaries(marked, 0) == (21, 32, 40, 64, 96, 97)
    assert EXACT.boundaries(replace(prompt, breakpoints=(43,)), 0) == (20, 32, 40, 64, 96)
    assert POLICY.boundaries(prompt, 100) == ()
    assert POLICY.boundaries(raw_prompt([1, 2, 3], prompt_end=0), 0) == ()


def test_a_reply_that_is_continued_has_a_boundary_at_its_end() -> None:
    prompt = replace(raw_prompt(list(range(90)), prompt_end=7), continues_reply=True)
    assert POLICY.boundaries(prompt, 0) == (7, 32, 64, 90)
    assert EXACT.boundaries(prompt, 0) == (4, 32, 64, 88)


def test_a_commit_is_kept_anywhere_but_in_exact_mode_only_where_bits_are_equal() -> None:
    assert POLICY.on_commit(37, bit_exact=False)
    assert not POLICY.on_commit(0, bit_exact=True)
    assert EXACT.on_commit(36, bit_exact=True)
    assert not EXACT.on_commit(36, bit_exact=False)
    assert not EXACT.on_commit(37, bit_exact=True)


def test_a_cancelled_reply_is_kept_once_it_is_long_enough_to_be_worth_it() -> None:
    assert not POLICY.on_commit(99, bit_exact=False, cancelled_after=63)
    assert POLICY.on_commit(100, bit_exact=False, cancelled_after=64)
    assert not EXACT.on_commit(100, bit_exact=False, cancelled_after=64)


def test_a_pin_is_the_prompts_end_or_that_many_tokens() -> None:
    prompt = raw_prompt(list(range(100)), prompt_end=97)
    assert POLICY.pin_position(prompt, False) is None
    assert POLICY.pin_position(prompt, True) == 97
    assert POLICY.pin_position(prompt, 1) == 1
    assert EXACT.pin_position(prompt, True) == 96
    assert EXACT.pin_position(prompt, 3) == 0
    assert POLICY.pin_position(replace(prompt, prompt_end=0), True) == 100


def test_a_plan_over_a_long_history_reads_arrays_and_not_tokens() -> None:
    # Not a stopwatch: the index is asked once a position, whatever the length of the prompt.
    tokens = np.arange(200_000, dtype=np.int32)
    index = Index()
    for position in range(2000, 200_000, 2000):
        index.add("k/a", tokens[:position])  # type: ignore[arg-type]
    asked = []
    holds = index.holds
    index.holds = lambda key: bool(asked.append(key)) or holds(key)  # type: ignore[method-assign]
    prompt = Prompt(tokens, Conversation(()), (b"",), 0, len(tokens))
    plan = POLICY.plan(prompt, "k/a", None, [], index, RATES)
    assert (plan.action, plan.position) == (PrefixAction.RESTORE, 198_000)
    assert len(asked) == 99
