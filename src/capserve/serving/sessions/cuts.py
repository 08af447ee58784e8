"""Where may a session be cut back to?

At the end of a prompt or of a turn: places where messages end, so that conversation and journal can
be cut alike. Pure functions over a `Session`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from capserve.errors import InvalidRequestError
from capserve.serving.sessions.registry import Session
from capserve.text.messages import Conversation

MAX_NAMED = 24
"""Positions that a refusal lists: the last ones, which are those a person would go back to."""


@dataclass(frozen=True, slots=True)
class End:
    """A place where messages end: the journal may be cut here."""

    position: int
    messages: int
    kind: str


def shortened(conversation: Conversation, messages: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:messages])


def ends_of(session: Session) -> Mapping[int, End]:
    """Where messages of its conversation end, by position in the journal, ascending.

    A turn that was cancelled may have left the journal of another conversation: its marks say
    nothing about this one's messages.
    """
    known = 0 if session.conversation is None else len(session.conversation.messages)
    length = len(session.journal)
    ends = [End(mark.position, mark.messages, "prompt_end") for mark in session.journal.marks]
    ends += [End(turn.position, turn.messages, "turn_end") for turn in session.turns]
    legal = [
        end
        for end in ends
        if end.messages <= known and 0 < end.position <= length and session.knows(end.messages)
    ]
    return {end.position: end for end in sorted(legal, key=lambda end: end.position)}


def end_at(ends: Mapping[int, End], position: int) -> End | None:
    """What ends at `position`. A turn ends where its state does, and also one token later: there
    stands the token that closed it, which the state has not absorbed."""
    if position in ends:
        return ends[position]
    before = ends.get(position - 1)
    return before if before is not None and before.kind == "turn_end" else None


def chosen_end(session: Session, boundary: int | None, turns: int | None) -> End:
    ends = ends_of(session)
    if boundary is not None and turns is not None:
        raise InvalidRequestError("Give turns or boundary, not both.", param="boundary")
    if boundary is not None:
        end = end_at(ends, boundary)
        if end is None:
            raise no_such_boundary(boundary, sorted(ends))
        return end
    assert turns is not None
    replies = replies_of(session)
    there = len(replies)
    if not 0 <= turns <= there:
        raise InvalidRequestError(
            f"turns must be at most {there}, since the session has {there} turns; got {turns}.",
            param="turns",
        )
    messages = 0 if turns == there else replies[there - turns - 1]
    known = [end for end in ends.values() if end.messages <= messages]
    if not known:
        return End(0, messages, "start")
    # Where the template shows a reply otherwise than it was generated (old thinking dropped), its
    # end has no place of its own in the journal: the last known one before it is where states are.
    last = known[-1]
    return last if last.messages == messages else End(last.position, messages, "prompt_end")


def replies_of(session: Session) -> list[int]:
    """A turn ends with the assistant's message: how many messages there are then, for each."""
    conversation = session.conversation
    said = () if conversation is None else conversation.messages
    return [count for count, message in enumerate(said, start=1) if message.role == "assistant"]


def no_such_boundary(position: int, there: list[int]) -> InvalidRequestError:
    shown = ", ".join(map(str, there[-MAX_NAMED:])) or "none"
    more = f" (and {len(there) - MAX_NAMED} before them)" if len(there) > MAX_NAMED else ""
    return InvalidRequestError(
        f"boundary must be one of {shown}{more}, got {position}.", param="boundary"
    )
