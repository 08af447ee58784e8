"""How do the turns of a completions request become chunks, and chunks a whole reply?

Pure folding, no I/O. The plain reply is made of the chunks that a stream would have sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capserve.api.choices import ChoiceEvent
from capserve.api.errors import error_body
from capserve.api.sse import DONE, HEARTBEAT, Json, TokenBytes, encode, usage
from capserve.engine.seam import TokenLogprob
from capserve.errors import CapserveError
from capserve.serving.sinks import Reply
from capserve.serving.turn import Delta, Failed, Finished

LEAST_LOGPROB = -9999.0
"""JSON has no -inf; a token that can't be chosen gets the wire's customary floor."""


@dataclass(frozen=True, slots=True)
class CompletionHead:
    """What is the same in every chunk of a reply, and what the request wants to see."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str
    token_bytes: TokenBytes
    seeds: tuple[int, ...]
    """Of each choice, as are `echoes`."""
    echoes: tuple[str, ...]
    """What a choice's text begins with: its prompt, or nothing."""
    choices_per_prompt: int
    include_usage: bool = False
    logprobs: bool = False


class _Choice:
    """Makes chunks of one turn's events."""

    def __init__(self, head: CompletionHead, index: int) -> None:
        self._head = head
        self._index = index
        self._prefix = head.echoes[index]
        self._offset = len(self._prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def delta(self, event: Delta) -> Iterator[Json]:
        """The chunk that adds `event`; none when all of its text is held back."""
        logprobs = self._logprobs(event.logprobs) if self._head.logprobs else None
        if event.content or self._prefix or (logprobs and logprobs["tokens"]):
            text, self._prefix = self._prefix + event.content, ""
            yield self._chunk(text, logprobs)

    def finished(self, event: Finished) -> Json:
        text, self._prefix = self._prefix, ""
        last = self._chunk(text, None, event.reason.value)
        seed = self._head.seeds[self._index]
        last["capserve"] = event.metrics.as_dict() | {"seed": seed, "notes": []}
        return last

    def _chunk(self, text: str, logprobs: Json | None, reason: str | None = None) -> Json:
        choice = {"index": self._index, "text": text, "logprobs": logprobs}
        return _frame(self._head, [choice | {"finish_reason": reason}])

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        """Parallel arrays, one entry a token; offsets are characters of the choice's text."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            found["tokens"].append(self._spelled(entry.token))
            found["token_logprobs"].append(max(entry.logprob, LEAST_LOGPROB))
            # Two tokens may be spelled alike (halves of a character): the likelier one is told.
            top: Json = {}
            for token, logprob in entry.top:
                top.setdefault(self._spelled(token), max(logprob, LEAST_LOGPROB))
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._head.token_bytes(entry.token)))
        return found

    def _spelled(self, token: int) -> str:
        return self._head.token_bytes(token).decode(errors="replace")


def _frame(head: CompletionHead, choices: list[Json]) -> Json:
    frame: Json = {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
    }
    if head.include_usage:
        frame["usage"] = None
    return frame


class CompletionChunks:
    """Chunks of all choices; the stream is over when all have finished, or one has failed."""

    def __init__(self, head: CompletionHead) -> None:
        self._head = head
        self._choices = [_Choice(head, index) for index in range(len(head.seeds))]
        self._finished: dict[int, Finished] = {}

    heartbeat = HEARTBEAT

    def opening(self) -> bytes:
        return b""  # a chunk of this protocol is text

    def cut(self, error: CapserveError) -> bytes:
        return encode(error_body(error))

    def written(self, event: ChoiceEvent) -> tuple[bytes, bool]:
        index, what = event
        match what:
            case Delta():
                return b"".join(map(encode, self._choices[index].delta(what))), False
            case Failed():
                body = error_body(what.error) | {"capserve": what.metrics.as_dict()}
                return encode(body), True
            case Finished():
                self._finished[index] = what
        data = encode(self._choices[index].finished(what))
        if len(self._finished) < len(self._choices):
            return data, False
        if self._head.include_usage:
            ends = [self._finished[i] for i in range(len(self._choices))]
            data += encode(_frame(self._head, []) | {"usage": total(self._head, ends)})
        return data + DONE, True


def total(head: CompletionHead, ends: Sequence[Finished]) -> Json:
    """The usage of all choices: each prompt counts once, as its first choice found it."""
    count = head.choices_per_prompt
    used = [usage(*ends[i : i + count]) for i in range(0, len(ends), count)]
    summed = {
        key: sum(each[key] for each in used)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    return summed | {"prompt_tokens_details": {"cached_tokens": cached}}


def body_of(head: CompletionHead, replies: Sequence[Reply]) -> Json:
    """The plain reply. `capserve` is the first choice's, with all in `choices`."""
    choices: list[Json] = []
    records: list[Json] = []
    ends: list[Finished] = []
    for index, reply in enumerate(replies):
        assert isinstance(reply.end, Finished), "a failed choice has no body"
        maker = _Choice(head, index)
        deltas, last = list(maker.delta(reply.delta)), maker.finished(reply.end)
        parts = [chunk["choices"][0] for chunk in (*deltas, last)]
        choice = parts[-1] | {"text": "".join(part["text"] for part in parts)}
        choice["logprobs"] = parts[0]["logprobs"]
        choices.append(choice)
        records.append(last["capserve"])
        ends.append(reply.end)
    body = _frame(head, choices) | {"usage": total(head, ends)}
    body["capserve"] = records[0] if len(records) == 1 else records[0] | {"choices": records}
    return body
