"""What has a session's conversation been, and what may it be after the process ended?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from capserve.serving.sessions.transcripts import KnownSession
from capserve.text.messages import Conversation, Message
from tests.reuse.server import texts

Messages = tuple[Message, ...]


@dataclass
class Past:
    """What a session's conversation was, from turn to turn."""

    namespace: str
    versions: list[Messages]
    """Since the last start; before it, the one that it came back with."""
    uncertain: bool = False
    """What happened to it last may not have been written."""
    deleted: bool = False

    def heard(self, asked: Messages, reply: Message, *, sure: bool) -> None:
        """A turn ended. A reply that was continued is one message."""
        *before, last = asked
        if last.role == "assistant":
            reasoning = reply.reasoning if last.reasoning is None else last.reasoning
            whole = replace(reply, content=last.content + reply.content, reasoning=reasoning)
            self.versions.append((*before, whole))
        else:
            self.versions.append((*asked, reply))
        self.uncertain = not sure

    def came_back(self, known: KnownSession | None, *, sure: bool) -> None:
        """After a start. `sure`: all that happened before was written, and nothing left since."""
        if known is None:
            assert self.deleted or not sure, "a session is lost"
            return
        assert not (self.deleted and sure), "a deleted session is back"
        assert known.conversation is not None
        versions = self.versions[-1 if sure else 0 :]
        assert any(alike(known.conversation, then) for then in versions), (
            f"a session came back as\n{known.conversation.messages}\nnot as one of\n{versions}"
        )
        self.versions = [known.conversation.messages]
        self.uncertain = self.deleted = False


def before(messages: Messages, turns: int) -> Messages:
    """Without the last `turns` replies, and what was said for them."""
    replies = [at for at, message in enumerate(messages, start=1) if message.role == "assistant"]
    return messages[: ([0, *replies])[-1 - turns]]


def alike(conversation: Conversation, messages: Messages) -> bool:
    """These messages, as far as a client can say: what it left out of a reply, the server knows."""
    _, prompts, _ = texts()
    other = replace(conversation, messages=messages)
    return prompts.chain(conversation)[-1] == prompts.chain(other)[-1]
