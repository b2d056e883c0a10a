"""The run under a drill: started, inspected through its ledger and its files, killed, started again.

No question waits longer than a second: a process without an answer counts as down, which a drill expects."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ops.demo.task import Split, generate
from ops.drill.orders import FOLDER as ORDERS
from ops.drill.verifier import NAME as VERIFIER
from pipeline.ledger.address import read_address
from pipeline.ledger.redis import keys
from pipeline.observability.history import HISTORY_NAME, HistoryTail, UpdateRow
from pipeline.runtime.registry.contract import Heartbeat
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.errors import ConfigError
from protocol.ids import Role

ROOT = Path(__file__).resolve().parents[2]
RUN = "drill"
MEMORY = Path("/dev/shm")  # noqa: S108 -- only looked at
_NUM_PROMPTS = 512
_ANSWER_S = 1.0
_COMMAND_S = 300.0
_WORDS_CHARS = 600
_HEARS_HANGUPS = ("env", "--default-signal=HUP")
"""Under nohup a child would inherit an ignored SIGHUP, and no supervisor would receive one."""


class DrillFleet:
    """One run, in its own folder."""

    def __init__(
        self, folder: Path, settings: Sequence[str], *, host: Sequence[str] = (), verdict_s: float = 0.0
    ) -> None:
        """Write the prompts, the switch of the verifier and the clock; start nothing.

        ``host``: the command prefix that runs a command on the fleet's host, if that is not this one.
        ``verdict_s``: seconds that each verdict takes."""
        self._host = list(host)
        self.folder = folder
        self.run_dir = folder / RUN
        self.switch = folder / "verifier-switch"
        self.clock = folder / "clock"
        self.orders = folder / "orders"
        self.journals = folder / "journals"
        self.last_words = ""
        """The end of the last command's standard error."""
        self.memory = MEMORY
        """The fleet's ``/dev/shm``, as this process sees it."""
        self._settings = list(settings)
        self._history = HistoryTail(self.run_dir / HISTORY_NAME)
        self._pids: dict[int, str] = {}
        self._client: redis.Redis | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guests: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'ops' / 'drill' / 'shim'}{os.pathsep}{ROOT}",
            "HEADRACE_DRILL_CLOCK": str(self.clock),
            ORDERS: str(self.orders),
            "OMP_NUM_THREADS": "1",
        }
        self._environment.pop("REDIS_URL", None)
        folder.mkdir(parents=True, exist_ok=True)
        self.clock.write_bytes(bytes(8))
        self._write_prompts(verdict_s)

    def _write_prompts(self, verdict_s: float) -> None:
        with (self.folder / "prompts.jsonl").open("w") as file:
            for problem in generate(Split.TRAIN, _NUM_PROMPTS, 0):
                row = {"prompt": problem.prompt, "answer": problem.answer, "verifier": VERIFIER}
                file.write(json.dumps(row | {"switch": str(self.switch), "verdict_s": verdict_s}) + "\n")

    # -- processes ---------------------------------------------------------------------------------

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        return self._processes[-1]

    @property
    def output(self) -> Path:
        """The file with the supervisors' output."""
        return self.folder / "output.txt"

    def start(self) -> None:
        settings = [
            f"run.dir={self.folder}",
            f"data.train=['{self.folder / 'prompts.jsonl'}']",
            f"engines.settings.journal={self.journals.absolute()}",
            *self._settings,
        ]
        self._up("configs/drill.toml", *(word for setting in settings for word in ("--set", setting)))

    def resume(self) -> None:
        """Resume the run with another supervisor."""
        self._up("--resume", str(self.run_dir))

    def _up(self, *arguments: str) -> None:
        with self.output.open("ab") as file:
            self._processes.append(
                subprocess.Popen(
                    [*_HEARS_HANGUPS, *self._host, sys.executable, "-m", "pipeline.cli", "up", *arguments],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._environment,
                    start_new_session=True,
                )
            )  # fmt: skip

    def start_worker(self, role: Role, name: str, *, host: Sequence[str] | None = None) -> subprocess.Popen[bytes]:
        """Start a worker by hand, as a person may, on the fleet's host or on another."""
        command = [*(self._host if host is None else host), sys.executable, "-P", "-m", "workers", str(role)]
        command += ["--run-dir", str(self.run_dir), "--name", name]
        with (self.folder / f"{name}.out").open("ab") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        self._guests.append(process)
        return process

    def command(self, *arguments: str, timeout_s: float = _COMMAND_S) -> Any:
        """Run a ``headrace`` command with ``--json``; return its output, or None if it failed."""
        try:
            done = subprocess.run(
                [*self._host, sys.executable, "-m", "pipeline.cli", *arguments, "--json"],
                cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
            self.last_words = done.stderr[-_WORDS_CHARS:].strip()
            return json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            self.last_words = f"no answer within {timeout_s:g} s"
        except json.JSONDecodeError:
            pass
        return None

    def prepared(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python program on the fleet's host, with pipes for input and output."""
        return subprocess.Popen(
            [*self._host, sys.executable, "-c", program, *arguments],
            cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
        """Signal a process, if it is still one of the run's."""
        if not self._is_ours(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _is_ours(self, pid: int) -> bool:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return str(self.folder).encode() in line

    def kill_everything(self) -> list[tuple[str, int]]:
        """SIGKILL supervisors, workers and the server, as a power cut does; return the workers."""
        for process in (*self._processes, *self._guests):
            if process.poll() is None:
                process.kill()
        killed = [(worker, pid) for pid, worker in self._all_pids().items() if self.kill(pid)]
        if (pid := self.server_pid()) is not None:
            self.kill(pid)
        for process in (*self._processes, *self._guests):
            process.wait()
        return killed

    def close(self) -> None:
        """Leave nothing running."""
        for pid in self._all_pids():
            self.kill(pid, signal.SIGCONT)
        self.kill_everything()
        if self._client is not None:
            self._client.close()

    def _all_pids(self) -> dict[int, str]:
        """Return every worker's process of this run, by command lines, so that those without a heartbeat count."""
        self.beats()
        found = dict(self._pids)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"workers" in words and str(self.run_dir).encode() in words and b"--name" in words:
                found[int(path.parent.name)] = words[words.index(b"--name") + 1].decode()
        return found

    # -- inspection -----------------------------------------------------------------------------------

    def ledger(self, *command: str | bytes) -> Any:
        """Ask the ledger's server; None if it does not answer."""
        try:
            if self._client is None:
                address = read_address(self.run_dir)
                if address is None:
                    return None
                self._client = redis.Redis.from_url(
                    address.url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S, retry=Retry(NoBackoff(), 0)
                )
            return self._client.execute_command(*command)
        except (redis.RedisError, ConfigError, OSError):
            return None

    def server_pid(self) -> int | None:
        """Return the ledger server's process id, from its own report or from its start."""
        info = self.ledger("INFO", "server")
        if isinstance(info, dict):
            return int(info["process_id"])
        address = read_address(self.run_dir)
        return address.pid if address else None

    def beats(self) -> dict[str, Heartbeat]:
        """Return the last heartbeats by worker; empty if the ledger is down."""
        blobs = self.ledger("HVALS", keys.heartbeats(RUN)) or []
        found: dict[str, Heartbeat] = {}
        for blob in blobs:
            # the drill itself writes junk
            with contextlib.suppress(ValueError, RecursionError):
                beat = msgspec.json.decode(blob, type=Heartbeat)
                found[beat.who.worker] = beat
        self._pids.update({beat.pid: worker for worker, beat in found.items()})
        return found

    def workers(self, role: Role) -> list[Heartbeat]:
        """Return the workers of a role whose process exists, by name."""
        beats = (beat for _, beat in sorted(self.beats().items()))
        return [beat for beat in beats if beat.who.role is role and self._is_ours(beat.pid)]

    def updates(self) -> list[UpdateRow]:
        """Return the updates in the learner's history."""
        return [row for row in self._history.read() if isinstance(row, UpdateRow)]

    def checkpoints(self) -> list[str]:
        """Return the names of the learner's complete checkpoints, in the order of writing."""
        folder = self.run_dir / "checkpoints"
        return sorted(path.name for path in folder.glob("[0-9]*")) if folder.is_dir() else []

    def is_over(self) -> bool:
        return self.supervisor.poll() is not None

    def remove(self) -> None:
        """Remove the folder, and what a killed run left outside it."""
        clear_leftovers(self.run_dir)
        shutil.rmtree(self.folder, ignore_errors=True)


def until(condition: Any, timeout_s: float, *, poll_s: float = 0.02) -> Any:
    """Return the condition's first true value, or its last false one at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return value


def each_turn(seconds: float, poll_s: float = 0.02) -> Iterator[None]:
    """Yield every ``poll_s`` seconds, for ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(poll_s)
