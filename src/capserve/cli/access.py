"""Who may reach this server, and is that what its owner meant?

Keys come from flags, the environment and a file; a server that other machines can reach needs one.
No message here shows a key.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from pathlib import Path

from capserve.config import Settings
from capserve.errors import StartupError

log = logging.getLogger("capserve.api")


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Every accepted key once. Raises `StartupError` for a key file that can't be used."""
    file = settings.api_key_file
    from_file = () if file is None else _read_keys(Path(file))
    return tuple(dict.fromkeys((*settings.api_key, *from_file)))


def with_keys(settings: Settings) -> Settings:
    """`settings` with the keys of its file among its keys, so that the file is read once."""
    return settings.model_copy(update={"api_key": api_keys(settings), "api_key_file": None})


def _read_keys(file: Path) -> tuple[str, ...]:
    try:
        with file.open(encoding="utf-8") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            lines = [line.strip() for line in opened]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise _refused(f"{file} can't be read: {why}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        # A bearer token ends at a space: such a key could never be shown.
        if len(line.split()) != 1:
            raise _refused(f"{file} line {number} has a space inside; a line is one key")
        keys.append(line)
    if not keys:
        # To go on without keys would open a server that was meant to be closed.
        raise _refused(f"{file} has {len(lines)} lines and no key")
    if mode & 0o077:
        log.warning("%s can be read by others (mode %04o); chmod 600 it", file, mode)
    return tuple(keys)


def _refused(message: str) -> StartupError:
    return StartupError(f"--api-key-file: {message}.", param="api_key_file")


def check_address(address: str, settings: Settings) -> None:
    """Refuse an open server that other machines can reach. `address`: of the bound socket.

    Raises `StartupError`. `settings` are those of `with_keys`.
    """
    if is_loopback(address) or settings.api_key:
        return
    if not settings.allow_unauthenticated:
        raise StartupError(
            f"--host: {address} can be reached from other machines, and no API key is set. Give "
            "one with --api-key or --api-key-file, listen on 127.0.0.1, or say "
            "--allow-unauthenticated.",
            param="host",
        )
    log.warning("%s can be reached from other machines, and no API key is asked for", address)


def is_loopback(address: str) -> bool:
    """Only this machine can reach a socket that is bound to this IP address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
