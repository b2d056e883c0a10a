"""Workers of this host that join the run as another host's would: ``launch.on = "join"``.

Each worker is a ``headrace fleet join`` in its own folder. It gets everything through the ledger
and the wire, and reads nothing from the run's folder.

    <cache>/headrace/here/<digest of the run's folder>/headrace/launched, joined

Runs of the same name in different folders have separate jobs. Jobs outlive the supervisor, and the
next one finds them. The folders are removed when the run ends, and by ``down``."""

from __future__ import annotations

import hashlib
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.config.schema import RunConfig
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.url import without_credentials
from pipeline.supervisor.launchers.host_jobs import HostReport, HostRequest, answer
from pipeline.supervisor.launchers.join_command import JoinCommand, TokenOf
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from pipeline.supervisor.launchers.ssh import HostLauncher
from protocol.errors import ConfigError
from protocol.private import user_cache

_END_S: Final = 10.0
_POLL_S: Final = 0.05
_HERE: Final = "this host"

_log = structlog.get_logger(__name__)


class LocalJoinLauncher(HostLauncher):
    def __init__(self, join: JoinCommand, state: Path, url: Callable[[], str], program: Sequence[str] = ()) -> None:
        """Args:
        join: Run and tokens.
        state: Folder for its jobs, instead of the account's state folder.
        url: Returns the ledger's address without user and password; called at each start.
        program: Command of Headrace; by default this installation's."""
        super().__init__([_HERE], join, patience_s=math.inf)
        self._state, self._url, self._program = state, url, program
        self._own: list[subprocess.Popen[bytes]] = []
        """Processes to reap; the jobs themselves are found by their files."""

    def clear(self, logs: Path, /) -> None:
        """Remove the folders of ended jobs. Keeps them all if a job still runs after 10 s.

        The output of each ``headrace fleet join`` is saved in ``logs`` as ``join-WORKER.out``. The
        workers' logs have already arrived through the ledger."""
        deadline = time.monotonic() + _END_S
        # a killed process takes a moment to end
        while left := self._running():
            if time.monotonic() > deadline:
                _log.warning("joined_folders_left", folder=str(self._state), reason=f"still running: {', '.join(left)}")
                return
            time.sleep(_POLL_S)
        for output in (self._state / "headrace" / "launched" / self._join.run).glob("*.out"):
            with suppress(OSError):
                shutil.copyfile(output, logs / f"join-{output.name}")
        try:
            shutil.rmtree(self._state)
        except OSError as error:
            _log.warning("joined_folders_left", folder=str(self._state), reason=str(error))

    def _running(self) -> list[str]:
        """Return the workers of running jobs, or else processes of this launcher that still run."""
        jobs = [worker for worker, job in self.listing().items() if job.state is not JobState.ENDED]
        return jobs or [f"process {process.pid}" for process in self._own]

    def _ask(self, host: str, request: HostRequest) -> HostReport:
        self._own[:] = [process for process in self._own if process.poll() is None]
        if request.verb == "start":
            request = msgspec.structs.replace(request, url=self._url())
        try:
            return answer(request, self._program, state=self._state, started=self._own.append)
        except (OSError, ConfigError) as error:
            raise LaunchFailed(f"{request.verb} {request.worker} on {host}: {error}") from error


def local_join_launcher(config: RunConfig, run_dir: Path, token_of: TokenOf) -> LocalJoinLauncher:
    """Return a run's launcher. Raises ConfigError: its mailboxes do not use tcp."""
    if config.wire.transport != "tcp":
        raise ConfigError(
            "launch.on is join, and joined workers use tcp, even on one host; set wire.transport to tcp: --set "
            "wire.transport=tcp"
        )
    join = JoinCommand(config.run.name, "", token_of, allows_plaintext=config.ledger.allow_plaintext)
    return LocalJoinLauncher(join, state_folder(run_dir), lambda: without_credentials(read_ledger_url(run_dir)))


def state_folder(run_dir: Path) -> Path:
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    return user_cache("here", digest)
