"""The served document is what the server does: routes, fields, answers, refusals, keys."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, Replies, Served, fake_engine, serving
from jsonschema import Draft202012Validator

from capserve.api import messages_translate, openapi_forms, responses_translate
from capserve.api.app import create_app
from capserve.api.completions import SHARED, CompletionRequest
from capserve.api.messages_schema import CountRequest, MessagesRequest
from capserve.api.openapi import OPERATIONS
from capserve.api.responses_schema import ResponsesRequest
from capserve.api.schemas import ChatRequest
from capserve.api.strict_json import parse_object
from capserve.errors import CapserveError
from capserve.text.markup import spell_call, spell_parameter
from tests.fuzz import mutate, seeds
from tests.fuzz.contract import PARSERS, Document, copied, refusal

Json = dict[str, Any]

CHANGES = 250
"""Of each endpoint's bodies; `make fuzz` makes many more."""

BODIES: dict[str, tuple[str, list[Json]]] = {
    "ChatRequest": ("/v1/chat/completions", seeds.chat()),
    "CompletionRequest": ("/v1/completions", seeds.completions()),
    "ResponsesRequest": ("/v1/responses", seeds.responses()),
    "MessagesRequest": ("/v1/messages", seeds.messages()),
    "CountRequest": ("/v1/messages/count_tokens", seeds.messages()),
    "TokenizeRequest": ("/tokenize", seeds.tokenize()[:2]),
    "DetokenizeRequest": ("/detokenize", seeds.tokenize()[2:]),
    "ForkBody": ("/v1/sessions/none/fork", [{"n": 2, "turns": 1, "boundary": 4}]),
    "UndoBody": ("/v1/sessions/none/undo", [{"turns": 1, "boundary": 3}]),
    "PinBody": ("/v1/sessions/none/pin", [{"boundary": 3, "pinned": True}]),
}
"""Component -> where it is sent, and bodies that have it all."""

LEAST: dict[str, Json] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "x"}]},
    "CompletionRequest": {"prompt": "x"},
    "ResponsesRequest": {"input": "x"},
    "MessagesRequest": {
        "model": NAME,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
    },
    "CountRequest": {"model": NAME, "messages": [{"role": "user", "content": "x"}]},
    "TokenizeRequest": {"prompt": "x"},
    "DetokenizeRequest": {"tokens": [5]},
}
"""The smallest body of each."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = Replies()
    call = spell_call("write_file", spell_parameter("path", "a"))
    replies.say["call"] = f"I think.\n</think>\n\nI write.\n\n{call}"
    with serving(fake_engine(replies), max_output_tokens=200) as running:
        yield running


@pytest.fixture(scope="module")
def document(served: Served) -> Document:
    response = served.http.get("/openapi.json")
    assert response.status_code == 200
    return Document(response.json())


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_every_route_is_an_operation_and_every_operation_a_route(served: Served):
    # The framework's own document has no bodies, but it knows every route.
    generated = create_app(served.state).openapi()["paths"]
    routes = [(method, path) for path, methods in generated.items() for method in methods]
    told = [(operation.method, operation.path) for operation in OPERATIONS]
    assert sorted(told) == sorted(routes)


def test_each_schema_is_one_and_leads_nowhere_else(document: Document):
    schemas = document.root["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for reference in _references(document.root):
        assert reference.removeprefix("#/components/schemas/") in schemas


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


FIELDS = {
    "ChatRequest": {*ChatRequest.model_fields},
    "CompletionRequest": {*CompletionRequest.model_fields, *SHARED},
    "ResponsesRequest": {*ResponsesRequest.model_fields, *responses_translate.SHARED},
    "MessagesRequest": {
        *MessagesRequest.model_fields,
        *messages_translate.SHARED_FIELDS,
        "thread",
    },
    "CountRequest": {
        *CountRequest.model_fields,
        *messages_translate.SHARED_FIELDS,
        "thread",
    }
    - {"max_tokens"},
}


@pytest.mark.parametrize("component", FIELDS)
def test_the_document_has_the_parsers_fields_and_no_other(document: Document, component: str):
    assert set(document.properties(component)) == FIELDS[component]


@pytest.mark.parametrize("component", LEAST)
def test_each_field_takes_in_the_document_what_the_parser_takes(
    served: Served, document: Document, component: str
):
    judge, path = document.judge(component), BODIES[component][0]
    assert judge.is_valid(LEAST[component])
    compared = 0
    for name, schema in document.properties(component).items():
        for value in _probes(schema, document.root):
            body = LEAST[component] | {name: value}
            _compare(served, judge, component, path, body)
            compared += 1
    assert compared > 20 * len(document.properties(component))


def _probes(schema: Json, root: Json) -> Iterator[Any]:
    """Values of every type, and those on both sides of each bound in the schema."""
    yield from (None, True, False, 0, -1, 1, 0.5, 1e300, "", "x", "auto", [], ["x"], {}, {"a": 1})
    yield from ([None], [1], [[]], [{}], 2**31, 2**63, -(2**63), 2**64 - 1, 10**30, "x" * 300)
    for part in _parts(schema, root):
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if key in part:
                yield from (part[key] - 1, part[key] - 0.001, part[key], part[key] + 0.001)
                yield part[key] + 1
        for key in ("minLength", "maxLength"):
            if key in part:
                yield from ("é" * (part[key] + extra) for extra in (-1, 0, 1))
        for key in ("minItems", "maxItems"):
            if part.get(key, 10**9) < 1000:
                yield from (["x"] * (part[key] + extra) for extra in (-1, 0, 1))
        yield from part.get("enum", ())


def _parts(schema: Json, root: Json) -> Iterator[Json]:
    yield schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from _parts(root["components"]["schemas"][name], root)
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, ()):
            yield from _parts(part, root)


def _compare(served: Served, judge: Any, component: str, path: str, body: Json) -> None:
    fits = judge.is_valid(body)
    why = refusal(component, copied(body))
    if fits:
        assert why is None, f"{component} takes {body}, but the parser: {why}"
    elif why is None:
        # The document knows the model, and what one field demands of another: so does the server.
        reply = served.http.post(path, json=body)
        assert reply.status_code in (400, 404), f"{component} refuses {body}: {reply.text[:300]}"


@pytest.mark.parametrize("component", BODIES)
def test_changed_bodies_are_valid_just_where_the_parser_takes_them(
    served: Served, document: Document, component: str
):
    path, bodies = BODIES[component]
    judge, rng = document.judge(component), random.Random(component)
    for body in bodies:
        assert judge.is_valid(body)
        _compare(served, judge, component, path, body)
    both: set[bool] = set()
    for _ in range(CHANGES):
        data = json.dumps(rng.choice(bodies)).encode()
        for _ in range(rng.choice((1, 1, 2))):
            data = mutate.change_json(data, rng)
        try:
            body = parse_object(data)
        except CapserveError:
            continue
        both.add(judge.is_valid(body))
        _compare(served, judge, component, path, body)
    assert both == {True, False}


def test_every_parser_of_a_body_is_compared():
    bodies = {operation.body for operation in OPERATIONS if operation.body}
    assert bodies == PARSERS.keys() | {"SessionFile"}
    assert PARSERS.keys() == BODIES.keys()


def test_a_reader_that_nobody_described_can_not_be_documented():
    def reads_anything(value: object) -> object:
        return value

    with pytest.raises(KeyError):
        openapi_forms.form_of(reads_anything, {})


# -- answers ------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "call"}]


def test_replies_of_every_protocol_are_of_their_documented_form(served: Served, document: Document):
    chat = {"messages": TALK, "tools": [seeds.TOOL], "logprobs": True, "top_logprobs": 2}
    message = {"model": NAME, "max_tokens": 90, "messages": TALK, "thinking": {"type": "enabled"}}
    tool = {"name": "write_file", "input_schema": {"type": "object"}}
    function = {"type": "function", "name": "write_file", "parameters": {"type": "object"}}
    cases: list[tuple[str, str, Json]] = [
        ("/v1/chat/completions", "ChatCompletion", chat),
        ("/v1/chat/completions", "ChatCompletion", {**chat, "n": 2, "return_token_ids": True}),
        ("/v1/chat/completions", "ChatCompletion", {"messages": TALK, "max_tokens": 1}),
        ("/v1/completions", "Completion", {"prompt": ["a", "b"], "logprobs": 2, "max_tokens": 4}),
        ("/v1/messages", "MessageReply", {**message, "tools": [tool]}),
        ("/v1/messages", "MessageReply", {**message, "stop_sequences": ["w"]}),
        ("/v1/messages/count_tokens", "TokenCount", message),
        ("/v1/responses", "ResponseReply", {"input": "call", "tools": [function]}),
        ("/v1/responses", "ResponseReply", {"input": "call", "max_output_tokens": 2}),
        ("/tokenize", "Tokens", {"prompt": "abc", "return_token_strs": True}),
        ("/detokenize", "Spelling", {"tokens": [5, 6]}),
    ]
    for path, component, body in cases:
        response = served.http.post(path, json=body)
        assert response.status_code == 200, response.text
        document.judge(component).validate(response.json())


def test_events_of_a_stream_are_of_their_documented_form(served: Served, document: Document):
    chat = {"messages": TALK, "tools": [seeds.TOOL], "logprobs": True, "return_token_ids": True}
    message = {"model": NAME, "max_tokens": 90, "messages": TALK, "thinking": {"type": "enabled"}}
    tool = {"name": "write_file", "input_schema": {"type": "object"}}
    custom = {"type": "custom", "name": "write_file"}
    function = {"type": "function", "name": "write_file", "parameters": {"type": "object"}}
    usage: Json = {"stream_options": {"include_usage": True}}
    for path, component, body in (
        ("/v1/chat/completions", "ChatCompletionData", {**chat, **usage}),
        ("/v1/completions", "CompletionData", {"prompt": "a", "logprobs": 1, **usage}),
        ("/v1/messages", "MessageEvent", {**message, "tools": [tool]}),
        ("/v1/responses", "ResponseEvent", {"input": "call", "tools": [function]}),
        ("/v1/responses", "ResponseEvent", {"input": "call", "tools": [custom]}),
        ("/v1/responses", "ResponseEvent", {"input": "call", "max_output_tokens": 2}),
    ):
        text = served.http.post(path, json={**body, "stream": True}).text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        assert len(events) > 3
        for event in events:
            document.judge(component).validate(json.loads(event))


def test_a_session_and_all_that_is_done_with_it_have_their_documented_forms(
    served: Served, document: Document
):
    http = served.http
    body = {"messages": [{"role": "user", "content": "keep"}], "enable_thinking": False}
    name = http.post("/v1/chat/completions", json=body).json()["capserve"]["session_id"]
    at = f"/v1/sessions/{name}"
    document.judge("Session").validate(http.get(at).json())
    document.judge("SessionList").validate(http.get("/v1/sessions?limit=5").json())
    document.judge("SessionPinned").validate(http.post(f"{at}/pin", json={}).json())
    document.judge("SessionForks").validate(http.post(f"{at}/fork", json={"n": 2}).json())
    file = http.get(f"{at}/export")
    assert file.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(file.content)) as archive:
        assert "session.json" in archive.getnames()
    tar = {"content-type": "application/x-tar"}
    came = http.post("/v1/sessions/import", content=file.content, headers=tar)
    document.judge("SessionImported").validate(came.json())
    document.judge("SessionUndone").validate(http.post(f"{at}/undo", json={}).json())
    document.judge("SessionDeleted").validate(http.delete(at).json())
    kept = http.post("/v1/responses", json={"input": "keep"}).json()["id"]
    document.judge("ResponseReply").validate(http.get(f"/v1/responses/{kept}").json())
    items = http.get(f"/v1/responses/{kept}/input_items").json()
    document.judge("ResponseItems").validate(items)
    document.judge("ResponseDeleted").validate(http.delete(f"/v1/responses/{kept}").json())


def test_the_small_answers_are_of_their_documented_forms(served: Served, document: Document):
    for path, component in (
        ("/v1/models", "ModelList"),
        (f"/v1/models/{NAME}", "Model"),
        ("/health", "Health"),
        ("/ready", "Ready"),
    ):
        document.judge(component).validate(served.http.get(path).json())


def test_refusals_have_the_documented_body_of_their_dialect(served: Served, document: Document):
    for path, component in (
        ("/v1/chat/completions", "Error"),
        ("/v1/responses", "Error"),
        ("/v1/messages", "MessagesError"),
    ):
        refused = served.http.post(path, json={"messages": 5})
        assert refused.status_code == 400
        document.judge(component).validate(refused.json())
        told = document.root["paths"][path]["post"]["responses"]["400"]["content"]
        assert told["application/json"]["schema"]["$ref"].endswith(f"/{component}")
    thread = served.http.post("/v1/messages", json={**LEAST["MessagesRequest"], "thread": {}})
    document.judge("MessagesError").validate(thread.json())


def test_the_document_says_whether_a_key_is_needed():
    with serving(fake_engine(), api_keys=("secret",)) as served:
        assert served.http.get("/openapi.json").status_code == 401
        root = served.http.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    with serving(fake_engine()) as served:
        open_root = served.http.get("/openapi.json").json()
    either = [{"bearer": []}, {"x-api-key": []}]
    assert root["paths"]["/v1/chat/completions"]["post"]["security"] == either
    assert open_root["paths"]["/v1/chat/completions"]["post"]["security"] == [{}, *either]
    assert root["paths"]["/health"]["get"]["security"] == []
    schemes = root["components"]["securitySchemes"]
    assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
    assert schemes["x-api-key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}
