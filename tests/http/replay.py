"""How is a recorded conversation told to a server whose model says chosen words?

`Replay` sends one talk in one protocol, request by request, with the server's replies in its
history, and holds each reply to two promises: a client reads what the model said, and nothing was
read twice. What an ideal server would have had to read is known from the tokens of prompts and
replies; where the prompt leaves known text in its middle, the state may lie up to one checkpoint
interval before that point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness import NAME, Served, end_tokens, fake_engine, serving, tokenizer
from live_talks import Chat, Dialect, Exchange, Messages, Responses, goes_on, talks
from sdk_replies import Said, send

from benchmarks.scenarios.ledger import Ledger
from capserve.engine.seam import TokenArray
from capserve.text.markup import spell_call, spell_parameter

Json = dict[str, Any]
Twist = Callable[[Exchange], Json]
"""What the model says at a request: the recorded answer, or another one."""

INTERVAL = 128
"""Tokens between two checkpoints: as small as the fake engine's chunks allow."""


@dataclass
class Script:
    """The fake engine's next reply, as a model would write it."""

    answer: Json = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)
    """Parameters of each tool as its schema has them: a strict one is written in no other order."""
    thinks: bool = False
    """The newest prompt left the model in the midst of thinking."""

    def __call__(self, prompt: TokenArray) -> list[int]:
        said = self.answer["content"] or ""
        tail = b"".join(tokenizer().token_bytes(int(token)) for token in prompt[-8:])
        self.thinks = tail.endswith(b"<think>\n")
        if self.thinks:
            said = f"{self.answer['reasoning'] or ''}\n</think>\n\n{said}"
        for call in self.answer["tool_calls"] or ():
            arguments = json.loads(call["arguments"])
            order = self.order.get(call["name"], [])
            keys = sorted(arguments, key=lambda key: order.index(key) if key in order else -1)
            written = "".join(spell_parameter(key, _written(arguments[key])) for key in keys)
            said += f"\n\n{spell_call(call['name'], written)}"
        return [*tokenizer().encode(said).tolist(), end_tokens()[0]]


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parameters_of(tools: Sequence[Json]) -> dict[str, list[str]]:
    """Names of tools with those of their parameters, in order; those in a namespace too."""
    found: dict[str, list[str]] = {}
    for tool in tools:
        if "tools" in tool:
            found |= parameters_of(tool["tools"])
            continue
        function = tool.get("function", tool)
        found[function["name"]] = list((function.get("parameters") or {}).get("properties") or ())
    return found


def as_recorded(exchange: Exchange) -> Json:
    return exchange.answer


def with_one_call_more(exchange: Exchange) -> Json:
    calls = exchange.answer["tool_calls"] or []
    return {**exchange.answer, "tool_calls": [*calls, *calls[:1]]}


def without_calls(exchange: Exchange) -> Json:
    return {**exchange.answer, "content": "I would rather talk.", "tool_calls": []}


@dataclass
class Replay:
    """One talk after another on one server; each reads what those before it left."""

    served: Served
    dialect: Dialect
    interval: int
    """Tokens between the server's checkpoints."""
    script: Script | None = None
    """None: the model says what it likes."""
    twist: Twist = as_recorded
    fields: Callable[[int], Json] = lambda number: {}
    """What is added to the body of each request, by its number."""
    histories: list[list[Json]] = field(default_factory=list)
    """What was sent as history, request by request."""
    new: int = 0
    """Prompt tokens of all requests that nothing before them covered."""
    _ledger: Ledger = field(default_factory=Ledger)

    def tell(self, talk: Sequence[Exchange]) -> Iterator[Said]:
        history = [self.dialect.other(part) for part in talk[0].added]
        said: Said | None = None
        for exchange in talk:
            if said is not None:
                history += goes_on(self.dialect, exchange, said)
            self.histories.append([*history])
            said = self._ask(exchange, history)
            yield said

    def _ask(self, exchange: Exchange, history: list[Json]) -> Said:
        body = self.dialect.request(exchange, history) | {"model": NAME}
        body |= self.fields(len(self.histories))
        answer = self.twist(exchange)
        if self.script is not None:
            self.script.answer = answer
            self.script.order = parameters_of(exchange.body.get("tools") or ())
        said = send(self.served.http, self.dialect.path(exchange), body)
        if self.script is not None:
            self._check_words(said, answer, self.script.thinks)
        self._check_tokens(said)
        return said

    @staticmethod
    def _check_words(said: Said, answer: Json, thinks: bool) -> None:
        """Spaces around a text are the template's, and ids are the server's own."""
        assert said.text.strip() == (answer["content"] or "").strip()
        thought = (answer["reasoning"] or "") if thinks else ""
        assert said.reasoning.strip() == thought.strip()
        calls = [(c["name"], json.loads(c["arguments"])) for c in answer["tool_calls"] or ()]
        assert [(call.name, call.value) for call in said.calls] == calls
        assert len({call.id for call in said.calls}) == len(calls)

    def _check_tokens(self, said: Said) -> None:
        prompt = self.served.worker.items[-1].request.prompt.tokens
        reply = np.array(self.served.worker.said[-1], dtype=np.int32)
        assert (said.prompt, said.output) == (len(prompt), len(reply))
        assert said.read == said.record["new_prefill_tokens"]
        shared = self._ledger.shared(prompt)
        self._ledger.learn(prompt, reply)
        new = len(prompt) - shared.tokens
        most = new + (min(self.interval, shared.tokens) if shared.branches else 0)
        assert said.read <= most, f"{said.read} tokens read, {new} were new: {said.record}"
        self.new += new


def dialects(path: str) -> list[Dialect]:
    """In which protocols what was sent to `path` is told: chat requests also in Anthropic's."""
    kind = path.partition("?")[0].rsplit("/", 1)[-1]
    return {"completions": [Chat(), Messages()], "responses": [Responses()]}.get(kind, [Messages()])


def replay(
    records: Sequence[Json], twist: Twist = as_recorded, **options: Any
) -> list[tuple[Replay, list[Said]]]:
    """All talks of a recording, on a server for each protocol."""
    found = []
    conversations = talks(records)
    for dialect in dialects(records[0]["path"]):
        script = Script()
        engine = fake_engine(script, max_positions=200_000)
        with serving(engine, checkpoint_interval=INTERVAL) as served:
            telling = Replay(served, dialect, INTERVAL, script, twist, **options)
            found.append((telling, [said for talk in conversations for said in telling.tell(talk)]))
    return found
