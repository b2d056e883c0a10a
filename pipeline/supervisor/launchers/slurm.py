"""One job per worker on a Slurm cluster, through sbatch, scancel, squeue and scontrol.

A job's script runs ``srun headrace fleet join``. It never contains the token, since others may read
job scripts: the token is a file of mode 0600 in a folder visible to the nodes, next to the jobs'
outputs. Slurm requeues no job: the supervisor restarts it, within its budgets.

SIGTERM is sent to the job's steps only (scancel's default), so that the join drains and srun
returns its exit code."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.operations import LaunchSection, ResourcesSection
from pipeline.files import last_lines
from pipeline.ledger.token import write_token
from pipeline.process.exit_codes import from_shell
from pipeline.supervisor.launchers.commands import JoinCommand, ask, call, require, role_of
from pipeline.supervisor.launchers.seam import ConfiguredLauncher, Job, JobState
from protocol.ids import Role

_FORMAT = "%i|%j|%T|%R"
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_BY_ITSELF = frozenset({"COMPLETED", "FAILED"})
"""States of jobs whose exit code is their worker's."""
_ENDED = _BY_ITSELF | frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "DEADLINE", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


class SlurmLauncher(ConfiguredLauncher):
    """Starts a run's workers as Slurm jobs.

    Raises ConfigError: Slurm's commands are not on PATH."""

    def __init__(self, settings: LaunchSection, join: JoinCommand) -> None:
        require("sbatch", "scancel", "squeue", "scontrol", why="launch.on is slurm")
        self._settings, self._join = settings, join
        self._folder = job_folder(settings, join.run)
        self._codes: dict[str, int | None] = {}
        """Exit codes by job number, since Slurm soon forgets ended jobs."""

    def start(self, role: Role, worker: str, /) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_token(self._folder / f"{role}.token", self._join.token_of(role))
        self._call(["sbatch", "--parsable"], text=job_script(self._settings, self._join, role, worker))

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        """Cancel a waiting job; send SIGTERM to the steps of a running one, or kill it with
        ``now``."""
        for number, job in self._jobs().get(worker, []):
            if job.state is JobState.WAITING:
                self._call(["scancel", number])
            elif job.state is JobState.RUNNING:
                if not now:
                    self._call(["scancel", "--signal=TERM", number])
                    continue
                # Cancelling a job sends SIGTERM and waits for KillWait, so kill its step first, which may
                # not have begun.
                ask(["scancel", "--signal=KILL", f"{number}.0"], timeout_s=self._settings.answer_s)
                self._call(["scancel", number])

    def listing(self) -> dict[str, Job]:
        found: dict[str, Job] = {}
        for worker, jobs in self._jobs().items():
            number, job = max(jobs, key=lambda numbered: int(numbered[0]))
            found[worker] = job if job.state is not JobState.ENDED else self._ended(number, job)
        return found

    def logs(self, worker: str, /) -> str:
        return last_lines(self._folder / f"{worker}.out")

    def _jobs(self) -> dict[str, list[tuple[str, Job]]]:
        words = ["squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", f"--format={_FORMAT}"]
        prefix = job_name(self._join.run, "")
        jobs: dict[str, list[tuple[str, Job]]] = {}
        for line in self._call(words).splitlines():
            number, name, state, where = (line.strip().split("|", 3) + [""] * 4)[:4]
            worker = name.removeprefix(prefix)
            role = role_of(worker) if name.startswith(prefix) else None
            if role is not None and number.isdecimal():
                jobs.setdefault(worker, []).append((number, _job(role, number, state, where)))
        return jobs

    def _ended(self, number: str, job: Job) -> Job:
        if number not in self._codes:
            self._codes[number] = self._exit_code(number) if job.reason in _BY_ITSELF else None
        return Job(job.role, job.state, job.place, self._codes[number], job.reason)

    def _exit_code(self, number: str) -> int | None:
        """Return a job's exit code; None once Slurm has forgotten it."""
        words = ["scontrol", "--oneliner", "show", "job", number]
        answer = ask(words, timeout_s=self._settings.answer_s)
        fields = dict(field.split("=", 1) for field in answer.output.split() if "=" in field)
        code, _, number_of_signal = fields.get("ExitCode", "").partition(":")
        if not code.isdecimal():
            return None
        return (
            -int(number_of_signal) if number_of_signal.isdecimal() and int(number_of_signal) else from_shell(int(code))
        )

    def _call(self, words: Sequence[str], text: str = "") -> str:
        return call(words, timeout_s=self._settings.answer_s, text=text)


def job_folder(settings: LaunchSection, run: str) -> Path:
    """Return the folder of a run's tokens and outputs, which the nodes must see."""
    return settings.slurm.folder.expanduser() / run


def job_name(run: str, worker: str) -> str:
    return f"headrace.{run}.{worker}"


def job_script(settings: LaunchSection, join: JoinCommand, role: Role, worker: str) -> str:
    folder = job_folder(settings, join.run)
    options = [
        f"--job-name={job_name(join.run, worker)}",
        f"--output={folder / worker}.out",
        "--open-mode=append",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        *_resources(settings.resources(role)),
        *settings.slurm.options,
    ]
    command = shlex.join(join.words(role, worker, str(folder / f"{role}.token")))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        "",
        f"exec srun --ntasks=1 {command}",
        "",
    ]
    return "\n".join(lines)


def _resources(wanted: ResourcesSection) -> list[str]:
    options = [f"--cpus-per-task={wanted.cpus}"]
    if wanted.gpus:
        options.append(f"--gres=gpu:{wanted.gpus}")
    if wanted.memory_gb is not None:
        options.append(f"--mem={wanted.memory_gb}G")
    return options


def _job(role: Role, number: str, state: str, where: str) -> Job:
    """Parse squeue's state and place, which is in brackets if it is the reason for waiting."""
    place = f"Slurm job {number}" if where.startswith("(") or not where else f"Slurm job {number} on {where}"
    if state in _ENDED:
        return Job(role, JobState.ENDED, place, reason=state)
    if state in _WAITING:
        return Job(role, JobState.WAITING, place, reason=where.strip("()"))
    return Job(role, JobState.RUNNING, place)
