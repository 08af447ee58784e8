"""A small share of the requests that schemathesis makes from the served document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fuzz.api import Run, failures
from tests.fuzz.targets import Stage, stage

CASES = 200
"""`make fuzz` makes 5,000."""


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.mark.slow
def test_no_request_makes_the_server_fail_or_contradict_its_document(running: Stage):
    tallies = Run(running.url, seed=7).all(CASES)
    assert not list(failures(tallies))
    assert sum(tally.cases for tally in tallies.values()) > CASES * 0.8
    statuses = {status for tally in tallies.values() for status in tally.statuses}
    assert {200, 201, 400, 404} <= statuses


def _document(running: Stage) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{running.url}/openapi.json").json()
    return found


def test_a_document_that_leaves_out_a_field_of_an_answer_is_found_out(running: Stage):
    document = _document(running)
    document["components"]["schemas"]["Spelling"] |= {"properties": {}, "required": []}
    found = "".join(failures(Run(running.url, 1, document).all(20, "/detokenize")))
    assert "Response violates schema" in found


def test_a_document_that_leaves_out_a_status_is_found_out(running: Stage):
    document = _document(running)
    del document["paths"]["/detokenize"]["post"]["responses"]["400"]
    found = "".join(failures(Run(running.url, 1, document).all(20, "/detokenize")))
    assert "Undocumented status code" in found


def test_a_document_that_asks_for_more_than_the_parser_is_found_out(running: Stage):
    document = _document(running)
    fields = document["components"]["schemas"]["DetokenizeRequest"]["properties"]
    fields["model"] = {"type": "string"}
    found = "".join(failures(Run(running.url, 1, document).all(60, "/detokenize")))
    assert "Schema-violating request accepted" in found
