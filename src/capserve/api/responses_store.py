"""Which replies can a client still ask for, or go on from, by their ids?

Kept in memory only, as JSON bytes, for each caller apart: to everybody else an id does not exist.
Bounded in number and bytes a caller; the least recently used reply leaves first. How many callers
there are is bounded by the configured keys.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from capserve.api.schemas import quote
from capserve.errors import NotFoundError

MAX_RESPONSES = 1000
"""Of one caller."""
MAX_STORED_BYTES = 64 << 20
"""Of one caller: some hundred turns of a long conversation, each with all that came before it."""

Json = dict[str, Any]


class ResponseNotFoundError(NotFoundError):
    """No such reply: it never was, was not to be stored, was deleted, or had to make room."""

    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Stored:
    """One finished reply."""

    id: str
    input_json: bytes
    """A JSON array: all items that were read, those of earlier replies included."""
    body_json: bytes
    """The response object."""
    output_ids: tuple[str, ...]
    """Of its output items."""

    @property
    def nbytes(self) -> int:
        return len(self.input_json) + len(self.body_json)

    def items(self) -> list[Json]:
        """The conversation so far: what was read, then what was answered."""
        items: list[Json] = orjson.loads(self.input_json)
        output: list[Json] = self.body()["output"]
        return items + output

    def body(self) -> Json:
        body: Json = orjson.loads(self.body_json)
        return body


def stored(body: Json, input_json: bytes) -> Stored:
    ids = tuple(item["id"] for item in body["output"])
    return Stored(body["id"], input_json, orjson.dumps(body), ids)


class _Shelf:
    """One caller's replies."""

    def __init__(self) -> None:
        self.replies: OrderedDict[str, Stored] = OrderedDict()
        self.homes: dict[str, str] = {}
        """Output item -> its reply."""
        self.nbytes = 0

    def drop(self, response_id: str) -> None:
        reply = self.replies.pop(response_id)
        self.nbytes -= reply.nbytes
        for item_id in reply.output_ids:
            del self.homes[item_id]


class ResponseStore:
    """Thread-safe."""

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_STORED_BYTES
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()

    def put(self, caller: str, reply: Stored) -> None:
        """Keep `reply`, unless it alone is over the limit; older ones make room."""
        with self._lock:
            shelf = self._shelves.setdefault(caller, _Shelf())
            assert reply.id not in shelf.replies, "ids are made once"
            if reply.nbytes > self._max_bytes:
                return
            shelf.replies[reply.id] = reply
            shelf.homes.update(dict.fromkeys(reply.output_ids, reply.id))
            shelf.nbytes += reply.nbytes
            while shelf.nbytes > self._max_bytes or len(shelf.replies) > self._max_responses:
                shelf.drop(next(iter(shelf.replies)))

    def get(self, caller: str, response_id: str, param: str | None = None) -> Stored:
        """Raises `ResponseNotFoundError`, which blames `param`."""
        with self._lock:
            shelf = self._shelves.get(caller)
            reply = None if shelf is None else shelf.replies.get(response_id)
            if shelf is None or reply is None:
                raise _unknown("response", response_id, param)
            shelf.replies.move_to_end(response_id)
            return reply

    def item(self, caller: str, item_id: str, param: str) -> Json:
        """An output item of a stored reply. Raises `ResponseNotFoundError`."""
        with self._lock:
            shelf = self._shelves.get(caller)
            home = None if shelf is None else shelf.homes.get(item_id)
        if home is None:
            raise _unknown("item", item_id, param)
        output: Sequence[Json] = self.get(caller, home, param).body()["output"]
        return next(item for item in output if item["id"] == item_id)

    def delete(self, caller: str, response_id: str) -> None:
        """Raises `ResponseNotFoundError`."""
        with self._lock:
            shelf = self._shelves.get(caller)
            if shelf is None or response_id not in shelf.replies:
                raise _unknown("response", response_id, None)
            shelf.drop(response_id)

    def footprint(self, caller: str) -> tuple[int, int]:
        """(replies, bytes) of one caller."""
        with self._lock:
            shelf = self._shelves.get(caller)
            return (0, 0) if shelf is None else (len(shelf.replies), shelf.nbytes)


def _unknown(what: str, name: str, param: str | None) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"There is no stored {what} {quote(name, 64)}.", param=param)
