"""The start of an embedded ledger server: its settings, its socket, and dying with its starter."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from pipeline.ledger.address import LedgerAddress
from protocol.private import is_private_folder

LOG_NAME = "server.log"
OWN_FOLDER = "headrace-"
"""Prefix of a private temporary folder for a socket."""
MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_DIE_WITH_STARTER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the exec below keeps it
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def settings_of(folder: Path, socket: Path, password: str, *, max_memory_mb: int, is_of_a_copy: bool) -> str:
    """Return the server's configuration file. That of a copy flushes and rewrites nothing."""
    settings = {
        "port": 0,
        "unixsocket": _quoted(socket),
        "unixsocketperm": 700,
        "requirepass": password,
        "dir": _quoted(folder),
        "logfile": _quoted(folder / LOG_NAME),
        "databases": 1,
        "daemonize": "no",
        # so that the command line shows whose server it is
        "set-proc-title": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        # traffic is a hundred times the stored data. Rewriting costs more than reading a longer
        # file, 3 s at worst. Tokens and log-probs hardly compress.
        "auto-aof-rewrite-min-size": "256mb",
        "rdbcompression": "no",
        "save": '""',
        "maxmemory": f"{max_memory_mb}mb",
        "maxmemory-policy": "noeviction",
    }
    if is_of_a_copy:
        settings |= {"appendfsync": "no", "auto-aof-rewrite-percentage": 0}
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def socket_path(folder: Path, known: LedgerAddress | None) -> Path:
    """Return the clients' known socket, else one in our folder, else one with a shorter path."""
    path = folder / "server.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    if known is not None and known.socket:
        own = Path(known.socket).parent
        with suppress(OSError):
            own.mkdir(mode=0o700)
        if is_private_folder(own):
            return Path(known.socket)
    return Path(tempfile.mkdtemp(prefix=OWN_FOLDER)) / "server.sock"


def dying_with_us() -> list[str]:
    """Return a command prefix: the kernel then kills the command with this process. Linux only."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_STARTER, str(os.getpid())]


def _quoted(path: Path) -> str:
    """Quote a path for the server's configuration file."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
