"""The claim that a run leaves nothing behind but its folder, however it ends. Real processes; only
the models are emulated."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.process.descendants import marked
from pipeline.weights.store import weight_folders
from protocol.endpoints import run_tag
from tests.integration.fleet import EMULATED, ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="looks through /proc and /dev/shm"),
]

MARK = "HEADRACE_TEST_OF"
# also in tests that run under nohup
HEARS_HANGUPS = ("/usr/bin/env", "--default-signal=HUP")
SETTINGS = (
    *EMULATED,
    "engines.settings.step_s=0.1",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=2",
    "algorithm.dynamic_sampling=false",
    "checkpoint.every_updates=1",
    "fleet.generator=1",
    "fleet.reward=1",
    "data.verifier=tests.integration.helper_verifier:judge",
)


class Run:
    """One run, in a folder whose path is too long for sockets, with a temporary
    folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / ("long-" * 20) / "test"
        self.name = str(uuid.uuid4())
        self.temporary = Path(tempfile.mkdtemp(prefix="hr-"))
        self.output = folder / "output.txt"
        self.environment = os.environ | {
            MARK: self.name,
            "TMPDIR": str(self.temporary),
            # of the account, not of a run
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.data = folder / "train.jsonl"
        rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "id": str(number)} for number in range(200)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.supervisor: subprocess.Popen[bytes] | None = None

    def up(self, num_updates: int, *, terminal: int | None = None) -> subprocess.Popen[bytes]:
        settings = (
            *SETTINGS,
            f"run.dir={self.run_dir.parent}",
            f"run.name={self.run_dir.name}",
            f"run.num_updates={num_updates}",
            f"data.train=['{self.data}']",
            "data.evaluation=[]",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        command = [*HEARS_HANGUPS, sys.executable, "-m", "pipeline.cli", "up", "configs/demo.toml", *words]
        with self.output.open("wb") as output:
            where = output.fileno() if terminal is None else terminal
            # a session's first terminal becomes its own when it opens it
            if terminal is not None:
                command = [sys.executable, "-c", _TAKE_TERMINAL, *command]
            self.supervisor = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdin=where, stdout=where, stderr=where, start_new_session=True
            )
        return self.supervisor

    def headrace(self, *words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *words, str(self.run_dir), "--json"],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = "\n".join(self.processes().values()) if time.monotonic() > deadline else ""
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.output.read_text()[-4000:]}\n{left}"
            time.sleep(0.05)

    def until_in_full_swing(self) -> None:
        history = self.run_dir / "history.jsonl"
        self.until(lambda: history.exists() and '"update"' in history.read_text(), "the first update")
        assert self.left(), "the test sees what there is to see"

    def processes(self) -> dict[int, str]:
        """Return the command of every process that was started under this run, in any way."""
        found: dict[int, str] = {}
        for pid in marked(MARK, self.name):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def left(self) -> list[str]:
        """Return the leftovers of the run besides the files in its folder."""
        found = [f"process {pid}: {command[-160:]}" for pid, command in self.processes().items()]
        found += [f"weights: {folder}" for folder in weight_folders(self.run_dir) if folder.exists()]
        found += [f"shared memory: {path}" for path in Path("/dev/shm").glob(f"*{run_tag(self.run_dir)}*")]
        found += [f"temporary: {path}" for path in self.temporary.rglob("*")]
        found += [f"socket: {path}" for path in self.run_dir.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        found += [f"open: {line}" for line in sockets if str(self.run_dir) in line or str(self.temporary) in line]
        inodes = {str(path.lstat().st_ino): path for path in self.run_dir.rglob("*")}
        for line in Path("/proc/locks").read_text().splitlines():
            inode = next((word.rpartition(":")[2] for word in line.split() if word.count(":") == 2), "")
            if inode in inodes:
                found.append(f"locked: {inodes[inode]}: {line}")
        found += [f"on record: {path}" for path in self.run_dir.glob("processes/*.json") if ".life" not in path.name]
        return found

    def readable_by_others(self) -> list[Path]:
        return [path for path in (self.run_dir, *self.run_dir.rglob("*")) if path.lstat().st_mode & 0o077]

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.supervisor is not None:
            self.supervisor.wait(90)
        for folder in (self.temporary, *weight_folders(self.run_dir)):
            shutil.rmtree(folder, ignore_errors=True)


_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    # the umask of most accounts
    before = os.umask(0o022)
    made = Run(tmp_path)
    try:
        yield made
    finally:
        os.umask(before)
        made.close()


def finish(run: Run) -> int:
    return run.up(2).wait(90)


def down(run: Run) -> int:
    process = run.up(100_000)
    run.until_in_full_swing()
    assert run.headrace("down")["was_running"] is True
    return process.wait(90)


def down_now(run: Run) -> int:
    process = run.up(100_000)
    run.until_in_full_swing()
    assert run.headrace("down", "--now")["was_running"] is True
    return process.wait(90)


def signals(*numbers: signal.Signals) -> Callable[[Run], int]:
    def end(run: Run) -> int:
        process = run.up(100_000)
        run.until_in_full_swing()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        return process.wait(90)

    return end


def closed_terminal(run: Run) -> int:
    """With the live view on it, which goes on writing."""
    ours, its = os.openpty()

    is_closing = threading.Event()

    def read() -> None:
        while not is_closing.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 65536)

    process = run.up(100_000, terminal=its)
    os.close(its)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    run.until_in_full_swing()
    is_closing.set()
    reader.join(30)
    os.close(ours)
    return process.wait(90)


def killed(*what: str) -> Callable[[Run], int]:
    """``kill -9`` of the supervisor, the workers, or all at once, the ledger's server among them;
    then ``down``."""

    def end(run: Run) -> int:
        process = run.up(100_000)
        run.until_in_full_swing()
        marks = {"workers": "headrace.py workers", "server": "server.conf"}
        for pid, command in run.processes().items():
            if pid == process.pid or any(marks[name] in command for name in what if name in marks):
                os.kill(pid, signal.SIGKILL)
        process.wait(90)
        assert run.headrace("down", *(["--now"] if "now" in what else []))["was_running"] is True
        assert run.headrace("down")["was_running"] is False
        return 0

    return end


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(finish, 0, id="finished"),
        pytest.param(down, 0, id="down", marks=pytest.mark.long),
        pytest.param(down_now, 130, id="down-now"),
        pytest.param(signals(signal.SIGINT), 0, id="sigint", marks=pytest.mark.long),
        pytest.param(signals(signal.SIGINT, signal.SIGINT), 130, id="sigint-twice"),
        pytest.param(signals(signal.SIGTERM), 0, id="sigterm"),
        pytest.param(signals(signal.SIGHUP, signal.SIGHUP), 0, id="sighup", marks=pytest.mark.long),
        pytest.param(closed_terminal, 0, id="closed-terminal"),
        pytest.param(killed("supervisor"), 0, id="killed-supervisor"),
        pytest.param(killed("supervisor", "now"), 0, id="killed-supervisor-now", marks=pytest.mark.long),
        pytest.param(killed("supervisor", "workers"), 0, id="killed-supervisor-and-workers", marks=pytest.mark.long),
        pytest.param(killed("supervisor", "workers", "server"), 0, id="killed-all"),
    ],
)
def test_nothing_is_left_of_a_run_but_its_folder_which_is_its_owners_alone(
    run: Run, end: Callable[[Run], int], code: int
) -> None:
    assert end(run) == code, run.output.read_text()[-4000:]
    run.until(lambda: not run.processes(), "the end of every process")
    assert run.left() == []
    assert run.readable_by_others() == []
    assert run.headrace("ledger", "audit")["balances"] is True
    assert run.left() == [], "a look leaves nothing behind either"
