"""What do the requests of known agent clients look like, when one small task is done with each?

One story, told in every client's form: its roles, its way to say that there is no content, whether
reasoning comes back and under which keys, how arguments are written anew, which fields it sets, and
what it asks beside the conversation. The words are made up; the forms are theirs. The records are
like those of a recorder: a path, a body, and the reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages?beta=true"

SYSTEM = "You change code in a small project. Look before you write, and run what you changed. " * 9
TASK = "`area` is wrong for a circle. Mend it, run the checks and say what was wrong."
MORE = "And what about the perimeter? Só a resposta, por favor."


@dataclass(frozen=True)
class Step:
    """A reply; `results` answer its calls in order, or `words` of the user follow it."""

    text: str = ""
    thought: str | None = None
    calls: tuple[tuple[str, Json], ...] = ()
    results: tuple[str, ...] = ()
    words: str | None = None


STORY = (
    Step(
        "I begin with the file.\n\n",
        "Where is `area`? In shapes.py, I think.",
        (("read_file", {"path": "/project/shapes.py"}),),
        ("import math\n\n\ndef area(r):\n    return math.pi * r + r\n",),
    ),
    Step(
        "",
        "The checks next — and what else is there.\n",
        (
            ("read_file", {"path": "/project/check.py"}),
            ("run", {"command": "ls -la '/project'", "seconds": 5}),
        ),
        ("assert round(area(2), 2) == 12.57\n", "check.py\nshapes.py\n"),
    ),
    Step(
        "It adds where it has to multiply.",
        None,
        (
            (
                "edit_file",
                {
                    "path": "/project/shapes.py",
                    "old": "    return math.pi * r + r",
                    "new": '    """πr² — naïve, but "right"."""\n    return math.pi * r * r\n',
                    "all": False,
                },
            ),
        ),
        ("1 place changed",),
    ),
    Step(
        "Now the checks.\n",
        "One run is enough.",
        (("run", {"command": "python3 check.py && echo \"ok\" \\\n  | tr 'a-z' 'A-Z'"}),),
        ("OK 🎉\n",),
    ),
    Step(
        "## Mended ✅\n\n`area` added the radius:\n\n```python\nreturn math.pi * r * r\n```\n\n"
        "| file | change |\n|---|---|\n| `shapes.py` | 面積 is right now 🧑‍💻 |\n",
        "Say it short.",
        words=MORE,
    ),
    Step("`2 * math.pi * r`; não há erro ali.", "No tool is needed."),
)

PARAMETERS: dict[str, Json] = {
    "read_file": {"path": {"type": "string", "description": "An absolute path."}},
    "edit_file": {
        "path": {"type": "string"},
        "old": {"type": "string"},
        "new": {"type": "string"},
        "all": {"type": "boolean", "default": False},
    },
    "run": {"command": {"type": "string"}, "seconds": {"type": "integer", "minimum": 1}},
}


def schema(name: str, strict: bool) -> Json:
    properties = PARAMETERS[name]
    required = [key for key in properties if key not in ("all", "seconds")]
    shape: Json = {"type": "object", "properties": properties, "required": required}
    if strict:
        shape["additionalProperties"] = False
    return shape


@dataclass(frozen=True)
class ChatClient:
    """How one client writes chat requests."""

    fields: Json
    path: str = CHAT
    system: str | None = "system"
    """The role of the system prompt; None: there is none."""
    nothing: Any = None
    """Content of a reply that is only calls; "absent": the key is left out."""
    thoughts: tuple[str, ...] = ("reasoning_content",)
    no_thought: str | None = None
    """What those keys say where there was none; None: they are left out."""
    compact: bool = True
    """Arguments are written anew, without spaces."""
    parts: bool = False
    """Contents of the user and of tools are lists of parts."""
    strict: bool = False
    tools: bool = True
    late: str | None = None
    """A system message behind the first words of the user."""
    beside: tuple[Json, ...] = ()
    """Bodies of requests that are no part of the conversation, sent before it."""
    story: tuple[Step, ...] = STORY

    def records(self) -> list[Json]:
        history: list[Json] = []
        if self.system is not None:
            history.append({"role": self.system, "content": SYSTEM})
        history.append({"role": "user", "content": self._content(TASK)})
        if self.late is not None:
            history.append({"role": "system", "content": self.late})
        found = [_record(self.path, body, Step("A title")) for body in self.beside]
        for step in self.story:
            body = {"model": "served", "messages": [*history], **self.fields}
            if self.tools:
                body["tools"] = [self._tool(name) for name in PARAMETERS]
            found.append(_record(self.path, body, step))
            history += self._reply(step)
        return found

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.parts else text

    def _tool(self, name: str) -> Json:
        more = {"strict": True} if self.strict else {}
        shape = schema(name, self.strict)
        function = {"name": name, "description": f"Use {name}.", "parameters": shape, **more}
        return {"type": "function", "function": function}

    def _reply(self, step: Step) -> list[Json]:
        message: Json = {"role": "assistant", "content": step.text or self.nothing}
        if message["content"] == "absent":
            del message["content"]
        for key in self.thoughts:
            said = step.thought if step.thought is not None else self.no_thought
            if said is not None:
                message[key] = said
        separators = (",", ":") if self.compact else None
        ids = [f"call_{STORY.index(step)}{n}" for n in range(len(step.calls))]
        if step.calls:
            message["tool_calls"] = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(
                            arguments, ensure_ascii=False, separators=separators
                        ),
                    },
                }
                for id_, (name, arguments) in zip(ids, step.calls, strict=True)
            ]
        results = [
            {"role": "tool", "tool_call_id": id_, "content": self._content(text)}
            for id_, text in zip(ids, step.results, strict=True)
        ]
        if step.words is not None:
            results.append({"role": "user", "content": self._content(step.words)})
        return [message, *results]


@dataclass(frozen=True)
class ResponsesClient:
    """How one client writes requests of `/v1/responses`."""

    fields: Json
    opening: tuple[Json, ...]
    thoughts: bool
    """Reasoning items come back."""
    inside: str | None = None
    """A namespace that has tools of its own."""
    extra: Json = field(default_factory=dict)
    """Keys of the items that the client makes."""

    def records(self) -> list[Json]:
        history: list[Json] = [*self.opening]
        found = []
        for n, step in enumerate(STORY):
            body = {"model": "served", "input": [*history], "tools": self._tools(), **self.fields}
            found.append(_record(RESPONSES, body, step))
            history += self._reply(n, step)
        return found

    def _tools(self) -> list[Json]:
        tools: list[Json] = [
            {
                "type": "function",
                "name": name,
                "description": f"Use {name}.",
                "strict": self.inside is None,
                "parameters": schema(name, self.inside is None),
            }
            for name in PARAMETERS
        ]
        if self.inside is not None:
            none = {"type": "object", "properties": {}, "additionalProperties": False}
            wait = {"type": "function", "name": "wait", "description": "Wait.", "strict": False}
            group = {"type": "namespace", "name": self.inside, "description": "Agents."}
            tools.append({**group, "tools": [{**wait, "parameters": none}]})
        return tools

    def _reply(self, n: int, step: Step) -> list[Json]:
        items: list[Json] = []
        done = {"status": "completed"}
        if self.thoughts and step.thought is not None:
            text = [{"type": "reasoning_text", "text": step.thought}]
            item = {"type": "reasoning", "id": f"rs_{n}", "summary": [], "content": text}
            items.append({**item, "encrypted_content": None})
        if step.text:
            part = {"type": "output_text", "text": step.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{n}", "role": "assistant", "content": [part]}
            items.append(item | done)
        for i, (name, arguments) in enumerate(step.calls):
            call = {"type": "function_call", "id": f"fc_{n}{i}", "call_id": f"call_{n}{i}"}
            items.append({**call, "name": name, "arguments": json.dumps(arguments)} | done)
        for i, text in enumerate(step.results):
            answer = {"type": "function_call_output", "call_id": f"call_{n}{i}", "output": text}
            items.append(answer | self.extra)
        if step.words is not None:
            words = [{"type": "input_text", "text": step.words}]
            items.append({"type": "message", "role": "user", "content": words} | self.extra)
        return items


def _record(path: str, body: Json, step: Step) -> Json:
    calls = [{"name": name, "arguments": json.dumps(args)} for name, args in step.calls]
    message = {"content": step.text, "reasoning": step.thought, "tool_calls": calls}
    return {"path": path, "body": body, "reply": {"message": message}}


def _item(role: str, text: str, id_: str) -> Json:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": id_, "role": role, "content": content}


def _asked(fields: Json, *contents: str) -> Json:
    roles = ["system", *["user"] * (len(contents) - 1)]
    pairs = zip(roles, contents, strict=True)
    return {"model": "served", "messages": [{"role": r, "content": c} for r, c in pairs], **fields}


def _without_tools(story: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(Step(s.text, None, words=s.words or "Go on.") for s in story if s.text)


STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}

SHAPES: dict[str, ChatClient | ResponsesClient] = {
    "qwen-code": ChatClient(
        {**STREAM, "max_tokens": 32_768},
        thoughts=("reasoning_content", "reasoning"),
        parts=True,
        beside=(
            _asked(
                {**STREAM, "chat_template_kwargs": {"enable_thinking": False}},
                "Fold what was said into notes.",
                "Nothing was said yet.",
            ),
        ),
    ),
    "opencode": ChatClient(
        {**STREAM, "max_tokens": 32_000, "tool_choice": "auto"},
        nothing="",
        no_thought="",
        beside=(
            _asked({**STREAM, "temperature": 0.5, "max_tokens": 80}, "Name it.", "A title:", TASK),
        ),
    ),
    "cline": ChatClient({**STREAM, "tool_choice": "auto"}),
    "cline sub-agent": ChatClient({**STREAM, "tool_choice": "auto"}, system=None),
    "pi": ChatClient(
        {**STREAM, "max_completion_tokens": 128_000, "store": False, "reasoning_effort": "medium"},
        system="developer",
        parts=True,
    ),
    "mini-swe-agent": ChatClient({}, nothing="absent", compact=False),
    "aider": ChatClient(
        {"stream": True, "temperature": 0},
        thoughts=(),
        tools=False,
        story=_without_tools(STORY),
        beside=(_asked({"temperature": 0}, "Write a message for the commit.", "+ r * r"),),
    ),
    "pydantic-ai": ChatClient({"stream": False, "tool_choice": "auto"}),
    "openai-sdk": ChatClient(
        {**STREAM, "temperature": 0.2, "parallel_tool_calls": True},
        nothing="",
        compact=False,
        strict=True,
    ),
    "claude-code": ChatClient(
        {"stream": True, "max_tokens": 32_000},
        path=MESSAGES,
        late="More tools may follow. Today is a Tuesday.",
    ),
    "codex": ResponsesClient(
        {
            "stream": True,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-session",
            "client_metadata": {"installation": "{}"},
        },
        (
            _item("developer", SYSTEM, "msg_a"),
            _item("developer", "Skills: none.", "msg_b"),
            _item("user", "<environment>/project</environment>", "msg_c"),
            _item("user", TASK, "msg_d"),
        ),
        thoughts=True,
        inside="agents",
        extra={"id": "made_by_the_client"},
    ),
    "openai-sdk-responses": ResponsesClient(
        {"stream": True, "instructions": SYSTEM, "store": False},
        ({"role": "user", "content": TASK},),
        thoughts=False,
    ),
    "openai-sdk-responses plain": ResponsesClient(
        {"instructions": SYSTEM, "reasoning": {"effort": "none"}},
        ({"role": "user", "content": TASK},),
        thoughts=False,
    ),
}
