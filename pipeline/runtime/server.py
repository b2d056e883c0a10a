"""The embedded ledger server: a Redis or Valkey of this run's own, on a unix socket.

*Consumes* the run's folder and a memory limit. *Produces* a URL, and ``ledger.json`` for every later command. *Waits for* the
server's first answer, which after a crash comes when it has read its append-only file.

The server is a process in a session of its own: a terminal's Ctrl-C does not reach it, and it outlives a supervisor that
dies, whose successor adopts it. It listens on no port, wants a password, appends every write to a file that is flushed every
second, and refuses writes at its memory limit rather than evict what the run counts on.

    <run_dir>/ledger.json            address, mode 0600
    <run_dir>/ledger/server.conf     settings with the password, mode 0600
    <run_dir>/ledger/server.log
    <run_dir>/ledger/appendonlydir/  or appendonly.aof before Redis 7
    <run_dir>/ledger/server.sock     or in a private folder under the system's, when this path is too long for a socket
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.runtime.ledger_file import LedgerAddress, known_url, read_address, read_ledger_url, write_address
from pipeline.runtime.private_files import is_private_folder, write_private
from pipeline.runtime.server_binary import ServerBinary, find_server
from protocol.endpoints import ensure_private_folder
from protocol.errors import LedgerUnavailable

__all__ = ["EmbeddedServer", "external_url", "open_ledger", "read_ledger_url"]

MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
_POLL_S = 0.005
_LOG_TAIL_BYTES = 2000
_ONCE = Retry(NoBackoff(), 0)


def external_url(configured: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the URL of a server that runs already: the configured one, else ``REDIS_URL``; None for an embedded one."""
    return configured or environment.get("REDIS_URL") or None


def open_ledger(
    run_dir: Path, *, configured_url: str | None, max_memory_mb: int, environment: Mapping[str, str] = os.environ
) -> EmbeddedServer | None:
    """Make sure that this run has a ledger and write its address; return its server when it is embedded.

    Raises:
        ConfigError: no server program is there.
        LedgerUnavailable: the embedded server does not start.
    """
    url = external_url(known_url(run_dir, configured_url) if configured_url else None, environment)
    url = url or known_url(run_dir, None)
    if url is not None:
        write_address(run_dir, LedgerAddress(url=url))
        return None
    server = EmbeddedServer(run_dir, max_memory_mb=max_memory_mb)
    server.start()
    return server


class EmbeddedServer:
    """A run's own ledger server. One supervisor holds it at a time."""

    def __init__(self, run_dir: Path, *, max_memory_mb: int) -> None:
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / "ledger"
        self._max_memory_mb = max_memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._address: LedgerAddress | None = None

    @property
    def url(self) -> str:
        """``unix://`` URL with the password. Raises LedgerUnavailable before ``start``."""
        return self._started().url

    @property
    def is_adopted(self) -> bool:
        """Whether the server was started by somebody else."""
        return self._process is None

    @property
    def socket(self) -> Path:
        """The unix socket. Raises LedgerUnavailable before ``start``."""
        return Path(self._started().socket)

    @property
    def log_file(self) -> Path:
        """The server's own log."""
        return self._folder / "server.log"

    def start(self, *, timeout_s: float = 60.0) -> bool:
        """Adopt the server that an earlier supervisor left running, or start one; return whether it was adopted.

        A server that was killed is started on the same files, socket and password, so that its clients reconnect.

        Raises:
            ConfigError: no server program is there.
            LedgerUnavailable: it ended, or gave no answer within ``timeout_s``.
        """
        known = read_address(self._run_dir)
        if known is not None and known.is_embedded:
            self._address = known
            if self.is_alive():
                return True
            self._end_unanswering(known.pid, timeout_s)
            if self.is_alive():
                return True
        ensure_private_folder(self._folder)
        binary = find_server()
        socket = self._socket_path(known)
        password = (urlsplit(known.url).password if known else None) or secrets.token_hex(24)
        configuration = self._configuration
        write_private(configuration, self._settings(socket, password).encode())
        socket.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [binary.path, configuration],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        self._address = _address(binary, socket, password, self._process.pid)
        write_address(self._run_dir, self._address)
        self._wait_until_answering(self._process, timeout_s)
        return False

    def is_alive(self) -> bool:
        """Whether the server answers and serves: it does not while it reads its file."""
        return self.pid() is not None

    def pid(self) -> int | None:
        """Return the process id that the server itself gives; None when it does not answer or is still loading."""
        if self._address is None:
            return None
        client = redis.Redis.from_url(self._address.url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=_ONCE)  # pyright: ignore[reportUnknownMemberType]
        try:
            client.ping()  # pyright: ignore[reportUnknownMemberType]
            info: dict[str, Any] = client.info("server")  # pyright: ignore[reportUnknownMemberType, reportAssignmentType]
        except redis.RedisError:
            return None
        finally:
            client.close()
        if self._process is not None:
            self._process.poll()
        return int(info["process_id"])

    def stop(self, *, timeout_s: float = 10.0) -> bool:
        """Ask the server to flush its file and end; kill it at the deadline. Returns whether it ended by itself."""
        pid = self.pid() if self._process is None else self._process.pid
        if pid is None:
            return True
        deadline = time.monotonic() + timeout_s
        ended = _signal(pid, signal.SIGTERM) or self._wait_until_gone(pid, deadline)
        if not ended:
            _signal(pid, signal.SIGKILL)
            self._wait_until_gone(pid, time.monotonic() + timeout_s)
        self._process = None
        self.socket.unlink(missing_ok=True)
        return ended

    def _end_unanswering(self, pid: int, timeout_s: float) -> None:
        """Let a server of ours that does not answer finish loading; kill it at the deadline. Two must never share a file."""
        deadline = time.monotonic() + timeout_s
        while self._is_ours(pid) and not self.is_alive():
            if time.monotonic() >= deadline:
                _signal(pid, signal.SIGKILL)
                self._wait_until_gone(pid, time.monotonic() + timeout_s)
            time.sleep(_POLL_S)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process is this run's server: the number may belong to another by now."""
        if self._process is not None and self._process.pid == pid:
            return self._process.poll() is None
        if pid <= 0 or not process_runs(pid):
            return False
        try:
            return os.fsencode(self._configuration) in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False  # no /proc here: a server that does not answer cannot be told from a stranger

    @property
    def _configuration(self) -> Path:
        return self._folder / "server.conf"

    def _started(self) -> LedgerAddress:
        if self._address is None:
            raise LedgerUnavailable(f"the ledger server of {self._run_dir} was not started; call start() first")
        return self._address

    def _settings(self, socket: Path, password: str) -> str:
        settings = {
            "port": 0,
            "unixsocket": _quoted(socket),
            "unixsocketperm": 700,
            "requirepass": password,
            "dir": _quoted(self._folder),
            "logfile": _quoted(self.log_file),
            "databases": 1,
            "daemonize": "no",
            "set-proc-title": "no",  # so that the command line says whose server it is
            "appendonly": "yes",
            "appendfsync": "everysec",
            # what passes through is a hundred times what is there: rewriting the file costs more than reading a longer one, 3 s
            # at worst, and tokens and log-probs hardly compress
            "auto-aof-rewrite-min-size": "256mb",
            "rdbcompression": "no",
            "save": '""',
            "maxmemory": f"{self._max_memory_mb}mb",
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def _socket_path(self, known: LedgerAddress | None) -> Path:
        """Return the socket that clients know already, else one in our folder, else one with a short enough path."""
        path = self._folder / "server.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        if known is not None and known.socket and is_private_folder(Path(known.socket).parent):
            return Path(known.socket)
        return Path(tempfile.mkdtemp(prefix="headrace-")) / "server.sock"

    def _wait_until_answering(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_alive():
            if process.poll() is not None:
                raise LedgerUnavailable(
                    f"the ledger server ended with {process.returncode} at its start. {self._tail()}"
                )
            if time.monotonic() >= deadline:
                process.kill()
                process.wait()
                raise LedgerUnavailable(f"the ledger server gave no answer within {timeout_s:g} s. {self._tail()}")
            time.sleep(_POLL_S)

    def _wait_until_gone(self, pid: int, deadline: float) -> bool:
        while self._runs(pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _runs(self, pid: int) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return process_runs(pid)

    def _tail(self) -> str:
        tail = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{self.log_file} ends with:\n{tail}" if tail else f"{self.log_file} is empty"


def process_runs(pid: int) -> bool:
    """Whether a process of this id exists and has not ended (a zombie has)."""
    if _signal(pid, 0):
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # no /proc here: that the signal found it must do
    return status.rpartition(")")[2].split()[0] != "Z"


def _signal(pid: int, number: int) -> bool:
    """Send a signal; return whether the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _address(binary: ServerBinary, socket: Path, password: str, pid: int) -> LedgerAddress:
    return LedgerAddress(
        url=f"unix://:{password}@{quote(str(socket))}",
        is_embedded=True,
        socket=str(socket),
        pid=pid,
        server=str(binary.path),
        server_version=".".join(map(str, binary.version)),
    )


def _quoted(path: Path) -> str:
    """Quote a path for the server's configuration file."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
