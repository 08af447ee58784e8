"""What does a person see of a server that runs?

The memory plan and a progress bar before, the address and a line to paste when it is ready, one
readable line per request after that.
"""

from __future__ import annotations

import json
import logging

from rich.console import Console
from rich.logging import RichHandler

from capserve import __version__
from capserve.api.server import bind, serve
from capserve.cli.compose import assemble_visibly, memory_plan, plan_line
from capserve.cli.models import resolve_model
from capserve.config import Settings

STOP_TIMEOUT_S = 30.0
"""A prefill chunk or a decode step ends long before; then the process may go."""


def run_server(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartupError's children before it listens."""
    console = Console(highlight=False, soft_wrap=True)
    set_up_logging(settings.log_level, console)
    # Before the model: a taken port should not cost the minutes of a load.
    with bind(settings.host, settings.port) as listener:
        path, _ = resolve_model(settings.model)
        console.print(f"capserve {__version__}", style="bold")
        console.print(plan_line(memory_plan(settings, path)), markup=False)
        assembly = assemble_visibly(settings, console)
        assembly.worker.start()
        try:
            serve(
                assembly.app,
                listener=listener,
                on_started=lambda url: _welcome(console, settings, assembly.name, url),
            )
        finally:
            assembly.stop(STOP_TIMEOUT_S)


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
