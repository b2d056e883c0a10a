"""Jobs on a list of hosts, and on this one.

For ``launch.on = "ssh"``, each call is one connection of the system's ssh client to a host that runs
``headrace fleet place``, with request and token on its standard input. Jobs outlive the connection
and this process, and a later supervisor finds them.

A worker is started on the host that has the fewest. A host that does not answer for 20 s is lost:
its workers are fenced and started on others. If it answers again, what still runs there is killed.

For ``launch.on = "join"``, each worker is a ``headrace fleet join`` of this host in its own folder. It
gets everything through the ledger and the wire, and reads nothing from the run's folder.

    <cache>/headrace/here/<digest of the run's folder>/headrace/launched, joined

Runs of the same name in different folders have separate jobs. Jobs outlive the supervisor, and the
next one finds them. The folders are removed when the run ends, and by ``down``."""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.config.operations import LaunchSection
from pipeline.config.schema import RunConfig
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.url import without_credentials
from pipeline.runtime.liveness import REPLACED_AFTER_S
from pipeline.supervisor.launchers.commands import JoinCommand, TokenOf, ask, require
from pipeline.supervisor.launchers.host_jobs import HostJob, HostReport, HostRequest, answer
from pipeline.supervisor.launchers.seam import ConfiguredLauncher, Job, JobState, LaunchFailed
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.printable import printable_line
from protocol.private import user_cache

_OPTIONS = (
    "-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3",
)  # fmt: skip
_SSH_FAILED = 255
"""ssh's own exit code, when it cannot connect."""
_MAX_AT_ONCE = 16


class HostLauncher(ConfiguredLauncher):
    """Starts a run's workers on a list of hosts."""

    def __init__(
        self, hosts: Sequence[str], join: JoinCommand, *, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``patience_s``: a host that has not answered for this long gets no worker if others have."""
        self._hosts, self._join, self._patience_s, self._clock = hosts, join, patience_s, clock
        self._seen: dict[str, dict[str, HostJob]] = {host: {} for host in self._hosts}
        """Jobs by host, as last listed."""
        self._answered_s = dict.fromkeys(self._hosts, clock())
        self._host_of: dict[str, str] = {}

    @abstractmethod
    def _ask(self, host: str, request: HostRequest) -> HostReport:
        """Let a host carry out a request. Raises LaunchFailed."""

    def start(self, role: Role, worker: str, /) -> None:
        now = self._clock()
        load = {host: sum(job.runs for job in jobs.values()) for host, jobs in self._seen.items()}
        silent = {host: now - self._answered_s[host] > self._patience_s for host in load}
        host = min(self._hosts, key=lambda host: (silent[host], load[host]))
        join, token = self._join, self._join.token_of(role)
        request = HostRequest(
            verb="start", run=join.run, worker=worker, role=role, url=join.url, token=token,
            allows_plaintext=join.allows_plaintext,
        )  # fmt: skip
        try:
            self._take(host, self._ask(host, request))
        except LaunchFailed:
            # try other hosts first from now on
            self._answered_s[host] = float("-inf")
            raise
        self._host_of[worker] = host

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        for host, jobs in self._seen.items():
            if worker in jobs and jobs[worker].runs and not self._is_lost(host):
                self._take(host, self._ask(host, HostRequest(verb="stop", run=self._join.run, worker=worker, now=now)))

    def listing(self) -> dict[str, Job]:
        """Return the jobs of all hosts that are not lost. Raises LaunchFailed: no host answers."""
        failed = self._look()
        if len(failed) == len(self._hosts):
            raise LaunchFailed("; ".join(f"{host}: {error}" for host, error in failed.items()))
        found: dict[str, Job] = {}
        newest: dict[str, tuple[bool, float]] = {}
        for host in self._hosts:
            if self._is_lost(host):
                continue
            for worker, job in self._seen[host].items():
                rank = (self._host_of.get(worker) == host, job.started_s)
                if worker not in newest or rank > newest[worker]:
                    newest[worker] = rank
                    found[worker] = job.as_job(host)
                    self._host_of.setdefault(worker, host)
        self._end_doubles(found)
        return found

    def logs(self, worker: str, /) -> str:
        holding = [host for host, jobs in self._seen.items() if worker in jobs]
        host = self._host_of.get(worker) or (holding[0] if holding else None)
        if host is None:
            self._look()
            host = next((name for name, jobs in self._seen.items() if worker in jobs), None)
        if host is None:
            return ""
        return self._ask(host, HostRequest(verb="logs", run=self._join.run, worker=worker)).text

    def _look(self) -> dict[str, str]:
        """List the jobs of every host; return the error of each host that failed."""
        request = HostRequest(verb="list", run=self._join.run)

        def look(host: str) -> str:
            try:
                self._take(host, self._ask(host, request))
            except LaunchFailed as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(self._hosts)), thread_name_prefix="ssh") as pool:
            said = dict(zip(self._hosts, pool.map(look, self._hosts), strict=True))
        return {host: error for host, error in said.items() if error}

    def _is_lost(self, host: str) -> bool:
        return self._clock() - self._answered_s[host] > REPLACED_AFTER_S

    def _end_doubles(self, found: dict[str, Job]) -> None:
        """Kill jobs on a host that was lost and is back if their worker now runs elsewhere."""
        for host in self._hosts:
            for worker, job in list(self._seen[host].items()):
                elsewhere = self._host_of.get(worker)
                if (
                    job.runs
                    and not self._is_lost(host)
                    and elsewhere != host
                    and found[worker].state is JobState.RUNNING
                ):
                    request = HostRequest(verb="stop", run=self._join.run, worker=worker, now=True)
                    self._take(host, self._ask(host, request))

    def _take(self, host: str, said: HostReport) -> None:
        self._seen[host], self._answered_s[host] = said.jobs, self._clock()


class SshLauncher(HostLauncher):
    """Raises ConfigError: no ssh on PATH, no hosts, or an invalid host name."""

    def __init__(self, settings: LaunchSection, join: JoinCommand, clock: Callable[[], float] = time.monotonic) -> None:
        require("ssh", why="launch.on is ssh")
        self._settings, hosts = settings, list(dict.fromkeys(settings.ssh.hosts))
        if not hosts:
            raise ConfigError('launch.on is ssh, but launch.ssh.hosts is empty; give hosts, as ["gpu1", "user@gpu2"]')
        for host in hosts:
            if not host or host.startswith("-") or any(char.isspace() for char in host):
                raise ConfigError(f"launch.ssh.hosts has {host!r:.80}; expected HOST or USER@HOST")
        super().__init__(hosts, join, patience_s=settings.poll_s + settings.answer_s, clock=clock)

    def reach(self) -> None:
        """Ask every host once. Raises ConfigError: names the hosts that cannot be reached, with
        ssh's errors."""
        failed = [f"{host}: {error}" for host, error in self._look().items()]
        if failed:
            raise ConfigError(
                f"{len(failed)} of {len(self._hosts)} hosts of launch.ssh.hosts cannot be used; {'; '.join(failed)}. "
                "Fix them, or remove them from the list"
            )

    def _ask(self, host: str, request: HostRequest) -> HostReport:
        words = ["ssh", *_OPTIONS, *self._settings.ssh.options, "--", host]
        command = shlex.join([*self._settings.program, "fleet", "place"])
        ended = ask([*words, command], timeout_s=self._settings.answer_s, text=msgspec.json.encode(request).decode())
        if ended.code == _SSH_FAILED:
            raise LaunchFailed(f"ssh to {host} failed: {ended.trouble}")
        if ended.code != 0:
            raise LaunchFailed(f"{command!r} on {host} failed with code {ended.code}: {ended.trouble}")
        return _decoded(host, ended.output)


def dry_run(settings: LaunchSection, workers: Sequence[str]) -> str:
    """Describe which host would start which worker, if all answer."""
    hosts = settings.ssh.hosts or ("(launch.ssh.hosts is empty)",)
    command = shlex.join([*settings.program, "fleet", "place"])
    lines = [f"{worker}: ssh {hosts[number % len(hosts)]} {command}" for number, worker in enumerate(workers)]
    return "\n".join(["# each with a request and the token on its standard input", *lines, ""])


def _decoded(host: str, output: str) -> HostReport:
    """Parse the answer, which may follow lines printed by a login script."""
    lines = output.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else "", type=HostReport)
    except (ValueError, RecursionError) as error:
        raise LaunchFailed(
            f"{host} did not answer as Headrace but with {printable_line(output[:200])!r}: {error}"
        ) from error


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
