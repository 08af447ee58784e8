"""A model that writes whitespace without end, inside of a call, costs no more for each token."""

from __future__ import annotations

import time

import pytest

from capserve.text.markup import CALL_OPEN, FUNCTION_OPEN, PARAMETER_CLOSE, PARAMETER_OPEN
from capserve.text.tool_calls import CallReader, RawCall, Verdict

MOST_CPU_S = 2.0
"""For a hundred thousand characters, which take a tenth of that; when each token looked through all
of them again, they took 4 to 11 s."""

HEADS = {
    "before the function": CALL_OPEN,
    "before a parameter": f"{CALL_OPEN}\n{FUNCTION_OPEN}f>",
    "behind a parameter": f"{CALL_OPEN}\n{FUNCTION_OPEN}f>\n{PARAMETER_OPEN}a>\nx{PARAMETER_CLOSE}",
}


@pytest.mark.parametrize("where", HEADS)
def test_endless_whitespace_is_read_once(where: str):
    reader, buffer = CallReader(wrapped=True), HEADS[where]
    began = time.thread_time()
    for _ in range(25_000):
        buffer += " \n  "
        assert reader.read(buffer, final=False) is Verdict.WAIT
    assert time.thread_time() - began < MOST_CPU_S


def test_a_copy_that_reads_on_tells_the_reader_nothing():
    reader = CallReader(wrapped=True)
    head = f"{CALL_OPEN}\n{FUNCTION_OPEN}f>"
    assert reader.read(head, final=False) is Verdict.WAIT
    assert reader.copy().read(head + " " * 30, final=False) is Verdict.WAIT
    read = reader.read(head + "</function>\n</tool_call>", final=True)
    assert isinstance(read, RawCall)
    assert read.name == "f"
