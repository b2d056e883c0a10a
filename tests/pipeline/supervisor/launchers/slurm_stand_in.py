"""A stand-in for Slurm on one host, with the parts of its documented interface that are used.

    python slurm_stand_in.py STATE PROGRAM ARGUMENT ...

PROGRAM is sbatch, srun, scancel, squeue or scontrol. Options that are not known here are refused.
While ``STATE/hold`` exists, new jobs wait. As with Slurm, a signal other than SIGKILL goes to the
steps of a job and not to its script. A job that is killed as a whole gets SIGTERM first."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SBATCH = (
    "--job-name",
    "--output",
    "--open-mode",
    "--nodes",
    "--ntasks",
    "--cpus-per-task",
    "--gres",
    "--mem",
    "--partition",
)


def signalled(job: dict[str, Any], number: signal.Signals) -> None:
    # as with scancel, a step that has just ended is no error
    with contextlib.suppress(ProcessLookupError):
        os.kill(job["step_pid"], number)


class Cluster:
    """The state of all jobs, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def job(self, number: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{number}.job").read_text())

    def write(self, number: str, **changes: Any) -> None:
        """Change a job. A script and its step do so at the same time."""
        path = self.folder / f"{number}.job"
        with (self.folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = json.loads(path.read_text()) if path.exists() else {}
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(known | changes))
            partial.rename(path)

    def numbers(self) -> list[str]:
        return sorted((path.stem for path in self.folder.glob("*.job")), key=int)

    def sbatch(self, arguments: list[str]) -> int:
        assert arguments == ["--parsable"], arguments
        script = sys.stdin.read()
        assert script.startswith("#!/"), "sbatch: error: This does not look like a batch script"
        options: dict[str, str] = {}
        for line in script.splitlines():
            if line.startswith("#SBATCH "):
                (word,) = shlex.split(line.removeprefix("#SBATCH "))
                name, _, value = word.partition("=")
                if name not in (*SBATCH, "--no-requeue"):
                    print(f"sbatch: unrecognized option '{word}'", file=sys.stderr)
                    return 1
                options[name] = value
        number = str(len(self.numbers()) + 41)
        self.write(
            number, name=options["--job-name"], output=options["--output"], script=script, state="PENDING", code="0:0"
        )
        if not (self.folder / "hold").exists():
            self.begin(number)
        print(number)
        return 0

    def begin(self, number: str) -> None:
        self.write(number, state="RUNNING")
        subprocess.Popen(
            [sys.executable, __file__, str(self.folder), "run", number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, arguments: list[str]) -> int:
        (number,) = arguments
        job = self.job(number)
        script = self.folder / f"{number}.sh"
        script.write_text(job["script"])
        with Path(job["output"]).open("ab") as output:
            environment = {**os.environ, "SLURM_JOB_ID": number}
            process = subprocess.Popen(
                ["bash", str(script)], stdout=output, stderr=output, start_new_session=True, env=environment
            )
            self.write(number, script_pid=process.pid)
            code = process.wait()
        if self.job(number)["state"] == "RUNNING":
            shown = f"{code}:0" if code >= 0 else f"0:{-code}"
            self.write(number, state="FAILED" if code else "COMPLETED", code=shown)
        return 0

    def srun(self, arguments: list[str]) -> int:
        assert arguments[0] == "--ntasks=1", arguments
        process = subprocess.Popen(arguments[1:])
        self.write(os.environ["SLURM_JOB_ID"], step_pid=process.pid)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = process.wait()
        return code if code >= 0 else 128 - code

    def scancel(self, arguments: list[str]) -> int:
        *options, target = arguments
        number, _, step = target.partition(".")
        job = self.job(number)
        if job["state"] == "PENDING":
            if options and options[0] != "--signal=KILL":
                print(f"scancel: error: Kill job error on job id {number}: Job is pending execution", file=sys.stderr)
                return 1
            self.write(number, state="CANCELLED", code="0:0")
        elif job["state"] == "RUNNING":
            if options == ["--signal=TERM"]:
                signalled(job, signal.SIGTERM)
            elif options == ["--signal=KILL"] and step == "0":
                signalled(job, signal.SIGKILL)
            else:
                assert options == [], options
                self.write(number, state="CANCELLED", code="0:15")
                signalled(job, signal.SIGTERM)
        return 0

    def squeue(self, arguments: list[str]) -> int:
        user, form = f"--user={getpass.getuser()}", "--format="
        assert arguments[:3] == ["--noheader", "--states=all", user], arguments
        for number in self.numbers():
            job = self.job(number)
            where = {"PENDING": "(Resources)", "RUNNING": "node-7"}.get(job["state"], "")
            fields = {"%i": number, "%j": job["name"], "%T": job["state"], "%R": where}
            line = arguments[3].removeprefix(form)
            for field, value in fields.items():
                line = line.replace(field, value)
            print(line)
        return 0

    def scontrol(self, arguments: list[str]) -> int:
        assert arguments[:3] == ["--oneliner", "show", "job"], arguments
        job = self.job(arguments[3])
        print(
            f"JobId={arguments[3]} JobName={job['name']} JobState={job['state']} Reason=None ExitCode={job['code']} BatchFlag=1"
        )
        return 0


def main() -> int:
    state, program, *arguments = sys.argv[1:]
    return getattr(Cluster(Path(state)), program)(arguments)


if __name__ == "__main__":
    sys.exit(main())
