"""How do committed tokens become the reply's parts?

Tokens -> bytes -> text -> channels -> stop strings -> whitespace at the edges. What `feed` and
`finish` return adds up to `message()`, whatever the tokens were cut into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capserve.text.arguments import ToolSchemas
from capserve.text.channels import Channel, ChannelSplitter, Piece, ReasoningClosed, Text
from capserve.text.detokenize import Detokenizer
from capserve.text.messages import Message, ToolCall
from capserve.text.stops import StopFilter
from capserve.text.tokenizer import Tokenizer
from capserve.text.tool_calls import ParsedCall, RawCall, new_call_id


@dataclass(frozen=True)
class OutputSpec:
    """What the reply may contain, and how it is to be read."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool definitions for typing arguments. Empty: call markup is content like any other."""
    stop: tuple[str, ...] = ()
    starts_in_reasoning: bool = False
    max_calls: int | None = None
    """The reply ends after this many calls; at least 1. None: it may have any number."""
    plain: bool = False
    """A continued text, and no chat reply: marks of thinking are content like any other."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What some tokens added to the reply, in its order: nothing when half a mark is held back."""

    parts: tuple[Text | ParsedCall, ...] = ()

    @property
    def content(self) -> str:
        return self._text(Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        return self._text(Channel.REASONING)

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ParsedCall))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def _text(self, channel: Channel) -> str:
        texts = (part for part in self.parts if isinstance(part, Text))
        return "".join(text.text for text in texts if text.channel is channel)


class TurnOutput:
    """One reply, read as it is generated. Never raises on what a model wrote.

    A call is delivered when it is complete. One that is broken, or cut before its parameters were
    complete, is delivered as the text that it is. Whitespace between content and a call belongs to
    neither, and stays only where more content follows.
    """

    def __init__(
        self,
        spec: OutputSpec,
        tokenizer: Tokenizer,
        end_tokens: Collection[int],
        id_factory: Callable[[], str] = new_call_id,
    ) -> None:
        self._schemas = ToolSchemas(spec.tools)
        self._end_tokens = frozenset(end_tokens)
        self._id_factory = id_factory
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = ChannelSplitter(
            starts_in_reasoning=spec.starts_in_reasoning,
            calls=bool(spec.tools),
            plain=spec.plain,
        )
        self._stops = {channel: StopFilter(spec.stop) for channel in Channel}
        self._edges = {channel: _Edges() for channel in Channel}
        self._calls: list[ParsedCall] = []
        self._news: list[Text | ParsedCall] = []
        self._speaking = Channel.CONTENT
        self._max_calls = spec.max_calls
        self._token_bytes = tokenizer.token_bytes
        self.stopped = False
        """A stop string was matched, or text came after the last call that there may be: what
        follows is not part of the reply."""
        self.reasoning_tokens = 0
        """Tokens that were fed while the reply was reasoning, its closing mark included."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return next((stops.matched for stops in self._stops.values() if stops.matched), None)

    @property
    def calls(self) -> int:
        """Calls delivered so far."""
        return len(self._calls)

    @property
    def calls_are_full(self) -> bool:
        """All calls that the reply may have are there; nothing is read after them."""
        return self._max_calls is not None and len(self._calls) >= self._max_calls

    def feed(self, tokens: Iterable[int]) -> OutputDelta:
        """What these tokens add. End tokens are no text; after a stop string, nothing is."""
        for token in tokens:
            if self.stopped:
                break
            if token in self._end_tokens:
                continue
            if self.calls_are_full:
                # Not stopped before there is something to leave out: when the end token comes
                # next, the reply ended as the model meant it, and its state can be continued.
                self.stopped = bool(self._token_bytes(token).strip())
                continue
            self.reasoning_tokens += self._splitter.in_reasoning
            self._take(self._splitter.feed(self._detokenizer.feed((token,))))
        return self._delta()

    def finish(self) -> OutputDelta:
        """Everything that was held back, now that the reply is over. To be called once."""
        if not self.stopped:
            self._take(self._splitter.feed(self._detokenizer.flush()))
        if not self.stopped:
            self._take(self._splitter.finish())
        if not self.stopped:
            self._interrupt()
        for channel, edges in self._edges.items():
            self._tell(channel, edges.finish())
        return self._delta()

    def message(self) -> Message:
        """The reply so far: exactly what the deltas add up to."""
        return Message(
            role="assistant",
            content=self._edges[Channel.CONTENT].told,
            reasoning=self._edges[Channel.REASONING].told,
            tool_calls=tuple(ToolCall(c.name, c.arguments, c.id) for c in self._calls),
        )

    def _take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if self.stopped:
                return
            if self.calls_are_full:
                # The token that closed the call brought more.
                self.stopped = not (isinstance(piece, Text) and piece.text.isspace())
                continue
            match piece:
                case Text(channel, text):
                    self._say(channel, text)
                case ReasoningClosed():
                    self._interrupt()
                    self._edges[Channel.REASONING].close()
                case RawCall():
                    self._call(piece)

    def _say(self, channel: Channel, text: str) -> None:
        if channel is not self._speaking:
            self._interrupt()
            self._speaking = channel
        stops = self._stops[channel]
        self._tell(channel, self._edges[channel].say(stops.feed(text)))
        self.stopped = stops.matched is not None

    def _call(self, raw: RawCall) -> None:
        if not raw.closed:
            given = {key for key, _ in raw.parameters}
            if not self._schemas.requires(raw.name) <= given:
                # The reply was cut before a parameter that the tool can't do without.
                if self._speaking is Channel.REASONING:
                    self._interrupt()
                    self._edges[Channel.REASONING].close()  # the thought ends at the call's mark
                self._say(Channel.CONTENT, raw.source)
                return
        self._interrupt()
        for edges in self._edges.values():
            edges.close()
        call = ParsedCall(
            index=len(self._calls),
            id=self._id_factory(),
            name=raw.name,
            arguments=self._schemas.arguments(raw.name, raw.parameters),
        )
        self._calls.append(call)
        self._news.append(call)

    def _interrupt(self) -> None:
        """No stop string reaches over a mark or a call: what was held for one is text."""
        held = self._stops[self._speaking].flush()
        self._tell(self._speaking, self._edges[self._speaking].say(held))

    def _tell(self, channel: Channel, text: str) -> None:
        if not text:
            return
        last = self._news[-1] if self._news else None
        if isinstance(last, Text) and last.channel is channel:
            self._news[-1] = Text(channel, last.text + text)
        else:
            self._news.append(Text(channel, text))

    def _delta(self) -> OutputDelta:
        news, self._news = tuple(self._news), []
        return OutputDelta(news)


class _Edges:
    """One channel's text. Whitespace at its end waits: it counts only between two words, or at the
    end of a reply that nothing closed."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._space = ""
        self._closed = False
        self._spoke = False

    def say(self, text: str) -> str:
        """What can be told now."""
        body = text.rstrip()
        if not body:
            self._space += text
            return ""
        # Behind a call that no text came before, whitespace separates nothing.
        first = self._closed and not self._spoke
        told = body.lstrip() if first else self._space + body
        self._space = text[len(body) :]
        self._closed, self._spoke = False, True
        self._told.append(told)
        return told

    def close(self) -> None:
        """A call, or the channel's end: the whitespace around it is none of the text's."""
        self._closed = True

    def finish(self) -> str:
        """What is told at the reply's end."""
        space, self._space = self._space, ""
        if self._closed:
            return ""
        self._told.append(space)
        return space

    @property
    def told(self) -> str:
        """Everything that was said."""
        return "".join(self._told)
