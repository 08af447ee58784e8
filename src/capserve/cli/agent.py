"""How does an agent use a chat server?

The loop that every coding agent runs, on the official SDK: send the whole history, stream the
reply, run the tools it calls, append, repeat until it answers in words. Nothing here knows that the
server keeps state; what the loop records is for the table and for the check afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from openai import OpenAI, omit

from capserve.engine.seam import Sampling

MAX_STEPS = 8
"""Requests per question: enough for test, read, edit, test, answer; a confused model stops here."""

MAX_REPLY_TOKENS = 400

RunTool = Callable[[str, str], str]
"""(name, arguments as JSON text) -> the tool's answer."""


@dataclass(frozen=True)
class Exchange:
    """One request and its reply, as far as a later check needs them."""

    label: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    metrics: dict[str, Any]
    """The reply's `capserve` block."""
    first_chunk_ms: float
    """Measured by the client, from sending to the first chunk."""
    message: dict[str, Any]
    """The assistant message, as the next request resends it."""
    sent: tuple[str, ...]
    """The texts of the messages that were sent: all of them must be in the prompt."""

    @property
    def cached_tokens(self) -> int:
        return int(self.metrics["cached_tokens"])


@dataclass
class Conversation:
    """A history and how it is continued. Copy `messages` to branch."""

    client: OpenAI
    model: str
    sampling: Sampling
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True

    def request(self, label: str) -> Exchange:
        """Send the history as it stands and stream the reply."""
        began = time.perf_counter()
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=cast(Any, self.messages),  # plain dicts are what agents keep
            tools=cast(Any, self.tools) or omit,
            stream=True,
            max_tokens=MAX_REPLY_TOKENS,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
            extra_body={
                "top_k": self.sampling.top_k,
                "min_p": self.sampling.min_p,
                "repetition_penalty": self.sampling.repetition_penalty,
                "flashrt_K": self.sampling.drafts,
                "chat_template_kwargs": {"enable_thinking": self.thinking},
                "return_token_ids": True,
            },
        )
        texts = {"content": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        prompt: list[int] = []
        output: list[int] = []
        metrics: dict[str, Any] = {}
        first_chunk_ms = 0.0
        for chunk in stream:
            first_chunk_ms = first_chunk_ms or (time.perf_counter() - began) * 1e3
            extra = chunk.model_extra or {}
            prompt += extra.get("prompt_token_ids", ())
            metrics = extra.get("capserve", metrics)
            for choice in chunk.choices:
                output += (choice.model_extra or {}).get("token_ids", ())
                delta = choice.delta.model_dump(exclude_none=True)
                for key in texts:
                    texts[key] += delta.get(key, "")
                calls += delta.get("tool_calls", ())
        message: dict[str, Any] = {"role": "assistant", **{k: v for k, v in texts.items() if v}}
        if calls:
            message["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")} for call in calls
            ]
        return Exchange(
            label=label,
            prompt=tuple(prompt),
            output=tuple(output),
            sampling=self.sampling,
            metrics=metrics,
            first_chunk_ms=first_chunk_ms,
            message=message,
            sent=tuple(text for m in self.messages if (text := m.get("content", "").strip())),
        )

    def ask(
        self, label: str, question: str, run_tool: RunTool, on_reply: Callable[[Exchange], None]
    ) -> None:
        """The agent loop for one question. `on_reply` sees each exchange before its tools run."""
        self.messages.append({"role": "user", "content": question})
        for _ in range(MAX_STEPS):
            exchange = self.request(label)
            on_reply(exchange)
            self.messages.append(exchange.message)
            calls = exchange.message.get("tool_calls", ())
            if not calls:
                return
            for call in calls:
                function = call["function"]
                answer = run_tool(function["name"], function["arguments"])
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": answer}
                )
