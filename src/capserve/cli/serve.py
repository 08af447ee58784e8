"""What does a person see of a server that runs?

The memory plan and a progress bar before, the address and a line to paste when it is ready, one
readable line per request after that.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler

from capserve import __version__
from capserve.api.server import bind, serve
from capserve.cli.access import check_address, with_keys
from capserve.cli.compose import Assembly, assemble_visibly, memory_plan, plan_line
from capserve.cli.models import resolve_model
from capserve.config import Settings

STOP_TIMEOUT_S = 30.0
"""A prefill chunk or a decode step ends long before; then the process may go."""

AT_ONCE_S = 1.0
"""What a second signal leaves to the last writes. What is late then is read again: the store bears
being cut off at any moment."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python may keep the interpreter from one that wants it. Python's own
5 ms would be added to each wake-up of the event loop, and to each return of a kernel, while a long
request is rendered (`benchmarks/jitter.py`)."""

log = logging.getLogger("capserve.api")


def run_server(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, drain, write what is to outlive the process, and return.

    After a second signal the process ends here, with 128 and the signal's number. Raises
    StartupError's children before it listens.
    """
    console = Console(highlight=False, soft_wrap=True)
    set_up_logging(settings.log_level, console)
    settings = with_keys(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Before the model: a taken port should not cost the minutes of a load.
    with bind(settings.host, settings.port) as listener:
        check_address(listener.getsockname()[0], settings)
        path, _ = resolve_model(settings.model)
        console.print(f"capserve {__version__}", style="bold")
        console.print(plan_line(memory_plan(settings, path)), markup=False)
        assembly = assemble_visibly(settings, console)
        assembly.worker.start()
        hurry: int | None = None
        try:
            hurry = serve(
                assembly.app,
                listener=listener,
                on_started=lambda url: _welcome(console, settings, assembly.name, url),
                worker=assembly.worker,
                drain_s=settings.drain_timeout_s,
            )
        finally:
            _take_down(assembly, hurry)


def _take_down(assembly: Assembly, hurry: int | None) -> None:
    """`hurry`: the second signal, for one who will not wait."""
    if hurry is not None:
        assembly.stop(AT_ONCE_S, AT_ONCE_S)
        logging.shutdown()
        # Not sys.exit: that waits for a request that the text thread still reads.
        os._exit(128 + hurry)
    if not assembly.stop(STOP_TIMEOUT_S):
        log.warning("the engine is still busy after %g s and is left behind", STOP_TIMEOUT_S)


def set_up_logging(level: str, console: Console) -> None:
    """All loggers of this package to `console`; other libraries only from warnings on."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:  # a file or a journal: whole lines, whatever the width
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("capserve").setLevel(level.upper())


def _welcome(console: Console, settings: Settings, name: str, url: str) -> None:
    console.print(f"{name} is served at {url}/v1. Try it:", style="bold", markup=False)
    # Plain print: a line to paste must not be wrapped.
    print(curl_line(name, f"{url}/v1", keyed=bool(settings.api_key)), flush=True)


def curl_line(name: str, url: str, *, keyed: bool) -> str:
    """A command that any shell takes as it is."""
    body = {"model": name, "messages": [{"role": "user", "content": "What is 7 times 8?"}]}
    key = '-H "Authorization: Bearer $CAPSERVE_KEY" ' if keyed else ""
    return (
        f"  curl {url}/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
