"""The starter of a fleet: a process that has imported what workers need, and forks them.

*Consumes* requests for workers. *Produces* processes with the interface of ``subprocess.Popen``.
*Waits for* the starter's imports in ``wait``, and up to ``_ANSWER_S`` for its answers.

A forked worker has its imports within milliseconds instead of seconds, and shares their memory.
Without a starter (not Linux, or its imports fail or initialise CUDA), workers import for
themselves. vLLM's workers always do.

Both import while the run is still being checked (``EarlyProcesses``).

    up: configuration ──> first checks ... last check ──> ledger, fleet
    starter, vLLM's workers: imports ─────────────────────────────> fork, become workers

Imports take most of a start. Until the checks have passed, these processes do nothing else: they touch
neither the run's folder nor a device. They get the configuration as an open file without a name, since
the folder may not exist yet. If a check fails, they are killed; if this process is killed, they end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import structlog

from pipeline.config.load import to_toml
from pipeline.config.schema import RunConfig
from pipeline.files.urls import without_store_credentials
from pipeline.ledger.url import without_ledger_password
from pipeline.process.descendants import WORKER_MARK, worker_mark
from pipeline.process.environment import without_sink_credentials
from pipeline.process.forking import Check, Fork, Reap, post_request, receive_answer, send_request
from pipeline.process.records import ProcessIdentity, identify
from pipeline.runtime.process_setup import thread_environment
from pipeline.supervisor.fleet_plan import worker_name
from pipeline.supervisor.fleet_size import desired_counts
from protocol import headrace
from protocol.ids import Role

_POLL_S = 0.01


class AdoptedProcess:
    """A process that is not this one's child, with the interface of ``subprocess.Popen``.

    On Linux it holds a pidfd, so that no signal reaches a later process with the same id; elsewhere
    the identity is checked before each signal. The process writes its exit code to a file, since
    the system gives it only to the parent."""

    def __init__(self, identity: ProcessIdentity, read_exit_code: Callable[[], int | None]) -> None:
        """``read_exit_code`` returns the code that the process wrote down, or None. Raises
        ProcessLookupError: the process has ended."""
        self._hold(identity.pid, read_exit_code)
        self._identity = identity
        # checked after opening, so the descriptor is certainly of this process
        if identify(identity.pid) != identity:
            self._close()
            raise ProcessLookupError(f"process {identity.pid} is not the one started at {identity.started}")

    @classmethod
    def child(cls, pid: int, read_exit_code: Callable[[], int | None]) -> Self:
        """Hold a process (Linux) whose parent does not reap it before ``read_exit_code`` is called."""
        process = cls.__new__(cls)
        process._hold(pid, read_exit_code)
        return process

    def _hold(self, pid: int, read_exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self._read_exit_code = read_exit_code
        self._code: int | None = None
        self._descriptor = _open_descriptor(pid)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs. A process that wrote none counts as killed."""
        if self._code is None and not self._runs():
            written = self._read_exit_code()
            self._code = -signal.SIGKILL if written is None else written
            self._close()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        with suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for the process to end; return its exit code. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(_POLL_S)
        return code

    def _runs(self) -> bool:
        if self._descriptor is None:
            return identify(self.pid) == self._identity
        # poll(), because select() refuses descriptors above 1023
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except AttributeError:  # not Linux
        return None


NAME = "starter"
_ROOM = "-" * 80
"""Padding argument that reserves space in ``/proc`` for the longer command lines of forked workers."""
_ANSWER_S = 5.0
_READY_S = 120.0
_LOOK_S = 0.1
_END_S = 5.0


class StarterEnded(Exception):
    """The starter has ended, or does not answer."""


def starter_command(run: Path, *roles: Role) -> list[str]:
    """Return the starter's command line without its last two arguments. ``run``: the run's folder,
    or a file with its configuration. ``roles``: roles that it forks; all by default."""
    return headrace.command("workers.starter", str(run), *map(str, roles))


def forks(config: RunConfig, role: Role) -> bool:
    """Return whether a role's workers may be forked. vLLM may not: it starts threads when imported."""
    engine = {Role.GENERATOR: config.generation.engine, Role.REFERENCE: config.reference.backend}.get(role)
    return hasattr(os, "pidfd_open") and engine != "vllm"


def marked_environment(mark: str) -> dict[str, str]:
    """Return this process's environment for a worker: with its mark and one thread per numeric
    library; without credentials of the ledger, object stores and sinks, except a trace collector's.

    The mark comes first, because ``/proc`` shows only as much as the starter's environment was
    long. Threads are limited here because numpy is imported before a worker could do so, and the
    starter must not have any."""
    environment = without_sink_credentials(without_store_credentials(without_ledger_password(os.environ)), but="OTEL_")
    return {WORKER_MARK: mark} | environment | thread_environment(1) | {WORKER_MARK: mark}


def begin_served(
    command: Sequence[str], mark: str, output: BinaryIO | int, descriptors: Sequence[int] = ()
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process that serves requests (``pipeline.process.forking``), with a mark for ``/proc``; return
    this end of its socket pair, and the process. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_ANSWER_S)
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), _ROOM],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[theirs.fileno(), *descriptors],
            env=marked_environment(mark),
        )
    return ours, process


class Starter:
    """Starts workers as forks of one process.

    Args:
        run_dir: The run's folder.
        command: Command line of the starter, to which the socket's descriptor and padding are added.
        output: Receives what it prints; by default ``logs/starter.out``.
        descriptors: Open files that it inherits.

    Raises:
        OSError: it cannot be started."""

    def __init__(
        self, run_dir: Path, command: Sequence[str], output: BinaryIO | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        self._is_ready = False
        mark = worker_mark(run_dir, NAME + _ROOM)
        with (run_dir / "logs" / f"{NAME}.out").open("ab") if output is None else nullcontext(output) as prints:
            self._channel, self._process = begin_served(command, mark, prints, descriptors)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + _READY_S
        # poll(), because select() refuses descriptors above 1023
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not poll.poll(1000 * _LOOK_S):
            if given_up() or time.monotonic() > deadline:
                self._process.kill()
                raise StarterEnded("it was still importing")
        self._receive_readiness()

    def is_ready(self) -> bool:
        """Return whether the imports are done, without waiting. Raises StarterEnded."""
        if not self._is_ready:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            if poll.poll(0):
                self._receive_readiness()
        return self._is_ready

    def _receive_readiness(self) -> None:
        try:
            receive_answer(self._channel)
        except (EOFError, OSError) as error:
            raise StarterEnded(str(error)) from error
        self._is_ready = True

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: BinaryIO,
        written_code: Callable[[], int | None],
    ) -> AdoptedProcess:
        """Fork a process.

        Args:
            arguments: Its command line.
            environment: Its environment, with its mark first.
            output: Receives what it prints.
            written_code: Returns the exit code that it wrote down, in case the starter ends first.

        Raises:
            StarterEnded: nothing was started."""
        pid = self._request(Fork(list(arguments), dict(environment)), output.fileno())

        def exit_code() -> int | None:
            try:
                return self._request(Reap(pid))
            except StarterEnded:
                return written_code()

        return AdoptedProcess.child(pid, exit_code)

    def kill(self) -> None:
        """End a starter that has forked nothing, at once."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the starter. Workers that it forked keep running."""
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, request: Fork | Reap, *descriptors: int) -> int:
        try:
            return send_request(self._channel, request, *descriptors).number
        except (EOFError, OSError) as error:
            # a late answer must not be taken for the next request's
            self._channel.close()
            self._process.kill()
            raise StarterEnded(str(error)) from error


log = structlog.get_logger(__name__)


class EarlyWorker:
    """A vLLM worker's process before it is the worker (``workers.early``)."""

    def __init__(self, config_file: Path, role: Role, mark: str, descriptor: int) -> None:
        """``descriptor``: of the open ``config_file``. Raises OSError."""
        command = headrace.command("workers.early", str(config_file), str(role))
        self._channel, self.process = begin_served(command, mark, subprocess.DEVNULL, [descriptor])

    def check(self, timeout_s: float) -> str | None:
        """Return why vLLM refuses the configuration; None if it does not.

        Raises:
            EOFError: the process has ended.
            OSError: it cannot be reached; TimeoutError if it has not answered in time."""
        self._channel.settimeout(timeout_s)
        answer = send_request(self._channel, Check())
        return answer.words if answer.number else None

    def become(self, arguments: Sequence[str], environment: Mapping[str, str], output: BinaryIO) -> None:
        """Let it become a worker once it has imported. Raises OSError: it has ended."""
        with self._channel:
            post_request(self._channel, Fork(list(arguments), dict(environment)), output.fileno())

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


class EarlyProcesses:
    """The starter and vLLM's workers of a configuration; a context that ends those that were not taken.

    There are none without ``supervisor.preload``, for code of the run's own, and where nothing is forked."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._starter: Starter | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close
        self._workers: dict[str, EarlyWorker] = {}
        if not config.supervisor.preload or config.code.workers or not hasattr(os, "pidfd_open"):
            return
        with tempfile.TemporaryFile() as file:
            file.write(to_toml(config).encode())
            file.flush()
            path = Path(f"/proc/self/fd/{file.fileno()}")
            try:
                for role, count in desired_counts(config).items():
                    if forks(config, role) or role in config.launch.launched or not config.has_sampling:
                        continue
                    for name in (worker_name(role, number) for number in range(count)):
                        mark = worker_mark(run_dir, name)
                        self._workers[name] = EarlyWorker(path, role, mark, file.fileno())
                self._starter = Starter(run_dir, starter_command(path), self._output, [file.fileno()])
            except OSError as error:
                log.warning("not_started_early", reason=str(error), action="workers start after the checks")

    def check_vllm(self, timeout_s: float) -> str | None:
        """Return as ``EarlyWorker.check``, from any vLLM worker; raises EOFError if there is none."""
        for worker in self._workers.values():
            return worker.check(timeout_s)
        raise EOFError("no worker has imported vLLM")

    def take_starter(self) -> Starter | None:
        starter, self._starter = self._starter, None
        return starter

    def become(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], output: BinaryIO
    ) -> subprocess.Popen[bytes] | None:
        """Let a worker's early process become it; return None if there is none."""
        if (worker := self._workers.pop(name, None)) is None:
            return None
        try:
            worker.become(arguments, environment, output)
        except OSError as error:
            log.warning("early_worker_ended", worker=name, reason=str(error), action="another process is started")
            worker.close()
            return None
        return worker.process

    def starter_output(self) -> bytes:
        """Return what the starter has printed so far."""
        self._output.seek(0)
        return self._output.read()

    def close(self) -> None:
        """End the processes that were not taken. Repeated calls do nothing."""
        if (starter := self.take_starter()) is not None:
            starter.kill()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._output.close()
