"""Does the server keep to its own document, whatever fits it or just does not?

schemathesis makes requests from `/openapi.json`, valid ones and ones that break a rule; each goes
to a real server. No answer is the server's own fault, and none contradicts the document: its
status, type, headers and body, or its events, are told there, and what breaks a rule is refused.
Ids of real sessions and replies are put into paths, which no generator would guess.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies as st
from requests import Session
from schemathesis import Case
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from tests.fuzz.mutate import change_session_file

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TAR_TYPE = "application/x-tar"
MOST_S = 120.0
"""For one answer, on a machine that others use, too."""
FAULTS = (b'"internal_error"', b'"engine_error"', b'"api_error"')
"""What an error event inside of a stream would have."""


@dataclass
class Tally:
    """What came of the cases of one operation."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest_ms: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    """Kind -> the first request that showed it."""

    @property
    def cases(self) -> int:
        return self.statuses.total()


class Run:
    """Cases against one server."""

    def __init__(self, url: str, seed: int, document: dict[str, Any] | None = None) -> None:
        """`document`: another one than the server's own."""
        self._url = url
        self._rng = random.Random(seed)
        self._seed = seed
        self._http = Session()
        if document is None:
            document = self._http.get(f"{url}/openapi.json", timeout=MOST_S).json()
        schemathesis.openapi.media_type(TAR_TYPE, self._files(), aliases=[])
        self._schema = schemathesis.openapi.from_dict(document)
        self.tallies: dict[str, Tally] = {}

    def all(self, cases: int, only: str = "/") -> dict[str, Tally]:
        """About `cases` of them, most for operations that take a body. `only`: head of paths."""
        found = [one.ok() for one in self._schema.get_all_operations()]
        operations = [operation for operation in found if operation.path.startswith(only)]
        weights = [8 if operation.body else 2 for operation in operations]
        for operation, weight in zip(operations, weights, strict=True):
            self._share(operation, max(2, round(cases * weight / sum(weights))))
        # Some have few different requests; the rest goes to those that have many.
        large, before = [operation for operation in operations if operation.body], 0
        while before < (made := sum(tally.cases for tally in self.tallies.values())) < cases:
            before, self._seed = made, self._seed + 1
            for operation in large:
                self._share(operation, max(2, round((cases - made) / len(large))))
        return self.tallies

    def _share(self, operation: Any, count: int) -> None:
        """`count` more cases of one operation, half of them wrong, if any can be."""
        name = f"{operation.method.upper()} {operation.path}"
        tally = self.tallies.setdefault(name, Tally())
        wanted = tally.cases + count
        self._some(operation, GenerationMode.POSITIVE, count // 2, tally)
        if not operation.path.endswith("/import"):
            # What breaks a file is known to us alone: `_files`.
            self._some(operation, GenerationMode.NEGATIVE, wanted - tally.cases, tally)
        if tally.cases < wanted:
            self._some(operation, GenerationMode.POSITIVE, wanted - tally.cases, tally)

    def _some(self, operation: Any, mode: GenerationMode, count: int, tally: Tally) -> None:
        wanted = tally.cases + count
        if not count:
            return

        @hypothesis.seed(self._seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Case) -> None:
            if tally.cases < wanted:
                self._one(case, mode, tally)

        try:
            one()
        except (hypothesis.errors.Unsatisfiable, schemathesis.errors.SchemathesisError):
            return

    def _one(self, case: Case, mode: GenerationMode, tally: Tally) -> None:
        if mode is GenerationMode.POSITIVE:
            self._name(case)
            case.body = _whole(case.body)
        began = time.monotonic()
        response = case.call(base_url=self._url, session=self._http, timeout=MOST_S)
        tally.slowest_ms = max(tally.slowest_ms, (time.monotonic() - began) * 1000)
        status = response.status_code
        tally.statuses[status] += 1
        answer = response.content.decode(errors="replace")
        if (status >= 500 and status != 503) or any(word in response.content for word in FAULTS):
            self._note(tally, f"{status}: a fault of the server", case, answer)
        # Any refusal will do: a body of 10,001 tools may be over the limit of bytes as well (413).
        broken = mode is GenerationMode.NEGATIVE and status < 400
        more = [checks.negative_data_rejection] if broken else []
        try:
            case.validate_response(response, checks=[*CHECKS, *more])
        except FailureGroup as group:
            for failure in group.exceptions:
                self._note(tally, f"{status}: {failure}", case, answer)

    def _note(self, tally: Tally, what: str, case: Case, answer: str) -> None:
        kind = what.splitlines()[0]
        shown = f"{what}\n{case.as_curl_command()[:3000]}\n{answer[:1000]}"
        tally.failures.setdefault(kind, shown)

    def _name(self, case: Case) -> None:
        """Often the id of something that is there, and is the caller's."""
        real = {"session_id": self._session, "response_id": self._reply, "name": self._model}
        for key, make in real.items():
            if key in (case.path_parameters or {}) and self._rng.random() < 0.8:
                case.path_parameters[key] = make()
                for salt in ("cache_salt", "prompt_cache_key"):
                    case.query.pop(salt, None)

    def _session(self) -> str:
        body = {"messages": [{"role": "user", "content": f"a {self._rng.random()}"}]}
        body |= {"max_tokens": 3, "enable_thinking": False}
        reply = self._http.post(f"{self._url}/v1/chat/completions", json=body, timeout=MOST_S)
        return str(reply.json()["capserve"]["session_id"])

    def _reply(self) -> str:
        body = {"input": f"b {self._rng.random()}", "max_output_tokens": 3}
        reply = self._http.post(f"{self._url}/v1/responses", json=body, timeout=MOST_S)
        return str(reply.json()["id"])

    def _model(self) -> str:
        models = self._http.get(f"{self._url}/v1/models", timeout=MOST_S).json()
        return str(models["data"][0]["id"])

    def _files(self) -> st.SearchStrategy[bytes]:
        """Real files, changed ones, and bytes that are none."""
        path = f"{self._url}/v1/sessions/{self._session()}/export?include=all"
        file = self._http.get(path, timeout=MOST_S).content
        changed = st.integers(0, 2**32).map(
            lambda number: change_session_file(file, random.Random(number))
        )
        return st.one_of(st.just(file), changed, st.binary(max_size=3000))


def _whole(value: Any) -> Any:
    """`value` with integers written as such: to JSON Schema `5.0` is one, and the document says in
    words that to this server it is not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def failures(tallies: dict[str, Tally]) -> Iterator[str]:
    for operation, tally in tallies.items():
        for shown in tally.failures.values():
            yield f"{operation}\n{shown}"
