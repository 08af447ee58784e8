"""Which command did the person ask for?

The `capserve` entry point. Commands live in their own modules and are imported when called, so that
`--help` answers without loading torch. A `StartupError` is one clear line and exit code 2, like an
unknown flag; anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from capserve import __version__
from capserve.cli.flags import takes_settings
from capserve.config import Settings
from capserve.errors import CapserveError

ENVIRONMENT_NOTE = (
    "Each of these flags is also read from the environment variable named beside it; flags win."
)

app = typer.Typer(
    name="capserve",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An OpenAI-compatible server for agents around one hot stateful hybrid model.",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"capserve {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An OpenAI-compatible server for agents around one hot stateful hybrid model."""


@app.command(epilog=ENVIRONMENT_NOTE)
@takes_settings()
def serve(settings: Settings) -> None:
    """Serve a model over HTTP. Without --model, the embedded nano model."""
    from capserve.cli.serve import run_server

    run_server(settings)


@app.command(epilog=ENVIRONMENT_NOTE)
@takes_settings(panels=("Model", "Reuse"))
def chat(
    settings: Settings,
    url: Annotated[
        str | None, typer.Option(help="A running server, e.g. http://127.0.0.1:8000/v1.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--api-key", "--key", help="API key of that server.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = True,
) -> None:
    """Talk to a model in the terminal. Without --url, starts its own server for the chat."""
    from capserve.cli.chat import run_chat

    raise typer.Exit(run_chat(settings, url=url, key=key, system=system, thinking=thinking))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes_settings(panels=("Model", "Server"))
def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check versions, device, memory, model fit and port. Exit code 1 when something is wrong."""
    from capserve.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(settings, as_json=as_json))


@app.command(epilog=ENVIRONMENT_NOTE)
@takes_settings(panels=("Model", "Reuse"))
def demo(settings: Settings) -> None:
    """Run an agent conversation on a real server and check every reuse token by token."""
    from capserve.cli.demo import run_demo

    raise typer.Exit(run_demo(settings))


capsules = typer.Typer(
    no_args_is_help=True,
    help="List, check and remove the capsules on disk. No server may be using them.",
)
app.add_typer(capsules, name="capsules")

CapsuleDirectory = Annotated[
    Path | None,
    typer.Option("--dir", help="As the server's --capsule-dir. Default: the user's cache."),
]


@capsules.command("ls")
def capsules_ls(
    directory: CapsuleDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the capsules, the one used last at the end."""
    from capserve.cli.capsules import list_capsules

    list_capsules(directory, as_json=as_json)


@capsules.command("rm")
def capsules_rm(
    prefix: Annotated[
        str | None, typer.Argument(metavar="KEYPREFIX", help="First digits of a key in `ls`.")
    ] = None,
    directory: CapsuleDirectory = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every capsule and session, pinned or not.")
    ] = False,
    session: Annotated[
        str | None, typer.Option(help="A session, and the capsules that only it has.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(help="Capsules unused for so long, e.g. 30m, 12h, 7d. Pinned ones stay."),
    ] = None,
) -> None:
    """Remove capsules: by key, of a session, unused ones, or all."""
    from capserve.cli.capsules import remove

    remove(directory, prefix=prefix, everything=everything, session=session, older_than=older_than)


@capsules.command("verify")
def capsules_verify(directory: CapsuleDirectory = None) -> None:
    """Read every part file against its checksum. Exit code 1 when one is bad."""
    from capserve.cli.capsules import verify

    raise typer.Exit(verify(directory))


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exits 0, 1 (a check failed) or 2 (bad usage, or the server can't start)."""
    try:
        app(args=argv)
    except CapserveError as error:
        # Plain print: a path in the message must not be read as markup or cut by the width.
        Console(stderr=True).print("[bold red]error[/]", end=" ")
        print(error.message, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def command() -> Any:
    """The click command behind the typer app, for tests and completion."""
    return typer.main.get_command(app)
