"""How does a terminal talk to a chat server?

A small streaming client of the chat protocol, for any OpenAI-compatible server: it asks, yields the
parts of the reply as they come, and keeps the history exactly as the next turn must resend it.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

TIMEOUT = httpx2.Timeout(10.0, read=600.0)
"""A long prompt may be silent for minutes on a server that sends no heartbeat."""


class ChatError(Exception):
    """The server refused or broke off; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the reply's text."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class TurnReport:
    """What the finished turn cost, as far as the server tells."""

    finish_reason: str
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The `capserve` block; empty from another server."""

    def line(self) -> str:
        """One line for a person: what was reused, and how fast the rest was."""
        prompt = self.usage.get("prompt_tokens", self.metrics.get("prompt_tokens", 0))
        details = self.usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens", 0)
        parts = [f"reused {cached} of {prompt} prompt tokens"]
        if action := self.metrics.get("prefix_action"):
            parts[0] += f" ({action})"
        if reason := self.metrics.get("miss_reason"):
            parts.append(f"miss: {reason}")
        if (first := self.metrics.get("first_delta_ms")) is not None:
            parts.append(f"first token {first:.0f} ms")
        if (speed := self.metrics.get("decode_tok_per_s")) is not None:
            parts.append(f"{speed:.0f} tok/s")
        if self.finish_reason not in ("stop", "tool_calls"):
            parts.append(f"ended: {self.finish_reason}")
        return ", ".join(parts)


class ChatClient:
    """One conversation with one server."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        system: str | None = None,
        thinking: bool = True,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network, for tests."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT, transport=transport
        )
        self._head = [{"role": "system", "content": _text(system)}] if system else []
        self._thinking = thinking
        self.messages: list[dict[str, Any]] = list(self._head)
        self.report: TurnReport | None = None
        """Of the last finished turn."""

    def close(self) -> None:
        self._http.close()

    def model(self) -> str:
        """The first model that the server serves. Raises ChatError when it can't be reached."""
        try:
            answer = self._http.get("/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except httpx2.HTTPStatusError as error:
            raise ChatError(_said(error.response)) from None
        except (httpx2.HTTPError, LookupError, ValueError) as error:
            raise ChatError(f"no chat server at {self._http.base_url}: {error}") from None

    def reset(self) -> None:
        self.messages = list(self._head)

    def undo(self) -> bool:
        """Drop the last question and what came after it; False when there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                del self.messages[i:]
                return True
        return False

    def ask(self, model: str, text: str) -> Generator[Piece]:
        """Stream the reply to `text`.

        The history grows only by a finished turn: after a ChatError, or when the caller stops
        early and closes the iterator, it is what it was.
        """
        question = {"role": "user", "content": _text(text)}
        said: dict[bool, list[str]] = {False: [], True: []}
        usage: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        finish = ""
        for chunk in self._chunks(model, question):
            usage = chunk.get("usage") or usage
            metrics = chunk.get("capserve") or metrics
            for choice in chunk.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                for piece in (Piece(thought or "", True), Piece(delta.get("content") or "")):
                    if piece.text:
                        said[piece.reasoning].append(piece.text)
                        yield piece
        if not finish:
            raise ChatError("the stream ended before the reply did")
        answer = {"role": "assistant", "content": "".join(said[False])}
        if said[True]:
            answer["reasoning_content"] = "".join(said[True])
        self.messages += [question, answer]
        self.report = TurnReport(finish, usage, metrics)

    def _chunks(self, model: str, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {
            "model": model,
            "messages": [*self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": self._thinking},
        }
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(_said(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
        except httpx2.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from None


def _text(given: str) -> str:
    """`given` without what UTF-8 can't carry: bytes of a command line that are no text."""
    return given.encode("utf-8", "replace").decode("utf-8")


def _said(response: httpx2.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (LookupError, TypeError, ValueError):
        return f"{response.status_code}: {response.reason_phrase}"
