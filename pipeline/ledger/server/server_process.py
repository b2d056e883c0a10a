"""The process that serves a run's ledger: finding it, signalling it, and waiting for its end.

Two servers must never append to the same file. The server itself holds its folder's lock
(``pipeline.ledger.server.lock``), and ``ledger.json`` records its process. While either shows a server, none
may be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pipeline.ledger.address import LedgerAddress, read_address
from pipeline.ledger.server.lock import holders, is_locked
from pipeline.process.records import identify, process_runs, this_host
from protocol.errors import LedgerUnavailable
from protocol.private import is_private_folder

POLL_S = 0.005
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


class ServerHandle:
    """Finds and signals the server of one run's folder, whichever command started it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.absolute()
        self.folder = self._run_dir / "ledger"
        self.configuration = self.folder / "server.conf"
        self.address: LedgerAddress | None = None
        """The address as last read or written."""
        self.started: subprocess.Popen[bytes] | None = None
        """The process, if it is a child of this one."""

    def known(self) -> LedgerAddress | None:
        """Read the address again, since another command may have started the server."""
        address = read_address(self._run_dir)
        if address is not None and address.is_embedded:
            self.address = address
        return self.address

    def is_there(self) -> bool:
        """Whether its process lives or its lock is held, so that no other may be started."""
        if self.started is not None:
            # reap it, or it stays a zombie
            self.started.poll()
        return is_locked(self.folder) or self.recorded() is not None

    def recorded(self) -> int | None:
        """Return the recorded server's process id while that same process lives."""
        address = self.known()
        if self.started is not None and self.started.poll() is None:
            return self.started.pid
        if address is None or address.pid <= 0:
            return None
        if address.process is not None:
            return address.pid if identify(address.pid) == address.process else None
        return address.pid if process_runs(address.pid) and self._is_its_program(address.pid) else None

    def signal(self, number: signal.Signals) -> list[int]:
        """Signal the server and its forks; return their ids. Raises LedgerUnavailable if one belongs to
        another user."""
        found = {pid for pid in holders(self.folder) if self._is_its_program(pid)}
        if (recorded := self.recorded()) is not None:
            found.add(recorded)
        for pid in found:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise LedgerUnavailable(
                    f"process {pid} serves {self.folder} and belongs to another user, so it cannot be ended here, and "
                    f"nothing was started. That user must run `headrace down {self._run_dir}`; or end it as root: "
                    f"kill {pid}"
                ) from error
        return sorted(found)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Wait until no such process exists; return whether that happened within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.is_there():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """End every process that may write to the folder. Raises LedgerUnavailable if one remains."""
        pids = self.signal(number)
        if self.wait_until_gone(timeout_s):
            return
        here = ", ".join(map(str, pids))
        address = self.known()
        elsewhere = address.process.host if address and address.process and address.process.host != this_host() else ""
        if pids:
            what = f"process {here} was killed but has not ended, usually because of its disk; check that host's disk"
        elif elsewhere:
            what = f"its server was started on {elsewhere}: end it there, with `headrace down {self._run_dir}`"
        else:
            what = f"none of our visible processes holds it: find the one with `fuser {self.folder / 'server.lock'}`"
        raise LedgerUnavailable(
            f"{self.folder} is held by a ledger server that does not answer. Nothing was started: {what}"
        )

    def _is_its_program(self, pid: int) -> bool:
        """Return whether a process runs with this folder's settings, since process ids are reused."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            # no /proc here, or the process has ended
            return False
        for word in words[1:]:
            with suppress(OSError, ValueError):
                if word.endswith(b".conf") and self.configuration.samefile(os.fsdecode(word)):
                    return True
        return False


def settings_of(folder: Path, socket: Path, password: str, *, max_memory_mb: int, is_of_a_copy: bool) -> str:
    """Return the server's configuration file. For a copy, it flushes and rewrites nothing."""
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
        # Traffic is a hundred times the stored data, so rewriting the file costs more than loading a
        # longer one (3 s at worst). Tokens and log-probs hardly compress.
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
    """Return a socket in our folder or, if that path is too long, the one clients know, or a new short one."""
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
    """Return a command prefix with which the kernel kills the command when this process dies. Linux only."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_STARTER, str(os.getpid())]


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
