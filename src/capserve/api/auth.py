"""Who is asking, and with whom may this request share state?

Keys are bearer tokens, or come in `x-api-key`; none configured means that the server is open. The
*caller* is a digest of the key, so that the key itself goes no further than this module. The
*namespace* binds reuse to that caller, and inside it to the request's own isolation field.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from capserve.errors import AuthenticationError
from capserve.serving.misses import OWNER_SEPARATOR


def _digest(*parts: str) -> str:
    """A digest in which no two different tuples of parts look alike (each has its length)."""
    state = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode()
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()


class KeyRing:
    """The configured API keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def caller(self, authorization: str | None, x_api_key: str | None = None) -> str:
        """The caller behind the values of these two headers.

        Some clients fill both, one of them with a left-over: it is enough that either has a key,
        and `Authorization` counts first. Without configured keys everyone is the same caller,
        whatever they send: an unchecked token isolates nobody. Raises `AuthenticationError` for a
        missing or wrong key.
        """
        if not self._keys:
            return _digest("open")
        scheme, _, token = (authorization or "").partition(" ")
        shown = [token.strip() if scheme.lower() == "bearer" else "", (x_api_key or "").strip()]
        if not any(shown):
            raise AuthenticationError(
                "This server needs an API key: send the header 'Authorization: Bearer KEY' "
                "or 'x-api-key: KEY'."
            )
        good = [token for token in shown if token and self._has(token)]
        if not good:
            raise AuthenticationError("The API key is not one of this server's keys.")
        return _digest("key", good[0])

    def _has(self, token: str) -> bool:
        # latin-1 is how header bytes became this string, so it gives back the client's own bytes.
        given = token.encode("latin-1", "replace")
        # All keys are compared, always: which one matched must not show in the time taken.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def namespace(caller: str, prompt_cache_key: str | None, cache_salt: str | None) -> str:
    """The isolation key for reuse: `prompt_cache_key` > `cache_salt` > default, per caller.

    The field's name is part of the digest: a salt that spells somebody's cache key is still apart.
    """
    if prompt_cache_key:
        inside = _digest("prompt_cache_key", prompt_cache_key)
    elif cache_salt:
        # A salt is a wall: with an owner of its own, not even a miss reason looks past it.
        return f"{_digest(caller, 'cache_salt', cache_salt)}{OWNER_SEPARATOR}salt"
    else:
        inside = "default"
    return f"{caller}{OWNER_SEPARATOR}{inside}"
