"""How late is the server, as one client sees it that does nothing else?

A process of its own, so that no interpreter lock but the server's is in what it measures. Runs
until its standard input closes, then prints one JSON list of milliseconds. Says `ready` once it
measures.

    python benchmarks/probe.py health HOST PORT    round trips of /health, one every 5 ms
    python benchmarks/probe.py deltas HOST PORT    time between two events of an endless stream;
                                                   its request body is the first line of the input

A late answer also delays the polls after it: those are counted with the wait that they would have
had.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
from time import perf_counter

PERIOD_S = 0.005


def stopped(wait_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], max(0.0, wait_s))[0])


def health(connection: http.client.HTTPConnection) -> list[float]:
    taken: list[float] = []
    ask(connection)  # the connection itself is not what is measured
    print("ready", flush=True)
    due = perf_counter()
    while not stopped(due - perf_counter()):
        sent = perf_counter()
        ask(connection)
        late = perf_counter() - sent
        due = max(due + PERIOD_S, sent + PERIOD_S)
        while late > 0:
            taken.append(late * 1e3)
            late -= PERIOD_S
    return taken


def ask(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status


def deltas(connection: http.client.HTTPConnection) -> list[float]:
    body = sys.stdin.readline().encode()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    gaps: list[float] = []
    last: float | None = None
    while not stopped(0):
        line = response.readline()
        assert line, "the stream ended before the measurement"
        if not line.startswith(b"data: {"):
            continue
        now = perf_counter()
        if last is None:
            print("ready", flush=True)
        else:
            gaps.append((now - last) * 1e3)
        last = now
    return gaps


if __name__ == "__main__":
    kind, host, port = sys.argv[1:]
    client = http.client.HTTPConnection(host, int(port), timeout=60)
    print(json.dumps(health(client) if kind == "health" else deltas(client)))
