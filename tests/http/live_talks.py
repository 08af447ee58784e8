"""How does a recorded client go on from a reply that it never got?

A recording is cut into talks: requests of which each begins with the whole request before it. Told
anew, a talk keeps the recorded words and results, but in the place of each recorded reply stands
the one that this server gave, in the form in which that client sends replies back: which keys it
has, what stands for no content, how arguments are written. Where the server called other tools than
were recorded, results go to its calls in order; a call without one is told that it was not run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sdk_replies import Call, Said

Json = dict[str, Any]

NOT_RUN = "not run here"
MARK: Json = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True)
class Exchange:
    """One recorded request: what it added to the one before, and what was answered."""

    path: str
    body: Json
    """Without its history."""
    resent: list[Json]
    """The reply before, as the client sent it back; empty in a talk's first request."""
    added: list[Json]
    """What stands behind that: results, words of a user; of a first request all."""
    answer: Json
    """`content`, `reasoning`, `tool_calls` of the recorded reply."""


def talks(records: Sequence[Json]) -> list[list[Exchange]]:
    """The conversations of a recording, in the order of their first requests."""
    found: list[tuple[Json, list[Json], list[Exchange]]] = []
    for record in records:
        body = dict(record["body"])
        history = body.pop("messages", None) or body.pop("input", None)
        answer = record["reply"]["message"]
        head = {key: body.get(key) for key in ("tools", "instructions")}
        for n, (known_head, known, talk) in enumerate(found):
            if known_head == head and history[: len(known)] == known:
                rest = history[len(known) :]
                end = next((i for i, part in enumerate(rest) if not _is_reply(part)), len(rest))
                talk.append(Exchange(record["path"], body, rest[:end], rest[end:], answer))
                found[n] = (head, history, talk)
                break
        else:
            talk = [Exchange(record["path"], body, [], history, answer)]
            found.append((head, history, talk))
    return [talk for _, _, talk in found]


def _is_reply(part: Json) -> bool:
    kinds = ("reasoning", "function_call", "custom_tool_call")
    return part.get("role") == "assistant" or part.get("type") in kinds


class Dialect(Protocol):
    """One protocol's forms."""

    def path(self, exchange: Exchange) -> str: ...
    def resend(self, resent: list[Json], said: Said) -> list[Json]:
        """The reply as the client that wrote `resent` would send it back."""
        ...

    def result(self, recorded: Json | None, call: Call) -> Json:
        """What `recorded` says, or that nothing was run, as the result of `call`."""
        ...

    def other(self, part: Json) -> Json:
        """A part of the history that is neither reply nor result."""
        ...

    def request(self, exchange: Exchange, history: list[Json]) -> Json: ...


def goes_on(dialect: Dialect, exchange: Exchange, said: Said) -> list[Json]:
    """What the history gains between the reply `said` and the request of `exchange`."""
    results = [part for part in exchange.added if is_result(part)]
    others = [part for part in exchange.added if not is_result(part)]
    calls = said.calls
    gained = dialect.resend(exchange.resent, said)
    for n, call in enumerate(calls):
        gained.append(dialect.result(results[n] if n < len(results) else None, call))
    if results and not calls:
        text = "\n".join(text_of(part.get("content", part.get("output"))) for part in results)
        gained.append(dialect.other({"role": "user", "content": text}))
    return gained + [dialect.other(part) for part in others]


def is_result(part: Json) -> bool:
    return part.get("role") == "tool" or str(part.get("type")).endswith("_call_output")


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


class Chat:
    def path(self, exchange: Exchange) -> str:
        return exchange.path

    def resend(self, resent: list[Json], said: Said) -> list[Json]:
        [recorded] = resent
        message = dict(recorded)
        if said.text or not said.calls:
            text = said.text
            message["content"] = [{"type": "text", "text": text}] if _is_list(recorded) else text
        elif recorded.get("content"):
            message["content"] = None
        for key in ("reasoning_content", "reasoning"):
            if key in recorded:
                message[key] = said.reasoning
        message.pop("tool_calls", None)
        written = [call["function"]["arguments"] for call in recorded.get("tool_calls") or ()]
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": rewritten(call.arguments, written[:1]),
                    },
                }
                for call in said.calls
            ]
        return [message]

    def result(self, recorded: Json | None, call: Call) -> Json:
        if recorded is None:
            return {"role": "tool", "tool_call_id": call.id, "content": NOT_RUN}
        return {**recorded, "tool_call_id": call.id}

    def other(self, part: Json) -> Json:
        return part

    def request(self, exchange: Exchange, history: list[Json]) -> Json:
        return {**exchange.body, "messages": history}


def rewritten(arguments: str, habit: list[str]) -> str:
    """Arguments as this client writes them: anew without spaces, or as they came."""
    try:
        compact = habit and habit[0] == _compact(json.loads(habit[0]))
        return _compact(json.loads(arguments)) if compact else arguments
    except ValueError:
        return arguments


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_list(message: Json) -> bool:
    return isinstance(message.get("content"), list)


class Responses:
    def path(self, exchange: Exchange) -> str:
        return exchange.path

    def resend(self, resent: list[Json], said: Said) -> list[Json]:
        """Keys as recorded for an item of that type; reasoning only from who sends it back."""
        forms = {item.get("type", "message"): item for item in resent}
        found = []
        for item in said.parts:
            if item["type"] == "reasoning" and "reasoning" not in forms:
                continue
            form = forms.get(item["type"], item)
            kept = {*form, "namespace"} & {*item}
            found.append({**{k: v for k, v in form.items() if v is None}, **_only(item, kept)})
        return found

    def result(self, recorded: Json | None, call: Call) -> Json:
        form = recorded or {"type": "function_call_output", "output": NOT_RUN}
        return {**form, "call_id": call.id}

    def other(self, part: Json) -> Json:
        return part

    def request(self, exchange: Exchange, history: list[Json]) -> Json:
        return {**exchange.body, "input": history}


def _only(item: Json, keys: set[str]) -> Json:
    return {key: value for key, value in item.items() if key in keys}


class Messages:
    """Recorded chat requests, asked as a coding agent asks in Anthropic's dialect: a billing line
    before the system prompt, thinking with its signature sent back, results as blocks of one user
    message, and a mark that moves to the last block."""

    def path(self, exchange: Exchange) -> str:
        return "/v1/messages?beta=true"

    def resend(self, resent: list[Json], said: Said) -> list[Json]:
        return [{"role": "assistant", "content": said.parts}]

    def result(self, recorded: Json | None, call: Call) -> Json:
        text = NOT_RUN if recorded is None else text_of(recorded["content"])
        block = {"type": "tool_result", "tool_use_id": call.id, "content": text}
        return {"role": "user", "content": [block]}

    def other(self, part: Json) -> Json:
        blocks: list[Json] = []
        if part.get("reasoning_content"):
            thought = part["reasoning_content"]
            blocks.append({"type": "thinking", "thinking": thought, "signature": "recorded"})
        if part["role"] == "tool":
            return self.result(part, Call(part["tool_call_id"], "", ""))
        if text := text_of(part.get("content")):
            blocks.append({"type": "text", "text": text})
        for call in part.get("tool_calls") or ():
            made = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            blocks.append({**made, "input": json.loads(call["function"]["arguments"])})
        return {"role": part["role"], "content": blocks}

    def request(self, exchange: Exchange, history: list[Json]) -> Json:
        head, messages = [], []
        for part in history:
            if part["role"] in ("system", "developer") and not messages:
                head += [{"type": "text", "text": text_of(part["content"])}]
            elif messages and part["role"] == "user" == messages[-1]["role"]:
                messages[-1] = {
                    "role": "user",
                    "content": messages[-1]["content"] + self._blocks(part),
                }
            else:
                messages.append({"role": part["role"], "content": self._blocks(part)})
        messages[-1]["content"][-1] = messages[-1]["content"][-1] | MARK
        body = exchange.body
        line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0.abc;"}
        asked: Json = {
            "model": body["model"],
            "max_tokens": body.get("max_tokens") or body.get("max_completion_tokens") or 32_000,
            "stream": bool(body.get("stream")),
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "user"},
            "system": [line, *head[:-1], *(block | MARK for block in head[-1:])],
            "messages": messages,
        }
        if body.get("tools"):
            asked["tools"] = [
                {
                    "name": tool["function"]["name"],
                    "description": tool["function"].get("description", ""),
                    "input_schema": tool["function"].get("parameters") or {"type": "object"},
                }
                for tool in body["tools"]
            ]
        return asked

    @staticmethod
    def _blocks(part: Json) -> list[Json]:
        if isinstance(part["content"], str):
            return [{"type": "text", "text": part["content"]}]
        return [dict(block) for block in part["content"]]
