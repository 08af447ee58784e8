"""What is thrown at which parser, and what must hold of every input?

Bad input raises nothing but a `CapserveError` that is the client's own fault and can be written
down; good input is carried through to the bytes of its reply. Text machines give the same for any
cut. `Clock` bounds the processor time of one input.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import orjson

from capserve.api import chat, completions, messages, responses, tokens
from capserve.api.errors import error_body
from capserve.api.messages_errors import messages_error_body
from capserve.api.relay import Prepare, Prepared, _timed
from capserve.api.responses_store import ResponseStore
from capserve.api.strict_json import parse_object
from capserve.engine.seam import TokenArray
from capserve.errors import CapserveError, InvalidRequestError
from capserve.serving.sinks import FutureSink, Reply
from capserve.serving.turn import CancelToken, Failed, WorkItem
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.testing.replies import TOOLS, generate_replies
from capserve.text.detokenize import Detokenizer
from capserve.text.grammar import Constraint, GrammarCompiler
from capserve.text.messages import Conversation, Message, ToolCall
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.template import ChatTemplate
from tests.fuzz import mutate, seeds
from tests.http.harness import Served, end_tokens, serving, template, tokenizer

MOST_CPU_S = 2.0
"""Of one input, on the thread that reads it."""
MOST_STEPS = 24
"""Tokens that are followed through a grammar."""
CALLER = "fuzz"


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    change: mutate.Mutator
    max_bytes: int = 1 << 16


class TooSlowError(AssertionError):
    """One input took longer than any may."""


class ServerFaultError(AssertionError):
    """The server answered as if it was its own fault."""


@contextmanager
def clock() -> Iterator[None]:
    """Processor time, not the wall's: others share this machine."""
    before = time.thread_time()
    yield
    spent = time.thread_time() - before
    if spent > MOST_CPU_S:
        raise TooSlowError(f"{spent:.1f} s of processor time, {MOST_CPU_S:g} s are the most")


def told(error: CapserveError) -> None:
    """A refusal that the client caused, in a body that can be sent."""
    if not (400 <= error.status < 500 or error.status == 503):
        raise ServerFaultError(f"{type(error).__name__}: {error.message}") from error
    assert error.message
    for body in (error_body(error), messages_error_body(error, "r")):
        assert len(orjson.dumps(body)) < 20_000, "a refusal quotes too much of the request"


class Stage:
    """A server on the fake engine, whose parsers are called without its wire."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._state = served.state
        self._compiler = GrammarCompiler(tokenizer(), end_tokens())
        self._faults = _Faults()
        logging.getLogger("capserve.api").addHandler(self._faults)

    @property
    def url(self) -> str:
        return self._served.url

    def targets(self) -> dict[str, Target]:
        store = responses.Responses(ResponseStore())
        dialects: dict[str, tuple[Prepare, str, list[Any]]] = {
            "chat": (chat.prepare, "/v1/chat/completions", seeds.chat()),
            "completions": (completions.prepare, "/v1/completions", seeds.completions()),
            "responses": (store, "/v1/responses", seeds.responses()),
            "messages": (messages.prepare, "/v1/messages", seeds.messages()),
        }
        found = {
            name: Target(
                lambda data, prepare=prepare: self.turn(prepare, data),  # type: ignore[misc]
                lambda path=path, own=own: _written(own) + seeds.recorded().get(path, []),  # type: ignore[misc]
                mutate.change_json,
            )
            for name, (prepare, path, own) in dialects.items()
        }
        found["tokens"] = Target(
            self.tokens, lambda: _written(seeds.tokenize()), mutate.change_json
        )
        found["json"] = Target(
            strict_json, lambda: _written([*seeds.chat(), *seeds.messages()]), mutate.change_bytes
        )
        found["output"] = Target(output, seeds.replies, mutate.change_markup, 700)
        found["detokenize"] = Target(detokenize, seeds.replies, mutate.change_bytes, 700)
        found["template"] = Target(
            Rendering().run, lambda: _written(seeds.chat()), mutate.change_json
        )
        found["grammar"] = Target(
            self.grammar, lambda: _written(seeds.schemas()), mutate.change_json
        )
        found["session_file"] = Target(
            self.session_file, self.session_files, mutate.change_session_file, 1 << 20
        )
        return found

    # -- requests ----------------------------------------------------------------------------

    def turn(self, prepare: Prepare, data: bytes) -> None:
        try:
            with clock():
                ready = self._prepared(prepare, data)
        except CapserveError as error:
            told(error)
            return
        replies = self._replies(ready.turns)
        if replies is None:
            return
        with clock():
            # The plain reply is folded from what the stream would have said.
            if not ready.stream:
                orjson.dumps(ready.body(replies))
                return
            over = False
            for index, reply in enumerate(replies):
                ready.chunks.written((index, reply.delta))
                _, over = ready.chunks.written((index, reply.end))
            assert over

    def _prepared(self, prepare: Prepare, data: bytes) -> Prepared:
        """As `Relay.prepared`, on this thread."""
        ready, _ = _timed(lambda: prepare(self._state, data, "r", CALLER))
        if (demand := ready.demand) is None:
            return ready
        grammar, _ = _timed(demand)
        return ready.under(grammar)

    def _replies(self, turns: Sequence[Any]) -> list[Reply] | None:
        """What the turns said; None when one was refused."""
        sinks = [FutureSink() for _ in turns]
        try:
            for turn, sink in zip(turns, sinks, strict=True):
                item = WorkItem(turn, time.monotonic(), sink, CancelToken())
                self._served.worker.submit(item)
                # One after the other: a full queue is no fault of the input.
                end = sink.wait(30).end
                if isinstance(end, Failed):
                    raise end.error
        except CapserveError as error:
            told(error)
            return None
        finally:
            self._served.worker.items.clear()
            self._served.worker.ends.clear()
        return [sink.wait(0) for sink in sinks]

    def tokens(self, data: bytes) -> None:
        for answer in (tokens.tokenized, tokens.spelled):
            try:
                with clock():
                    orjson.dumps(tokens._shallow(answer, self._state, data))
            except CapserveError as error:
                told(error)
        try:
            with clock():
                self._prepared(messages.prepare_count, data)
        except CapserveError as error:
            told(error)

    def grammar(self, data: bytes) -> None:
        """Compiled, then followed for some tokens, chosen by the input's own hash."""
        try:
            value = parse_object(data)
        except CapserveError:
            return
        shown = _objects(value.get("tools"))
        schema = value.get("schema")
        form = None
        if isinstance(schema, dict):
            form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
        must = bool(value.get("choice")) and form is None
        try:
            with clock():
                grammar = self._compiler.compile(
                    Constraint(shown, "required" if must else "auto", response_format=form)
                )
            if grammar is None:
                return
            rng = _rng(data)
            matcher = grammar.matcher()
            for _ in range(MOST_STEPS):
                with clock():
                    mask = matcher.mask()
                    assert mask is not None
                    allowed = [
                        word * 32 + bit
                        for word, bits in enumerate(mask.tolist())
                        if bits
                        for bit in range(32)
                        if bits >> bit & 1
                    ]
                    assert allowed, "a reply that can neither go on nor end"
                    matcher.advance(rng.choice(allowed))
        except InvalidRequestError as error:
            told(error)

    # -- session files -----------------------------------------------------------------------

    def session_files(self) -> list[bytes]:
        http = self._served.http
        files = []
        for fields in ({}, {"tools": [seeds.TOOL], "enable_thinking": False}):
            body = {"messages": [{"role": "user", "content": f"file {fields}"}], "max_tokens": 9}
            reply = http.post("/v1/chat/completions", json={**body, **fields}).json()
            name = reply["capserve"]["session_id"]
            files.append(http.get(f"/v1/sessions/{name}/export?include=all").content)
        return files

    def session_file(self, data: bytes) -> None:
        """In, then all that one may do with a session; over the wire, where it is one call."""
        http = self._served.http
        headers = {"content-type": "application/x-tar"}
        came = self._answered(http.post("/v1/sessions/import", content=data, headers=headers))
        if came.status_code != 201:
            return
        name = came.json()["id"]
        self._answered(http.get(f"/v1/sessions/{name}"))
        self._answered(http.post(f"/v1/sessions/{name}/fork", json={"turns": 1}))
        body = {"messages": [{"role": "user", "content": "on"}], "max_tokens": 2}
        self._answered(http.post("/v1/chat/completions", json={**body, "session_id": name}))
        self._answered(http.post(f"/v1/sessions/{name}/undo", json={}))
        self._answered(http.get(f"/v1/sessions/{name}/export?include=all"))
        self._answered(http.delete(f"/v1/sessions/{name}"))

    def _answered(self, response: httpx.Response) -> httpx.Response:
        if response.status_code >= 500 and response.status_code != 503:
            raise ServerFaultError(f"{response.status_code}: {self._faults.last}")
        assert response.elapsed.total_seconds() < 20
        return response


class _Faults(logging.Handler):
    """Keeps what the server logs of its own failures."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = logging.Formatter().formatException(record.exc_info)


class _Model:
    """Says one of some replies, with calls and broken calls among them, by a hash of the prompt."""

    def __init__(self) -> None:
        written = [reply.text for reply in generate_replies(64, seed=5)]
        self._said = [[*tokenizer().encode(text).tolist(), end_tokens()[0]] for text in written]

    def __call__(self, prompt: TokenArray) -> Sequence[int]:
        return self._said[zlib.crc32(prompt.tobytes()) % len(self._said)]


@contextmanager
def stage() -> Iterator[Stage]:
    """A server with a disk, so that what it keeps is written, too."""
    limits = fake_limits(vocab_size=tokenizer().vocab_size, max_positions=8192)
    engine = FakeEngine(limits, _Model())
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(engine, capsule_dir=Path(folder), max_output_tokens=12) as served,
    ):
        yield Stage(served)


# -- without a server ---------------------------------------------------------------------------


def strict_json(data: bytes) -> None:
    """What is taken is what the standard library reads; what it refuses is refused."""
    try:
        with clock():
            value = parse_object(data)
    except CapserveError as error:
        told(error)
        return
    assert json.loads(data, parse_int=_number) == value


def _number(digits: str) -> int | float:
    """Beyond 64 bits a number is a float."""
    value = int(digits) if len(digits) < 30 else float(digits)
    return value if -(2**63) <= value < 2**64 else float(digits)


class _Bytes:
    """A vocabulary whose tokens are these byte strings: cuts fall where they are wanted."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.specials: dict[str, int] = {}
        self.control_ids: frozenset[int] = frozenset()
        self.token_bytes = parts.__getitem__


def _cuts(data: bytes) -> Iterator[list[bytes]]:
    """Whole; byte by byte; in two; in some pieces. Where is decided by the bytes themselves."""
    rng = _rng(data)
    yield [data]
    yield [bytes([byte]) for byte in data]
    for count in (1, 3, 9):
        places = sorted(rng.randrange(len(data) + 1) for _ in range(count))
        yield [data[a:b] for a, b in itertools.pairwise([0, *places, len(data)])]


def output(data: bytes) -> None:
    """Two bytes of settings, then stop strings (a length, then the string), then the reply."""
    if len(data) < 2:
        return
    flags, count, text = data[0], data[1] % 4, data[2:]
    stops = []
    for _ in range(count):
        length = 1 + (text[0] if text else 0) % 8
        stops.append(text[1 : 1 + length].decode(errors="replace"))
        text = text[1 + length :]
    spec = OutputSpec(
        tools=TOOLS if flags & 1 else (),
        stop=tuple(stop for stop in stops if stop),
        starts_in_reasoning=bool(flags & 2),
        max_calls=(None, 1, None, 2)[flags >> 2 & 3],
        plain=bool(flags & 16) and not flags & 3,
    )
    results = []
    for parts in _cuts(text):
        with clock():
            results.append(_read(spec, parts))
    assert all(result == results[0] for result in results), "another reply when it is cut"


def _read(spec: OutputSpec, parts: list[bytes]) -> tuple[Message, str | None]:
    numbers = itertools.count()
    vocabulary: Any = _Bytes(parts)
    reply = TurnOutput(spec, vocabulary, (), id_factory=lambda: f"call_{next(numbers)}")
    deltas = [reply.feed((i,)) for i in range(len(parts))]
    deltas.append(reply.finish())
    message = reply.message()
    assert message.content == "".join(delta.content for delta in deltas)
    assert message.reasoning == "".join(delta.reasoning for delta in deltas)
    assert len(message.tool_calls) == sum(len(delta.calls) for delta in deltas)
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        (call.name + call.arguments).encode()
    message.content.encode()
    return message, reply.stop_string


def detokenize(data: bytes) -> None:
    whole = data.decode(errors="replace")
    for parts in _cuts(data):
        vocabulary: Any = _Bytes(parts)
        reader = Detokenizer(vocabulary)
        said = "".join(reader.feed((i,)) for i in range(len(parts))) + reader.flush()
        assert said == whole


class Rendering:
    """Messages are data, whatever stands in them."""

    def __init__(self) -> None:
        self._templates = [template()]
        for file in sorted(seeds.SHARED.glob("facts/templates/**/*.jinja")):
            self._templates.append(ChatTemplate(file.read_text(encoding="utf-8")))

    def run(self, data: bytes) -> None:
        try:
            talk = _conversation(parse_object(data))
        except CapserveError:
            return
        for one in self._templates:
            try:
                with clock():
                    text = one.render(talk, add_generation_prompt=True)
            except InvalidRequestError as error:
                told(error)
                continue
            text.encode()
            for message in talk.messages:
                # What looks like template code comes out as it went in.
                if message.role == "user" and "{{" in message.content and len(talk.messages) < 3:
                    assert message.content.strip() in text


def _conversation(value: dict[str, Any]) -> Conversation:
    """Whatever is text in `value` is put where text may stand, without any check."""
    talk = []
    for entry in _objects(value.get("messages"))[:50]:
        role = entry.get("role")
        calls = entry.get("tool_calls")
        made: list[ToolCall] = []
        if role == "assistant" and isinstance(calls, list):
            names = [json.dumps(call)[:2000] for call in calls[:20]]
            made = [ToolCall(name[:40], name) for name in names]
        talk.append(
            Message(
                role if role in ("system", "user", "assistant", "tool") else "user",
                str(entry.get("content", ""))[:20_000],
                reasoning=entry["reasoning"] if isinstance(entry.get("reasoning"), str) else None,
                tool_calls=tuple(made),
                name=str(entry.get("name", "")),
            )
        )
    kwargs = value.get("chat_template_kwargs")
    switches = kwargs if isinstance(kwargs, dict) else None
    return Conversation(tuple(talk), _objects(value.get("tools")), switches)


def _objects(value: object) -> tuple[dict[str, Any], ...]:
    return tuple(one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _written(bodies: list[Any]) -> list[bytes]:
    return [json.dumps(body, ensure_ascii=False).encode() for body in bodies]


def _rng(data: bytes) -> random.Random:
    return random.Random(blake2b(data, digest_size=8).digest())
