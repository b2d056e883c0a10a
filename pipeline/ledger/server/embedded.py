"""The embedded ledger server: this run's own Redis or Valkey, on a Unix socket.

The server runs in its own session, so that Ctrl-C in a terminal does not reach it. It outlives its
supervisor, and the next supervisor adopts it. It listens on no port and requires a password. It appends
every write to a file that is flushed every second. At its memory limit it refuses writes; it never evicts.

Two servers must never append to the same file. The server itself holds its folder's lock
(``pipeline.ledger.server.lock``). While the lock is held, or the recorded process lives, nothing is
started, written or removed there. A slow answer does not mean that the server is dead.

    <run_dir>/ledger.json            address, mode 0600
    <run_dir>/ledger/server.lock     held by the server as long as it lives
    <run_dir>/ledger/server.conf     settings with the password, mode 0600
    <run_dir>/ledger/server.log
    <run_dir>/ledger/appendonlydir/  or appendonly.aof before Redis 7
    <run_dir>/ledger/server.sock     or in a private temporary folder if this path is too long for a socket
"""

from __future__ import annotations

import os
import secrets
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import msgspec
import structlog

from pipeline.files import write_private
from pipeline.files.urls import without_store_credentials
from pipeline.ledger.address import LedgerAddress, known_url, read_ledger_url, write_address
from pipeline.ledger.server.binary import ServerBinary, find_server
from pipeline.ledger.server.holes import take_out_holes
from pipeline.ledger.server.lock import take_lock
from pipeline.ledger.server.probe import ProbeResult, ServerAction, ServerState, ServerWatch, end_script, listens, probe
from pipeline.ledger.server.server_process import (
    LOG_NAME,
    OWN_FOLDER,
    POLL_S,
    ServerHandle,
    dying_with_us,
    settings_of,
    socket_path,
)
from pipeline.process.environment import without_sink_credentials
from pipeline.process.exit_codes import Interrupted
from pipeline.process.records import identify
from protocol.errors import LedgerUnavailable
from protocol.private import ensure_private_folder, is_private_folder

__all__ = ["EmbeddedServer", "end_server", "external_url", "open_ledger", "read_ledger_url"]

ANSWER_S = 2.0
"""Timeout of one answer. A server that answers later is not dead."""
START_S = 60.0
"""How long a server may take to show its first, or its next, sign of life."""
_LOG_TAIL_BYTES = 2000
_SILENT_END_S = 2.0
"""How long a server that was silent for the whole patience has to end by itself, while the run waits. Killing
it loses nothing, since it answers only after it has written."""
_KILLED_S = 5.0
"""Minimum time to wait for a killed server: on a busy host its memory and files take a moment."""
_MAX_KILLS = 3
"""How often one start may be repeated because the new server was killed."""

log = structlog.get_logger(__name__)


def external_url(configured: str | None, environment: Mapping[str, str]) -> str | None:
    """Return an external server's URL: the configured one, else ``REDIS_URL``; None for an embedded server."""
    return configured or environment.get("REDIS_URL") or None


def open_ledger(
    run_dir: Path,
    *,
    configured_url: str | None,
    max_memory_mb: int,
    environment: Mapping[str, str] = os.environ,
    patience_s: float = START_S,
    given_up: threading.Event | None = None,
) -> EmbeddedServer | None:
    """Make sure that this run has a ledger, and write its address; return the server if it is embedded.

    An embedded server without a sign of life for ``patience_s`` is ended and restarted; sooner if its process
    is idle.

    Raises:
        ConfigError: No server program was found.
        Interrupted: ``given_up`` was set while waiting. An existing server is left alone.
        LedgerUnavailable: The embedded server does not start."""
    url = external_url(known_url(run_dir, configured_url) if configured_url else None, environment)
    url = url or known_url(run_dir, None)
    if url is not None:
        write_address(run_dir, LedgerAddress(url=url))
        return None
    server = EmbeddedServer(run_dir, max_memory_mb=max_memory_mb)
    server.start(timeout_s=patience_s, given_up=given_up)
    return server


def end_server(run_dir: Path, *, timeout_s: float = 10.0) -> bool:
    """End a run's embedded server and remove its socket; return whether there was one.

    It gets SIGTERM, flushes its file, and is killed after ``timeout_s``.

    Raises:
        LedgerUnavailable: It belongs to another user or host, or its disk keeps it from ending."""
    return EmbeddedServer(run_dir, max_memory_mb=0).end(timeout_s=timeout_s)


def server_runs(run_dir: Path) -> bool:
    """Return whether an embedded server of this run is running or starting. Sends and writes nothing."""
    return EmbeddedServer(run_dir, max_memory_mb=0).is_there()


class _KilledAtStart(LedgerUnavailable):
    """A signal killed the server before it answered."""


class EmbeddedServer:
    """A run's own ledger server. It has one owning supervisor; its methods are thread-safe."""

    def __init__(
        self, run_dir: Path, *, max_memory_mb: int, answer_s: float = ANSWER_S, is_of_a_copy: bool = False
    ) -> None:
        """A server on a copy does not flush, and dies with this process."""
        self._answer_s = answer_s
        self._is_of_a_copy = is_of_a_copy
        self._run_dir = run_dir.absolute()
        self._max_memory_mb = max_memory_mb
        self._server = ServerHandle(self._run_dir)
        self._folder = self._server.folder
        self._one_at_a_time = threading.Lock()
        self._is_ending = threading.Event()

    @property
    def url(self) -> str:
        """``unix://`` URL with the password. Raises LedgerUnavailable before ``start``."""
        return self._started().url

    @property
    def is_adopted(self) -> bool:
        """Whether another process started the server."""
        return self._server.started is None

    @property
    def socket(self) -> Path:
        """The Unix socket. Raises LedgerUnavailable before ``start``."""
        return Path(self._started().socket)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def log_file(self) -> Path:
        return self._folder / LOG_NAME

    # -- state -----------------------------------------------------------------------------------

    def read_state(self) -> ProbeResult:
        """Return the server's state, within ``answer_s``."""
        result = ProbeResult(ServerState.SILENT, words="it was never started")
        if (address := self._server.known()) is not None:
            pid = self._server.recorded()
            result = probe(Path(address.socket), _password(address), timeout_s=self._answer_s, pid=pid)
        if result.state is ServerState.SILENT and not self.is_there():
            return ProbeResult(ServerState.GONE, words=result.words)
        return result

    def supervise(self, watch: ServerWatch, now_s: float) -> ProbeResult:
        """Probe the server, and restart it when ``watch`` decides that it is dead or has been silent too
        long.

        Raises LedgerUnavailable when it cannot be ended or started."""
        result = self.read_state()
        verdict = watch.evaluate(result, now_s)
        if verdict is ServerAction.LEAVE:
            return result
        if verdict is ServerAction.END_SCRIPT:
            self._end_script()
            return result
        log.error(
            "ledger_server_lost", state=str(result.state), why=result.words, action=f"{verdict} on its append-only file"
        )
        if verdict is ServerAction.REPLACE:
            # an idle process does not end by itself either
            self.stop(timeout_s=0.0 if result.is_at_rest else _SILENT_END_S)
        self.start()
        return self.read_state()

    def _end_script(self) -> None:
        address = self._server.known()
        if address is not None:
            told = end_script(Path(address.socket), _password(address), timeout_s=self._answer_s)
            log.error("ledger_script_too_long", action="SCRIPT KILL, which one that has written refuses", answer=told)

    def is_alive(self) -> bool:
        """Return whether the server serves. While it loads its file it does not, though it is not dead."""
        return self.read_state().state is ServerState.SERVES

    def is_there(self) -> bool:
        """Whether its process lives or its lock is held, so that no other may be started."""
        return self._server.is_there()

    def pid(self) -> int | None:
        """Return the server's process id, as it reports it; None when it does not serve."""
        result = self.read_state()
        return result.pid if result.state is ServerState.SERVES else None

    # -- starting --------------------------------------------------------------------------------

    def start(self, *, timeout_s: float = START_S, given_up: threading.Event | None = None) -> bool:
        """Adopt the existing server, or start one; return whether it was adopted.

        A server without a sign of life for ``timeout_s`` is ended. Only then another is started, on the same
        files, socket and password, so that clients reconnect.

        Raises:
            ConfigError: No server program was found.
            Interrupted: ``given_up`` was set. An existing server is left alone, a new one is ended.
            LedgerUnavailable: It ended, cannot be ended, or did not answer within ``timeout_s``."""
        given_up = given_up or threading.Event()
        with self._one_at_a_time:
            watch = ServerWatch(patience_s=timeout_s)
            watch.begin_again(time.monotonic())
            deadline = time.monotonic() + timeout_s
            while True:
                if self._try_to_launch(timeout_s, given_up):
                    return False
                result = self.read_state()
                if result.state is ServerState.SERVES:
                    return True
                if result.state is ServerState.GONE and time.monotonic() >= deadline:
                    raise LedgerUnavailable(
                        f"other commands have locked {self._folder} for {timeout_s:g} s, so no server was started; try "
                        f"again when they have ended (`fuser {self._folder / 'server.lock'}` lists them)"
                    )
                verdict = watch.evaluate(result, time.monotonic())
                if verdict is ServerAction.END_SCRIPT:
                    self._end_script()
                if verdict is ServerAction.REPLACE:
                    log.error("ledger_server_ended", why=f"{result.state}: {result.words}")
                    # how long the kernel needs does not depend on the caller's patience
                    self._server.end(signal.SIGKILL, max(timeout_s, _KILLED_S))
                    watch.begin_again(time.monotonic())
                self._pause(given_up)

    def _try_to_launch(self, timeout_s: float, given_up: threading.Event, num_kills: int = 0) -> bool:
        """Start a server if there is none; return whether one was started and answers.

        A server that is killed before it answers, for lack of memory for instance, is started again;
        ``num_kills`` counts how often that has happened."""
        known = self._server.known()
        ensure_private_folder(self._folder)
        lock = take_lock(self._folder)
        if lock is None:
            return False
        try:
            # started by an earlier release, without a lock
            if self._server.recorded() is not None:
                return False
            binary = find_server()
            try:
                self._launch(binary, known, lock)
            except LedgerUnavailable:
                raise
            except OSError as error:
                raise LedgerUnavailable(
                    f"the ledger server cannot be started in {self._folder}: {error.strerror}; free space, or fix permissions, "
                    "there"
                ) from error
        finally:
            # from here on only the server holds it
            os.close(lock)
        try:
            self._wait_until_answering(timeout_s, given_up)
        except Interrupted:
            self._stop(timeout_s)
            raise
        except _KilledAtStart as error:
            if num_kills == _MAX_KILLS:
                raise
            log.warning("ledger_server_killed", why=str(error), action="it is started again")
            return self._try_to_launch(timeout_s, given_up, num_kills + 1)
        except LedgerUnavailable:
            if not self._mended():
                raise
            return self._try_to_launch(timeout_s, given_up, num_kills)
        return True

    def _mended(self) -> bool:
        """Remove holes from a file that a server has refused; return whether there were any."""
        lock = take_lock(self._folder)
        if lock is None:
            return False
        try:
            num_bytes = take_out_holes(self._folder)
        except OSError as error:
            log.warning("ledger_file_not_mended", reason=str(error))
            return False
        finally:
            os.close(lock)
        if num_bytes:
            why = "a write that a full disk cut short had left zeros between two commands"
            log.error("ledger_file_mended", why=why, num_bytes=num_bytes)
        return num_bytes > 0

    def _launch(self, binary: ServerBinary, known: LedgerAddress | None, lock: int) -> None:
        socket = socket_path(self._folder, known)
        self._clear(socket)
        password = (known and _password(known)) or secrets.token_hex(24)
        settings = settings_of(
            self._folder, socket, password, max_memory_mb=self._max_memory_mb, is_of_a_copy=self._is_of_a_copy
        ).encode()
        if not self._server.configuration.is_file() or self._server.configuration.read_bytes() != settings:
            write_private(self._server.configuration, settings)
        self._server.address = address = _address(binary, socket, password)
        # before the server runs: every later command must find it
        if known is None or known.url != address.url:
            write_address(self._run_dir, address)
        with self.log_file.open("ab") as output:
            self._server.started = process = subprocess.Popen(
                [*(dying_with_us() if self._is_of_a_copy else ()), binary.path, self._server.configuration],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env=without_sink_credentials(without_store_credentials(os.environ)),
                start_new_session=True,
                pass_fds=(lock,),
            )
        self._server.address = msgspec.structs.replace(address, pid=process.pid, process=identify(process.pid))
        try:
            write_address(self._run_dir, self._server.address)
        except OSError as error:
            # the disk is full; the lock still shows that the server runs
            log.warning("ledger_address_not_written", reason=str(error))

    def _clear(self, socket: Path) -> None:
        """Remove a dead server's socket, and nothing else."""
        try:
            found = socket.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
            raise LedgerUnavailable(
                f"{socket} is in the way: expected a socket of this user, or nothing; inspect it and move it away"
            )
        if listens(socket):
            raise LedgerUnavailable(
                f"a process that is not this run's recorded server listens on {socket}; find it with `ss -xlp`, end it, and "
                "try again"
            )
        socket.unlink()

    def _wait_until_answering(self, timeout_s: float, given_up: threading.Event) -> None:
        process = self._server.started
        assert process is not None
        self._refuse_given_up(given_up)
        watch = ServerWatch(patience_s=timeout_s)
        watch.begin_again(time.monotonic())
        while (result := self.read_state()).state is not ServerState.SERVES:
            if process.poll() is not None:
                words = f"the ledger server ended with {process.returncode} at its start. {self._tail()}"
                raise _KilledAtStart(words) if process.returncode < 0 else LedgerUnavailable(words)
            if watch.evaluate(result, time.monotonic()) is ServerAction.REPLACE:
                self._server.end(signal.SIGKILL, timeout_s)
                raise LedgerUnavailable(
                    f"the ledger server gave no answer within {timeout_s:g} s ({result.words}). {self._tail()}"
                )
            self._pause(given_up)

    def _pause(self, given_up: threading.Event) -> None:
        if self._is_ending.wait(POLL_S):
            raise LedgerUnavailable(f"the ledger server of {self._run_dir} is being ended, so its start was given up")
        self._refuse_given_up(given_up)

    def _refuse_given_up(self, given_up: threading.Event) -> None:
        if given_up.is_set():
            raise Interrupted(f"stopped while waiting for the ledger server of {self._run_dir}; nothing was started")

    # -- ending ----------------------------------------------------------------------------------

    def stop(self, *, timeout_s: float = 10.0) -> bool:
        """End the server, which flushes its file; kill it at the deadline. Returns whether it ended by
        itself. Raises LedgerUnavailable when it cannot be ended."""
        with self._alone():
            return self._stop(timeout_s)

    def end(self, *, timeout_s: float = 10.0) -> bool:
        """Like ``stop``, but returns whether there was a server at all."""
        with self._alone():
            was_there = self.is_there()
            self._stop(timeout_s)
            return was_there

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Abort a start in progress, and block others."""
        self._is_ending.set()
        with self._one_at_a_time:
            self._is_ending.clear()
            yield

    def _stop(self, timeout_s: float) -> bool:
        ended = not self.is_there()
        if not ended:
            self._server.signal(signal.SIGTERM)
            ended = self._server.wait_until_gone(timeout_s)
        if not ended:
            self._server.end(signal.SIGKILL, max(timeout_s, _KILLED_S))
        self._server.started = None
        self._remove_socket()
        return ended

    def _remove_socket(self) -> None:
        address = self._server.known()
        if address is None or not address.socket:
            return
        socket = Path(address.socket)
        with suppress(OSError):
            if stat.S_ISSOCK(socket.lstat().st_mode) and not listens(socket):
                socket.unlink()
        if socket.parent.name.startswith(OWN_FOLDER) and is_private_folder(socket.parent):
            # fails if it is not empty, since others use it
            with suppress(OSError):
                socket.parent.rmdir()

    def _started(self) -> LedgerAddress:
        if self._server.address is None:
            raise LedgerUnavailable(f"the ledger server of {self._run_dir} was not started; call start() first")
        return self._server.address

    def _tail(self) -> str:
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - _LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        return f"{self.log_file} ends with:\n{tail}" if tail else f"{self.log_file} is empty"


def _address(binary: ServerBinary, socket: Path, password: str) -> LedgerAddress:
    return LedgerAddress(
        url=f"unix://:{password}@{quote(str(socket))}",
        is_embedded=True,
        socket=str(socket),
        server=str(binary.path),
        server_version=".".join(map(str, binary.version)),
    )


def _password(address: LedgerAddress) -> str:
    return unquote(urlsplit(address.url).password or "")
