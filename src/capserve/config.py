"""Which settings does a server run with? The only reader of flags and environment.

Flags win over `CAPSERVE_*` environment variables, which win over the defaults here. The CLI makes
its flags from these fields, so a setting can't exist on one side only, and builds one frozen
`Settings`; everything else receives values, never names of variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_origin

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from capserve.errors import StartupError

ENV_PREFIX = "CAPSERVE_"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting is shown on the command line."""

    panel: str
    help: str
    name: str = ""
    """Without the dashes; empty takes the field's name. Flags drop the unit, help states it."""


class Settings(BaseSettings):
    """Everything that a person can decide about a server."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    # model
    model: Annotated[
        str | None,
        Flag("Model", "Directory, or a hub id such as org/name. Default: the embedded nano."),
    ] = None
    served_model_name: Annotated[
        str | None, Flag("Model", "Name in /v1/models and in replies. Default: the checkpoint's.")
    ] = None
    chat_template: Annotated[
        str | None, Flag("Model", "A jinja file that replaces the checkpoint's own template.")
    ] = None
    max_model_len: Annotated[
        int | None, Flag("Model", "Context length in tokens. Default: the checkpoint's.")
    ] = Field(None, ge=64)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Flag("Model", "Compute type. auto: float32 on CPU, bfloat16 on CUDA."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag("Model", "auto: CUDA where there is a device.")
    ] = "auto"
    threads: Annotated[
        int | None, Flag("Model", "Threads of prefill on CPU. Default: one less than the cores.")
    ] = Field(None, ge=1)
    seed: Annotated[
        int | None, Flag("Model", "Seed of requests that bring none. Default: a fresh one each.")
    ] = Field(None, ge=0, lt=2**64)

    # wire
    host: Annotated[str, Flag("Server", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Flag("Server", "0 takes any free one.")] = Field(8000, ge=0, le=65535)
    api_key: Annotated[
        tuple[str, ...],
        NoDecode,
        Flag("Server", "Accepted key; may be repeated (comma-separated in the environment)."),
    ] = Field((), repr=False)
    api_key_file: Annotated[
        str | None, Flag("Server", "File of accepted keys, one a line; # begins a comment line.")
    ] = None
    allow_unauthenticated: Annotated[
        bool, Flag("Server", "Listen beyond this machine without a key.")
    ] = False
    cors_origin: Annotated[
        tuple[str, ...],
        NoDecode,
        Flag(
            "Server",
            "Origin whose web pages may call, e.g. https://app.example, or *; may be repeated.",
        ),
    ] = ()
    max_body_bytes: Annotated[
        ByteSize, Flag("Server", "Largest request body, e.g. 16MiB.", name="max-body")
    ] = Field(ByteSize(16 << 20), ge=1024)
    heartbeat_s: Annotated[
        float, Flag("Server", "Seconds between comments in a silent stream.", name="heartbeat")
    ] = Field(5.0, gt=0, le=10)
    stream_stall_timeout_s: Annotated[
        float,
        Flag(
            "Server",
            "Seconds after which a stream that nobody reads is cancelled.",
            name="stream-stall-timeout",
        ),
    ] = Field(30.0, gt=0)
    drain_timeout_s: Annotated[
        float,
        Flag(
            "Server",
            "Seconds that turns may take to finish once a signal says stop.",
            name="drain-timeout",
        ),
    ] = Field(30.0, ge=0, le=86400)
    watchdog_s: Annotated[
        float,
        Flag(
            "Server",
            "Seconds after which one unit of work (a chunk, a step) turns /health red.",
            name="watchdog",
        ),
    ] = Field(60.0, gt=0)
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag("Server", "Least level that is printed.")
    ] = "info"

    # scheduling
    max_num_queued_reqs: Annotated[
        int, Flag("Scheduling", "Requests that may wait; more get a 429.")
    ] = Field(64, ge=0)
    max_prompt_tokens: Annotated[
        int | None, Flag("Scheduling", "Longer prompts get a 413. Default: the context length.")
    ] = Field(None, ge=1)
    max_output_tokens: Annotated[
        int | None, Flag("Scheduling", "Upper bound of a reply. Default: the context length.")
    ] = Field(None, ge=1)
    max_decode_ms: Annotated[
        float | None,
        Flag("Scheduling", "Milliseconds after which a reply ends with `length`. Default: none."),
    ] = Field(None, gt=0)
    prefill_chunk: Annotated[
        int, Flag("Scheduling", "Tokens of one prefill pass, a multiple of 64.")
    ] = Field(512, ge=64, multiple_of=64)
    drafts: Annotated[
        int,
        Flag("Scheduling", "MTP drafts per step, 0 to 8, capped by what the checkpoint can."),
    ] = Field(3, ge=0, le=8)

    schedule: Annotated[
        Literal["fair", "fifo"],
        Flag("Scheduling", "fair: a long turn is parked for a short one that waits."),
    ] = "fair"
    fair_share: Annotated[
        float,
        Flag("Scheduling", "Most of a long turn's time that it may be parked, 0 to 0.9."),
    ] = Field(0.5, ge=0, le=0.9)
    min_slice_ms: Annotated[
        float,
        Flag("Scheduling", "Milliseconds a turn runs between two parkings.", name="min-slice"),
    ] = Field(200.0, ge=0)
    short_turn_ms: Annotated[
        float,
        Flag(
            "Scheduling",
            "A waiting turn with a lower estimate, in milliseconds, counts as short.",
            name="short-turn",
        ),
    ] = Field(3000.0, ge=0)
    max_parked_turns: Annotated[
        int, Flag("Scheduling", "Turns that may be parked at the same time.")
    ] = Field(2, ge=0, le=64)

    # reuse
    exact: Annotated[
        bool,
        Flag("Reuse", "Restore at grid points only: reuse on and off give the same bits."),
    ] = False
    checkpoint_interval: Annotated[
        int, Flag("Reuse", "Tokens of a long prefill between two automatic boundaries.")
    ] = Field(2048, ge=64)
    capsule_budget_bytes: Annotated[
        ByteSize,
        Flag("Reuse", "Host memory for capsules, e.g. 2GiB or 512MB.", name="capsule-budget"),
    ] = Field(ByteSize(2 << 30), ge=0)
    gpu_budget_bytes: Annotated[
        ByteSize, Flag("Reuse", "Card memory for capsules; CUDA only.", name="gpu-budget")
    ] = Field(ByteSize(4 << 30), ge=0)
    disk_budget_bytes: Annotated[
        ByteSize,
        Flag("Reuse", "Disk space for capsules; 0 turns the tier off.", name="disk-budget"),
    ] = Field(ByteSize(16 << 30), ge=0)
    capsule_dir: Annotated[
        str | None,
        Flag("Reuse", "Where capsules outlive the server. Default: the user's cache directory."),
    ] = None
    max_import_bytes: Annotated[
        ByteSize | None,
        Flag(
            "Reuse",
            "Largest session file. Default: the host memory for capsules.",
            name="max-import",
        ),
    ] = Field(None, ge=1)
    session_idle_ttl_s: Annotated[
        float, Flag("Reuse", "Seconds an idle session is kept.", name="session-idle-ttl")
    ] = Field(4 * 3600.0, gt=0)
    max_active_sessions: Annotated[
        int, Flag("Reuse", "Sessions kept; the least recently used go first.")
    ] = Field(256, ge=1)

    @field_validator("api_key", "cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(word for part in value.split(",") if (word := part.strip()))
        return value

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # An empty key would be matched by a client that sends none.
        if not all(value):
            raise ValueError("a key may not be empty")
        return value

    @field_validator("cors_origin")
    @classmethod
    def _no_origin_that_no_browser_sends(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # Compared letter by letter with what a browser sends: no path, no slash at its end, no
        # capitals. One that can never match would look like a setting that does nothing.
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: scheme://host or scheme://host:port in lower case, "
                    "without a path, or *"
                )
        return value


def is_list(name: str) -> bool:
    """Its flag may be repeated."""
    return get_origin(Settings.model_fields[name].annotation) is tuple


def flag_of(name: str) -> Flag:
    """The command-line face of the setting `name`."""
    field: FieldInfo = Settings.model_fields[name]
    return next(entry for entry in field.metadata if isinstance(entry, Flag))


def flag_name(name: str) -> str:
    """`capsule_budget_bytes` -> `--capsule-budget`."""
    return "--" + (flag_of(name).name or name.replace("_", "-"))


def env_name(name: str) -> str:
    """`port` -> `CAPSERVE_PORT`. Variables keep the unit that the field's name has."""
    return ENV_PREFIX + name.upper()


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from `flags` (field name -> value as typed, None where not given), environment and
    defaults. Raises `StartupError` with one line that names the flag or the variable."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise StartupError("; ".join(_complaints(error, given))) from None


def _complaints(error: ValidationError, given: Mapping[str, Any]) -> list[str]:
    out = []
    for entry in error.errors():
        name = str(entry["loc"][0]) if entry["loc"] else ""
        if name not in Settings.model_fields:
            out.append(f"{name}: {entry['msg']}")
            continue
        source = flag_name(name) if name in given else env_name(name)
        what = entry["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
        shown = "" if name == "api_key" else f", not {entry['input']!r}"
        out.append(f"{source}: {what}{shown}")
    return out
