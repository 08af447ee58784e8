"""Who gets in, and who shares with whom?"""

from __future__ import annotations

import pytest

from capserve.api.auth import KeyRing, namespace
from capserve.errors import AuthenticationError


def test_an_open_server_makes_one_caller_of_everyone():
    open_ring = KeyRing(())
    assert open_ring.caller(None) == open_ring.caller("Bearer whatever")


def test_each_configured_key_is_a_caller_of_its_own():
    ring = KeyRing(("alpha", "beta"))
    callers = {ring.caller("Bearer alpha"), ring.caller("bearer beta"), KeyRing(()).caller(None)}
    assert len(callers) == 3
    assert ring.caller("Bearer alpha") == KeyRing(("alpha",)).caller("Bearer alpha")
    assert not any("alpha" in caller for caller in callers)


def test_a_key_beyond_ascii_is_recognised_from_its_header_bytes():
    on_the_wire = "Bearer schlüssel".encode().decode("latin-1")
    assert KeyRing(("schlüssel",)).caller(on_the_wire)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic alpha", "alpha", "Bearer alph", "Bearer alphaa"],
)
def test_anything_but_a_whole_key_is_refused(header):
    with pytest.raises(AuthenticationError):
        KeyRing(("alpha", "beta")).caller(header)


def test_namespaces_never_cross_callers_fields_or_values():
    spaces = [
        namespace(caller, cache_key, salt)
        for caller in ("a", "b")
        for cache_key, salt in ((None, None), ("x", None), (None, "x"), ("y", None))
    ]
    assert len(set(spaces)) == len(spaces)


def test_prompt_cache_key_wins_over_cache_salt_and_empty_is_absent():
    assert namespace("a", "x", "salt") == namespace("a", "x", None)
    assert namespace("a", "", "salt") == namespace("a", None, "salt")
    assert namespace("a", "", "") == namespace("a", None, None)
