"""How does a person talk to a model in a terminal?

Against a running server (`--url`), or one that this command starts for itself. Replies stream,
reasoning is dimmed, and after each turn a line says what was reused. Piped input works the same: a
line is a turn.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

from rich.console import Console

from capserve.cli.client import ChatClient, ChatError
from capserve.config import Settings

COMMANDS = "/undo takes the last turn back, /reset starts anew, /quit leaves"


def run_chat(
    settings: Settings, *, url: str | None, key: str | None, system: str | None, thinking: bool
) -> int:
    """The chat loop; returns the exit code: 0, or 1 when a turn failed or no server answered."""
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            from capserve.cli.compose import serving

            url = stack.enter_context(serving(settings, console)).url
        client = ChatClient(url, key=key, system=system, thinking=thinking)
        stack.callback(client.close)
        try:
            model = client.model()
        except ChatError as error:
            console.print(f"error: {error}", style="bold red", markup=False)
            return 1
        console.print(f"{model} at {url}. {COMMANDS}.", style="dim", markup=False)
        return converse(client, model, console, questions(console))


def questions(console: Console) -> Iterator[str]:
    """Lines that the person types, or that come through a pipe, until the input ends."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text would else end the chat, here or when the request is encoded.
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        for line in sys.stdin:
            console.print(f"> {line.rstrip()}", markup=False)
            yield line
        return
    with contextlib.suppress(ImportError):  # line editing and history, where there is any
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


def converse(client: ChatClient, model: str, console: Console, lines: Iterator[str]) -> int:
    """Ask line by line; returns 1 when a turn failed, else 0."""
    failed = 0
    for line in lines:
        text = line.strip()
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/reset":
                client.reset()
                console.print("The conversation is empty.", style="dim")
            case "/undo":
                done = "Took the last turn back." if client.undo() else "There is nothing to undo."
                console.print(done, style="dim")
            case _ if text.startswith("/") and " " not in text:
                console.print(f"Unknown command {text}: {COMMANDS}.", style="dim", markup=False)
            case _:
                failed |= not _turn(client, model, console, text)
    return int(failed)


def _turn(client: ChatClient, model: str, console: Console, text: str) -> bool:
    """Print one reply as it comes. Ctrl-C stops the reply, not the chat."""
    reply = client.ask(model, text)
    was_reasoning = False
    try:
        for piece in reply:
            if was_reasoning and not piece.reasoning:
                console.print()
            was_reasoning = piece.reasoning
            style = "dim italic" if piece.reasoning else ""
            console.print(piece.text, end="", style=style, markup=False)
        console.print()
        if client.report is not None:
            console.print(client.report.line(), style="dim", markup=False)
        return True
    except KeyboardInterrupt:
        reply.close()
        console.print("\nStopped; this turn is not in the history.", style="dim")
        return True
    except ChatError as error:
        console.print(f"\nerror: {error}", style="bold red", markup=False)
        return False
