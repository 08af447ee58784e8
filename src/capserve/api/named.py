"""Which conversation does a request mean that names a session?

A session belongs to its caller: to everybody else it does not exist. When the sent messages begin
with what the session has said so far, they are the whole history, as a client sends it that keeps
one. So are messages that begin with a system message when the session does: nobody says that twice,
and such a history was edited. Otherwise they are new, and follow the session's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from capserve.api.auth import namespace
from capserve.api.schemas import ChatRequest, quote
from capserve.errors import InvalidRequestError
from capserve.serving.misses import owner_of
from capserve.serving.sessions.desk import SessionNotFoundError
from capserve.serving.sessions.transcripts import KnownSession, Transcripts
from capserve.text.messages import Conversation
from capserve.text.prompt import PromptBuilder, TurnRecord


@dataclass(frozen=True, slots=True)
class Subject:
    """What a request is about, and in which namespace."""

    conversation: Conversation
    namespace: str
    session: KnownSession | None = None
    """The one that it named. It has a record only where `conversation` starts with its messages:
    an edited history does not."""


def subject(
    request: ChatRequest,
    sent: Conversation,
    caller: str,
    transcripts: Transcripts,
    prompts: PromptBuilder,
) -> Subject:
    """The conversation of `request`, whose own messages are `sent`.

    Raises SessionNotFoundError (404), and InvalidRequestError for a key that contradicts the
    session or for several choices of it.
    """
    space = namespace(caller, request.prompt_cache_key, request.cache_salt)
    if request.session_id is None:
        return Subject(sent, space)
    session = transcripts.session(request.session_id)
    if session is None or owner_of(session.namespace) != owner_of(space):
        raise SessionNotFoundError(
            f"There is no session {quote(request.session_id, 64)}.", param="session_id"
        )
    if request.prompt_cache_key and space != session.namespace:
        raise InvalidRequestError(
            "prompt_cache_key is not the one that this session was begun with; leave it out, "
            "or leave out session_id.",
            param="prompt_cache_key",
        )
    if (request.n or 1) > 1:
        raise InvalidRequestError(
            f"n must be 1 with session_id, got {request.n}: a session goes on in one way. "
            "Fork it first.",
            param="n",
        )
    talk = _continued(sent, session, prompts)
    if not _starts(session.record, talk, prompts):
        session = replace(session, record=None)
    return Subject(talk, session.namespace, session)


def _continued(sent: Conversation, session: KnownSession, prompts: PromptBuilder) -> Conversation:
    known = session.conversation
    if known is None:
        return sent
    # What the request leaves out is as it was.
    sent = replace(
        sent,
        tools=sent.tools or known.tools,
        template_kwargs=sent.template_kwargs or known.template_kwargs,
    )
    if _starts(known, sent, prompts):
        return sent
    if known.messages[0].role == sent.messages[0].role == "system":
        return sent
    return replace(sent, messages=known.messages + sent.messages)


def _starts(
    known: Conversation | TurnRecord | None, talk: Conversation, prompts: PromptBuilder
) -> bool:
    """Do the messages of `known` mean the same as the first ones of `talk`?"""
    count = 0 if known is None else len(known.messages)
    if known is None or len(talk.messages) < count:
        return False
    # Under the same tools and switches, so that only the messages decide.
    own = replace(talk, messages=known.messages)
    theirs = replace(talk, messages=talk.messages[:count])
    return prompts.chain(own)[count] == prompts.chain(theirs)[count]


def best_record(
    about: Subject, chain: Sequence[bytes], transcripts: Transcripts
) -> TurnRecord | None:
    """The finished turn whose tokens the prompt takes over.

    A named session's own wins over another branch's with the same messages: its journal is the one
    that goes on.
    """
    found = transcripts.longest(about.namespace, chain)
    own = None if about.session is None else about.session.record
    if own is None or (found is not None and len(found.messages) > len(own.messages)):
        return found
    return own
