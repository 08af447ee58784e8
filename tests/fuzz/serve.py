"""A server on the fake engine, in a process of its own: `python -m tests.fuzz.serve`.

Prints its URL, and ends with its standard input. Replies are short: a run is about requests.
"""

from __future__ import annotations

import sys

from tests.fuzz.targets import stage


def main() -> None:
    with stage() as running:
        print(running.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
