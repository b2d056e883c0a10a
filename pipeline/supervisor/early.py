"""Processes of a run that import while the run is still being checked.

    up: configuration ──> first checks ... last check ──> ledger, fleet
    starter, vLLM's workers: imports ─────────────────────────────> fork, become workers

Imports take most of a start. Until the checks have passed, these processes do nothing else: they touch
neither the run's folder nor a device. They get the configuration as an open file without a name, since
the folder may not exist yet. If a check fails, they are killed; if this process is killed, they end."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import structlog

from pipeline.config.load import to_toml
from pipeline.config.schema import RunConfig
from pipeline.process.descendants import worker_mark
from pipeline.process.forking import Check, Fork, post_request, send_request
from pipeline.supervisor.fleet_plan import worker_name
from pipeline.supervisor.fleet_size import desired_counts
from pipeline.supervisor.starter import Starter, begin_served, forks, starter_command
from protocol import headrace
from protocol.ids import Role

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
