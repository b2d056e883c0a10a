"""The launcher of a worker with several ranks: torch's elastic agent, on this host only.

It starts the ranks as processes with the same command line and torch's usual environment (RANK,
WORLD_SIZE), waits for them, and exits with one code and a reported reason. When a rank dies, the
agent ends the others.

The launcher's process is the worker to the outside: the supervisor starts, watches, signals and
reaps it, and rank 0's heartbeats carry its process id. SIGTERM and SIGINT are passed on to rank 0,
which drains and then lets the others end. When the launcher dies, for whatever reason, the kernel
ends its ranks.

Rendezvous goes through files in a folder that only this user can read; torch's own would listen on
every interface."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import WORKER_PID, record_end, worker_pid
from protocol import headrace
from protocol.endpoints import run_tag
from protocol.errors import ConfigError
from protocol.ids import Role

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RANK_DIR = "HEADRACE_RANK_DIR"
"""Environment variable: the folder through which the ranks of one worker meet."""
GROUP_FILE = "group"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

_LEAD_FILE = "lead.pid"
_SHUTDOWN_S = 10
"""Seconds between the death of one rank and killing the others."""
_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.5


def num_ranks(role: Role, run_dir: Path) -> int:
    """Return 1 if the configuration cannot be read, which rank 0 will report."""
    from pipeline.config.load import read_resolved

    try:
        config = read_resolved(run_dir)
    except ConfigError:
        return 1
    return config.learner.ranks if role is Role.LEARNER else config.value.ranks


def launch_worker(role: Role, run_dir: Path, worker: str, ranks: int) -> int:
    code = int(ExitCode.FAILURE)
    command = headrace.command("workers", str(role), "--run-dir", str(run_dir), "--name", worker)
    try:
        code = launch(command, ranks, name=worker, folder_prefix=f"{run_tag(run_dir)}-ranks-")
    finally:
        record_end(run_dir, worker, code)
    return code


def launch(command: Sequence[str], num_ranks: int, *, name: str, folder_prefix: str = "headrace-ranks-") -> int:
    """Run ``command`` as ``num_ranks`` ranks until all have ended; return the worker's exit code.

    Each rank calls :func:`enter_rank` first. They meet in a temporary folder whose name begins with
    ``folder_prefix``."""
    with headrace.importing():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = Path(tempfile.mkdtemp(prefix=folder_prefix))
    os.environ |= {
        RANK_DIR: str(folder),
        WORKER_PID: str(os.getpid()),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_S),
    }
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=name,
        role=name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        # the supervisor restarts all of them from their checkpoint
        max_restarts=0,
        signals_to_handle="SIGHUP",
    )
    (folder / "rendezvous").touch(mode=0o600)
    passed_on: set[int] = set()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        passed_on.add(number)
        _pass_on(folder, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        lead = error.failures.get(0)
        # it finished its work and died of a passed-on signal
        if lead is not None and -lead.exitcode in passed_on:
            _die_of(-lead.exitcode, folder)
        return _tell(name, num_ranks, error.failures)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExitCode.OK


def is_rank() -> bool:
    return RANK_DIR in os.environ


def enter_rank() -> int:
    """Tie this process to its launcher, and return its rank."""
    _die_with(worker_pid())
    rank = int(os.environ["RANK"])
    if rank == 0:
        path = Path(os.environ[RANK_DIR]) / _LEAD_FILE
        path.with_suffix(".partial").write_text(str(os.getpid()), encoding="ascii")
        path.with_suffix(".partial").rename(path)
    return rank


def _die_with(launcher: int) -> None:
    """End when the launcher does: an orphaned rank would hold locks that its successor needs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(ExitCode.ENGINE)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_S)
        os._exit(ExitCode.ENGINE)

    if sys.platform != "linux":
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _pass_on(folder: Path, number: int) -> None:
    """Signal rank 0. A rank 0 that has not started yet holds nothing, and ends with the launcher."""
    try:
        lead = int((folder / _LEAD_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        _die_of(number, folder)
    else:
        with suppress(ProcessLookupError):
            os.kill(lead, number)


def _die_of(number: int, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _tell(name: str, num_ranks: int, failures: Mapping[int, ProcessFailure]) -> int:
    """Report, as the last line of output, which rank brought the others down; return the exit code."""
    rank, failure = min(failures.items(), key=lambda item: _precedence(item[1].exitcode))
    code = failure.exitcode
    if code < 0:
        how, code = f"was killed by {signal.Signals(-code).name}", ExitCode.ENGINE
    else:
        how = f"ended with exit code {code}"
    sys.stderr.write(
        f"{name}: rank {rank} of {num_ranks} (pid {failure.pid}) {how}, and the other ranks were ended with it\n"
    )
    return int(code)


def _precedence(exit_code: int) -> tuple[bool, bool]:
    """Sort the cause first: ranks that lost another exit with ENGINE, the rest die of SIGTERM."""
    return exit_code == -signal.SIGTERM, exit_code == ExitCode.ENGINE
