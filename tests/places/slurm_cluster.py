"""A Slurm cluster of one host, by the programs of Slurm themselves, on loopback.

It needs slurmctld, slurmd, Slurm's commands and munged, and runs as the user that starts it."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
_LIMIT_S = 60.0


def missing() -> list[str]:
    """Return the programs that this host lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Run a cluster in a folder; yield its configuration, for ``SLURM_CONF``."""
    key, munge = folder / "key", folder / "munge"
    munge.mkdir(mode=0o700)
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    config.write_text(_config(folder, munge / "socket"))
    with ExitStack() as running:
        files = {
            "key": key,
            "socket": munge / "socket",
            "pid": munge / "pid",
            "log": munge / "log",
            "seed": munge / "seed",
        }
        names = {"pid": "pid-file", "key": "key-file", "log": "log-file", "seed": "seed-file"}
        options = [f"--{names.get(name, name)}={path}" for name, path in files.items()]
        running.enter_context(_program(["munged", "--foreground", "--force", *options], folder / "munged.out", {}))
        _until((munge / "socket").exists, folder)
        environment = {"SLURM_CONF": str(config)}
        for program in ("slurmctld", "slurmd"):
            running.enter_context(_program([program, "-D"], folder / f"{program}.out", environment))
        _until(lambda: says(["sinfo", "--noheader", "--format=%T"], environment) == "idle", folder)
        yield config


@contextmanager
def _program(words: Sequence[str], output: Path, environment: dict[str, str]) -> Iterator[None]:
    with output.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=os.environ | environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def says(words: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Return what a program of Slurm prints."""
    answer = subprocess.run(
        words, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=20, check=False
    )
    return answer.stdout.strip()


def _until(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        outputs = {path.name: path.read_text()[-1000:] for path in folder.glob("*.out")}
        assert time.monotonic() < deadline, outputs
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _config(folder: Path, munge: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, node = _free_ports(2)
    user = getpass.getuser()
    return "\n".join(
        (
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            f"SlurmdPort={node}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge}",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder / 'spool'}",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder / 'slurmd.pid'}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=2",
            "MailProg=/bin/true",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",
            "KillWait=5",
            "MinJobAge=60",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
            f"NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN",
            f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP",
            "",
        )
    )
