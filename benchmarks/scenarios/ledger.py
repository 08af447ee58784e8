"""How many tokens of a prompt must an ideal server read, and how many may this one?

Known is every prompt that was read and every token of a reply that was decoded and then absorbed:
all but its last token, which no forward pass has seen. The ideal for a prompt is its length minus
the longest prefix that it shares with something known, whatever happened in between, a restart
included. This is the number of nodes that it adds to a trie of all that was read, so that the sum
over requests that run at once does not depend on their order.

A *branch point* is a position where a prompt leaves a known sequence in its middle: known text goes
on after it, and no known sequence ends there. It counts once, however many prompts leave there. A
state can be taken up only where one was kept, so each point may cost one checkpoint interval, and
never more than all that lies before it:

    bound = 1.05 x ideal + sum over branch points of min(interval, position)

To send the same prompt again is a branch at its end: the known sequence goes on with the reply.

A server that shows no token ids is judged by its messages: what two requests share is estimated
from their characters, and marked so. The ideal is always about the prompt that the server itself
made of the messages: one that renders a history in other tokens after a restart has another ideal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

TOLERANCE = 1.05


@dataclass(frozen=True)
class Row:
    """One request, as a line of the table. Counts are tokens."""

    scene: str
    label: str
    prompt: int
    ideal: int
    actual: int | None
    """None: the server does not tell."""
    branch_at: int | None
    """Where the prompt leaves a known sequence in its middle."""
    branch_name: str | None
    """Equal for requests that leave at the same point."""
    estimated: bool
    action: str | None
    miss: str | None


@dataclass(frozen=True)
class Account:
    """A scene's sums."""

    requests: int
    prompt: int
    ideal: int
    actual: int | None
    branch_points: int
    bound: int
    estimated: bool

    @property
    def holds(self) -> bool | None:
        return None if self.actual is None else self.actual <= self.bound


def account(rows: Sequence[Row], interval: int) -> Account:
    """The sums over `rows`; `interval` is the distance of the server's checkpoints in tokens."""
    points = {row.branch_name: row.branch_at for row in rows if row.branch_at is not None}
    ideal = sum(row.ideal for row in rows)
    told = [row.actual for row in rows if row.actual is not None]
    return Account(
        requests=len(rows),
        prompt=sum(row.prompt for row in rows),
        ideal=ideal,
        actual=sum(told) if len(told) == len(rows) else None,
        branch_points=len(points),
        bound=int(TOLERANCE * ideal) + sum(min(interval, at or 0) for at in points.values()),
        estimated=any(row.estimated for row in rows),
    )


@dataclass(frozen=True)
class Shared:
    """What a new prompt shares with all that is known, in tokens."""

    tokens: int
    branches: bool
    name: str
    """Digest of what is shared: the name of the branch point."""
    estimated: bool


@dataclass
class Ledger:
    """Everything that a server has computed in one namespace."""

    _sequences: list[Tokens] = field(default_factory=list)
    _talks: list[tuple[list[str], int]] = field(default_factory=list)
    """(messages, tokens of all of them) of requests without token ids."""

    def shared(self, prompt: Tokens) -> Shared:
        best, ends = 0, True
        for known in self._sequences:
            same = _common(known, prompt)
            if same > best:
                best, ends = same, same == len(known)
            elif same == best:
                ends = ends or same == len(known)
        digest = blake2b(prompt[:best].tobytes(), digest_size=8).hexdigest()
        return Shared(best, best > 0 and not ends, digest, estimated=False)

    def learn(self, prompt: Tokens, reply: Tokens) -> None:
        """`prompt` was read, `reply` decoded; its last token was not absorbed."""
        self._sequences.append(np.concatenate([prompt, reply[:-1]]).astype(np.int32))

    def shared_by_messages(self, messages: Sequence[str]) -> Shared:
        """As `shared`, from characters: tokens are taken to be spread evenly over them."""
        best, tokens, ends = 0, 0, True
        for known, known_tokens in self._talks:
            pairs = zip(known, messages, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            count = min(len(known), len(messages)) if same is None else same
            if count < best:
                continue
            chars = sum(map(len, known[:count])) / max(1, sum(map(len, known)))
            ends = count == len(known) or (count == best and ends)
            best, tokens = count, max(tokens, int(known_tokens * chars))
        digest = blake2b("".join(messages[:best]).encode(), digest_size=8).hexdigest()
        return Shared(tokens, best > 0 and not ends, digest, estimated=True)

    def learn_messages(self, messages: list[str], tokens: int) -> None:
        self._talks.append((messages, tokens))


def plain_messages(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[str]:
    """Messages as comparable texts, tools first: ids aside, arguments as values, no reasoning."""
    texts = [json.dumps(tools)]
    for message in messages:
        calls = [
            (call["function"]["name"], _value(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        texts.append(json.dumps([message["role"], content, calls], sort_keys=True))
    return texts


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _common(a: Tokens, b: Tokens) -> int:
    limit = min(len(a), len(b))
    differs = np.flatnonzero(a[:limit] != b[:limit])
    return int(differs[0]) if len(differs) else limit
