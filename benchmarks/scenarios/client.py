"""How does an agent talk to the server under test, and what is noted of each request?

`Desk` sends requests and keeps the account; `Talk` is one conversation that resends its whole
history, as agents do. Everything is streamed and nothing needs more than the OpenAI protocol: token
ids (`return_token_ids`) and the `capserve` block are read where the server sends them.
"""

from __future__ import annotations

import copy
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.scenarios.ledger import Ledger, Row, Shared, Tokens, plain_messages
from benchmarks.scenarios.material import QUESTIONS, TOOLS, answer

REQUEST_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 60.0


@dataclass
class Reply:
    """A streamed reply, put together; partial when the reader left early."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    record: dict[str, Any] = field(default_factory=dict)
    """The `capserve` block."""
    deltas: int = 0

    def message(self) -> dict[str, Any]:
        """As an agent puts it into its history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        elif message["content"] is None:
            message["content"] = ""
        return message

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise RuntimeError(f"the server failed: {chunk['error']}")
        self.prompt_ids += chunk.get("prompt_token_ids") or ()
        self.usage = chunk.get("usage") or self.usage
        self.record = chunk.get("capserve") or self.record
        for choice in chunk.get("choices", ()):
            self.ids += choice.get("token_ids") or ()
            delta = choice.get("delta") or {}
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.deltas += bool(delta.get("content") or delta.get("reasoning_content"))
            for part in delta.get("tool_calls") or ():
                self._take_call(part)

    def _take_call(self, part: dict[str, Any]) -> None:
        """Calls come whole, or in fragments with an index."""
        while len(self.calls) <= part.get("index", len(self.calls)):
            empty = {"name": "", "arguments": ""}
            self.calls.append({"id": "", "type": "function", "function": empty})
        call, given = self.calls[part.get("index", -1)], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = given.get("name") or call["function"]["name"]
        call["function"]["arguments"] += given.get("arguments") or ""


@dataclass(frozen=True)
class Sizes:
    """How long the texts are, in characters: about 3.5 are a token of the embedded model."""

    prefix: int = 13_000
    """System prompt and long documents."""
    part: int = 2_400
    """A tool result."""


class Desk:
    """The server's counter: sends requests, and writes a row for each."""

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str,
        sizes: Sizes,
        salt: str,
        *,
        plain: bool = False,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S)
        self._root = url.removesuffix("/v1")
        self.model = model or self._http.get("/models").json()["data"][0]["id"]
        self.sizes = sizes
        self._salt = salt
        self._plain = plain
        self._ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self.rows: list[Row] = []
        self.scene = ""

    def close(self) -> None:
        self._http.close()

    # -- one request ----------------------------------------------------------------------------

    def ask(self, talk: Talk, label: str) -> Reply:
        """Send `talk` as it stands, read the whole reply, write the row."""
        reply = Reply()
        for chunk in self._events(talk):
            reply.take(chunk)
        self._note(talk, label, reply)
        return reply

    def ask_all(self, talks: Sequence[Talk], label: str) -> list[Reply]:
        """All at once, each on a connection of its own; noted in the order given."""

        def whole(talk: Talk) -> Reply:
            reply = Reply()
            for chunk in self._events(talk):
                reply.take(chunk)
            return reply

        with ThreadPoolExecutor(len(talks)) as pool:
            replies = list(pool.map(whole, talks))
        for i, (talk, reply) in enumerate(zip(talks, replies, strict=True)):
            self._note(talk, f"{label} {i + 1}", reply)
        return replies

    def leave(self, talk: Talk, label: str, *, after_deltas: int) -> Reply:
        """Read so many deltas of the reply and close the connection; returns what was seen.

        What had been read by then is known only from capserve's `/health`; elsewhere there is no
        row, and nothing counts as known.
        """
        before = self._token_sums()
        reply = Reply()
        for chunk in self._events(talk):
            reply.take(chunk)
            if reply.deltas >= after_deltas:
                break
        read = self._read_since(before)
        if read is not None and reply.prompt_ids:
            self._note_aborted(talk, label, reply, _array(reply.prompt_ids), read)
        return reply

    def abandon(self, talk: Talk, label: str, *, after_s: float) -> None:
        """Close the connection `after_s` after the headers, as an impatient client does.

        The prompt's tokens are not known yet, so the row is written when `talk` is sent again.
        """
        before = self._token_sums()
        with self._open(talk):
            time.sleep(after_s)
        read = self._read_since(before)
        if read is not None:
            talk.abandoned.append((label, read))

    def _events(self, talk: Talk) -> Iterator[dict[str, Any]]:
        with self._open(talk) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    @contextmanager
    def _open(self, talk: Talk) -> Iterator[httpx.Response]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": talk.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": talk.max_tokens,
            "temperature": 0,
        }
        extras: dict[str, Any] = {
            "chat_template_kwargs": {"enable_thinking": talk.thinking},
            "cache_salt": self._namespace,
            "return_token_ids": True,
        }
        if not self._plain:
            body |= extras
        if talk.tools:
            body["tools"] = talk.tools
        with self._http.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()[:500]}")
            yield response

    # -- the account ----------------------------------------------------------------------------

    @property
    def session(self) -> str:
        """For system prompts: keeps scenes and runs apart where the server knows no salt."""
        return f"Session: {self._salt}, {self.scene}."

    @property
    def _namespace(self) -> str:
        return f"{self._salt}-{self.scene}"

    def _ledger(self, reply: Reply) -> Ledger:
        """Only capserve is known to keep salts apart; elsewhere everything may be shared."""
        apart = bool(reply.record or reply.prompt_ids) and not self._plain
        return self._ledgers[self._namespace if apart else ""]

    def _shared(self, talk: Talk, reply: Reply) -> Shared:
        ledger = self._ledger(reply)
        if reply.prompt_ids:
            return ledger.shared(_array(reply.prompt_ids))
        return ledger.shared_by_messages(plain_messages(talk.messages, talk.tools))

    def _note(self, talk: Talk, label: str, reply: Reply) -> None:
        if reply.usage is None:
            raise RuntimeError("the stream ended without usage")
        prompt = reply.usage["prompt_tokens"]
        cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        actual = None if cached is None else prompt - cached
        for before, read in talk.abandoned if reply.prompt_ids else ():
            cut = Reply(prompt_ids=reply.prompt_ids)
            self._note_aborted(talk, before, cut, _array(reply.prompt_ids), read)
        talk.abandoned.clear()
        self._write(talk, label, reply, prompt, actual)
        if reply.prompt_ids:
            assert len(reply.prompt_ids) == prompt, "usage and prompt_token_ids differ"
            self._ledger(reply).learn(_array(reply.prompt_ids), _array(reply.ids))
        else:
            messages = plain_messages([*talk.messages, reply.message()], talk.tools)
            total = prompt + reply.usage["completion_tokens"]
            self._ledger(reply).learn_messages(messages, total)

    def _note_aborted(
        self, talk: Talk, label: str, reply: Reply, whole: Tokens, read: tuple[int, int]
    ) -> None:
        """`reply` was cut; `read` are the tokens of `whole` that were taken in, and read for it."""
        taken_in, actual = read
        shared = self._ledger(reply).shared(whole).tokens
        self._write(talk, label, reply, taken_in, actual, max(0, taken_in - shared))
        self._ledger(reply).learn(whole[:taken_in], _array(reply.ids))

    def _write(
        self,
        talk: Talk,
        label: str,
        reply: Reply,
        prompt: int,
        actual: int | None,
        ideal: int | None = None,
    ) -> None:
        shared = self._shared(talk, reply)
        self.rows.append(
            Row(
                scene=self.scene,
                label=label,
                prompt=prompt,
                ideal=max(0, prompt - shared.tokens) if ideal is None else ideal,
                actual=actual,
                branch_at=shared.tokens if shared.branches else None,
                branch_name=shared.name if shared.branches else None,
                estimated=shared.estimated,
                action=reply.record.get("prefix_action"),
                miss=reply.record.get("miss_reason"),
            )
        )

    def _read_since(self, before: dict[str, int] | None) -> tuple[int, int] | None:
        """Prompt tokens taken in (cached or read) since `before`, and those read."""
        after = self._token_sums()
        if before is None or after is None:
            return None
        taken_in, read = (after[k] - before[k] for k in ("prompt_tokens", "new_prefill_tokens"))
        return taken_in, read

    def _token_sums(self) -> dict[str, int] | None:
        """capserve's own counters once it is idle; None elsewhere."""
        until = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            response = self._http.get(f"{self._root}/health")
            if response.status_code != 200 or "json" not in response.headers["content-type"]:
                return None
            report = response.json()
            if "turns" not in report:
                return None
            if report["running"] is None and report["queue_depth"] == 0:
                sums: dict[str, int] = report["turns"]
                return sums
            if time.monotonic() > until:
                raise RuntimeError(f"the server is not idle after {IDLE_TIMEOUT_S:.0f} s")
            time.sleep(0.02)


@dataclass
class Talk:
    """One conversation. Copy it to branch."""

    desk: Desk
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=lambda: list(TOOLS))
    thinking: bool = False
    max_tokens: int = 120
    """Enough for the embedded model to end a reply by itself; some talks want it cut."""
    asked: int = 0
    results: int = 0
    abandoned: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    """(label, (tokens taken in, tokens read)) of requests that wait for their token ids."""

    def copy(self) -> Talk:
        return Talk(
            self.desk,
            copy.deepcopy(self.messages),
            self.tools,
            self.thinking,
            self.max_tokens,
            self.asked,
            self.results,
        )

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def send(self, label: str) -> Reply:
        """One request; the reply and the results of its calls join the history."""
        reply = self.desk.ask(self, label)
        self.take(reply)
        return reply

    def take(self, reply: Reply) -> None:
        self.messages.append(reply.message())
        for call in reply.calls:
            self.results += 1
            content = answer(call, self.desk.sizes.part, self.results)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    @property
    def waits(self) -> bool:
        """The last message is a tool's: the model is to go on."""
        return bool(self.messages[-1]["role"] == "tool")

    def prepare(self) -> None:
        """The next question, unless tool results wait for the model."""
        if not self.waits:
            self.say(QUESTIONS[self.asked % len(QUESTIONS)])
            self.asked += 1

    def go(self, requests: int, label: str = "turn") -> None:
        """An agent's loop for so many requests."""
        for i in range(requests):
            self.prepare()
            self.send(f"{label} {i + 1}")


def _array(ids: Sequence[int]) -> Tokens:
    return np.array(ids, dtype=np.int32)
