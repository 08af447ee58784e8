"""How long does `/health` take, seen by a client that does nothing else?

A process of its own: the interpreter that polls must not share its lock with the one that loads the
server. Polls at a steady rate on one connection until its standard input closes, then prints one
JSON list of milliseconds. A late answer also delays the polls after it; those are counted with the
wait that they would have seen.

    python health_poller.py HOST PORT HZ
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time


def poll(host: str, port: int, hz: float) -> list[float]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    period = 1.0 / hz
    taken: list[float] = []
    ask(connection)  # the connection itself is not what is measured
    print("polling", flush=True)
    due = time.perf_counter()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))
        if ready:
            return taken
        sent = time.perf_counter()
        ask(connection)
        late = time.perf_counter() - sent
        due = max(due + period, sent + period)
        while late > 0:
            taken.append(late * 1e3)
            late -= period


def ask(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status


if __name__ == "__main__":
    print(json.dumps(poll(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
