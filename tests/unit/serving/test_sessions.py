"""Who is alive, and who is hot."""

from __future__ import annotations

import pytest

from capserve.serving.journal import Journal, SpanKind
from capserve.serving.sessions.registry import Session, SessionRegistry


def journal(length: int) -> Journal:
    made = Journal()
    made.append([1] * length, SpanKind.PREFILL)
    return made


def add(registry: SessionRegistry, now: float, length: int = 10) -> Session:
    return registry.create("k/a", journal(length), now)


def test_the_least_recently_used_sessions_go_beyond_the_limit() -> None:
    registry = SessionRegistry(max_active=2, idle_ttl_s=100.0)
    first, second = add(registry, 0.0), add(registry, 1.0)
    registry.touch(first, 2.0)
    third = add(registry, 3.0)
    registry.trim()
    assert [view.session_id for view in registry.views()] == [first.id, third.id]
    with pytest.raises(KeyError):
        registry.get(second.id)


def test_sessions_that_are_idle_for_longer_than_the_ttl_expire() -> None:
    registry = SessionRegistry(max_active=9, idle_ttl_s=10.0)
    add(registry, 0.0)
    young = add(registry, 5.0)
    registry.expire(10.0)
    assert len(registry) == 2
    registry.expire(10.5)
    assert [view.session_id for view in registry.views()] == [young.id]
    registry.expire(99.0)
    assert len(registry) == 0


def test_an_expired_session_is_not_hot_any_more() -> None:
    registry = SessionRegistry(max_active=9, idle_ttl_s=10.0)
    session = add(registry, 0.0)
    registry.mark_hot(session, 10)
    registry.expire(11.0)
    assert registry.hot is None
    assert registry.hot_view(grid=64) is None
    with pytest.raises(AssertionError, match="only a live session"):
        registry.mark_hot(session, 10)


def test_a_session_is_hot_only_where_its_journal_is() -> None:
    registry = SessionRegistry(max_active=9, idle_ttl_s=10.0)
    session = add(registry, 0.0, length=10)
    registry.mark_hot(session, 9)
    view = registry.hot_view(grid=64)
    assert view is not None
    assert (view.position, view.bit_exact, view.journal.session_id) == (9, True, session.id)
    registry.clear_hot()
    assert registry.hot_view(grid=64) is None
    for position in (8, 11):
        with pytest.raises(AssertionError, match="journal 10 tokens"):
            registry.mark_hot(session, position)


def test_a_busy_session_neither_expires_nor_makes_room() -> None:
    registry = SessionRegistry(max_active=1, idle_ttl_s=10.0)
    busy = add(registry, 0.0)
    busy.busy = True
    idle, newest = add(registry, 1.0), add(registry, 2.0)
    registry.trim()
    assert registry.all() == [busy, newest], "the idle one goes before the one that is worked on"
    registry.expire(99.0)
    assert registry.all() == [busy]
    assert registry.named(idle.id) is None
    with pytest.raises(AssertionError, match="a turn works on"):
        registry.drop(busy)
    assert busy.view().busy


def test_whoever_watches_hears_of_each_end_once() -> None:
    registry = SessionRegistry(max_active=1, idle_ttl_s=10.0)
    gone: list[str] = []
    registry.watch_ends(gone.append)
    first, second, third = add(registry, 0.0), add(registry, 0.0), add(registry, 0.0)
    registry.drop(first)
    registry.trim()
    registry.expire(99.0)
    assert gone == [first.id, second.id, third.id]


def test_a_session_that_lived_before_comes_back_under_its_name_once() -> None:
    registry = SessionRegistry(max_active=9, idle_ttl_s=10.0)
    session = Session("as before", "k/a", journal(5), 0.0)
    registry.add(session)
    assert registry.named("as before") is session
    with pytest.raises(AssertionError, match="is alive"):
        registry.add(session)
