"""This host: facts for ``headrace doctor`` and ``headrace init``, read within deadlines.

*Consumes* the operating system, installed packages, and answers of other processes. *Produces*
``HostFacts``. *Waits for* a process that imports torch, server programs that print their version, a
folder's file system, and a configured ledger server, each with a deadline. Nothing is changed."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import JoinBoard
from pipeline.ledger.server.binary import find_server, passed_over
from pipeline.ledger.server.embedded import external_url
from pipeline.ledger.url import hide_password
from pipeline.preflight.ask import run
from pipeline.preflight.memory_needs import Room, room_here
from pipeline.preflight.vllm import installed_builds, other_torch
from pipeline.runtime.machine import Machine, this_machine
from protocol.errors import ConfigError, HeadraceError

TORCH_S: Final = 90.0
"""Longest wait for the process that imports torch; a cold disk takes half a minute."""
_CLOCK_S: Final = 5.0
_DISK_S: Final = 10.0
_DRIVER: Final = Path("/proc/driver/nvidia/version")


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    """As the driver knows it: in a container, the host's."""
    command: str
    """Empty if it is not visible here."""
    memory_bytes: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    free_bytes: int
    processes: Sequence[GpuProcess] = ()
    """Those that hold memory; empty without the package nvidia-ml-py."""


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    cuda: str | None
    """The build's version of CUDA, such as ``12.8``; None for a CPU build."""
    threads: int
    """Threads of a process that does not set their number."""
    gpus: Sequence[Gpu] = ()
    trouble: str = ""
    """Its warning when it sees no GPU; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of this host. A text in place of a fact says why it is unknown."""

    python: tuple[int, ...]
    machine: Machine
    room: Room
    torch: TorchBuild | str
    driver: tuple[int, ...] | None
    """Version of NVIDIA's kernel driver; None without one."""
    omp_threads: str | None
    """``OMP_NUM_THREADS``, as it is set."""
    vllm: Mapping[str, str]
    """Version of each installed build."""
    vllm_trouble: str = ""
    """A sentence, if it was compiled for another torch."""
    server: str
    """The program of an embedded ledger, with its version."""
    older_servers: Sequence[str]
    open_files: tuple[int, int]
    """Soft and hard limit of a process."""
    most_tasks: int | None
    """Processes and threads that this user or container may have; None for no limit."""
    num_tasks: int
    """How many of these exist."""


def probe_host() -> HostFacts:
    """Return this host's facts, after at most ``TORCH_S`` and a few seconds."""
    machine = this_machine()
    try:
        server = find_server()
        chosen, older = str(server), passed_over(server.path)
    except ConfigError as error:
        chosen, older = f"none: {error}", []
    limit, there = tasks()
    return HostFacts(
        python=sys.version_info[:3],
        machine=machine,
        room=room_here(machine),
        torch=probe_torch(),
        driver=driver(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        vllm=(builds := installed_builds()),
        vllm_trouble=next(filter(None, map(other_torch, builds)), ""),
        server=chosen,
        older_servers=older,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        most_tasks=limit,
        num_tasks=there,
    )


def probe_torch(timeout_s: float = TORCH_S) -> TorchBuild | str:
    """Return the installed torch, or why it cannot be used, within ``timeout_s``."""
    try:
        answer = run("workers.engines.torch_build", timeout_s=timeout_s)
    except TimeoutError as error:
        return str(error)
    if answer.refusal is not None:
        return answer.refusal.splitlines()[-1]
    try:
        return msgspec.json.decode(answer.notes.splitlines()[-1], type=TorchBuild)
    except (msgspec.DecodeError, IndexError):
        return f"its check printed {answer.notes[-80:]!r}"


def driver(file: Path = _DRIVER) -> tuple[int, ...] | None:
    with suppress(OSError):
        if found := re.search(r"\s(\d{3,})\.(\d+)(?:\.(\d+))?\s", file.read_text(encoding="utf-8", errors="replace")):
            return tuple(int(part) for part in found.groups(default="0"))
    return None


def tasks(groups: Path = Path("/sys/fs/cgroup"), processes: Path = Path("/proc")) -> tuple[int | None, int]:
    """Return the limit on processes and threads (None for no limit) and their current number: the
    container's if its limit is lower, else this user's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    of_user = None if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        of_group = int((groups / "pids.max").read_text(encoding="ascii"))
        if of_user is None or of_group < of_user:
            return of_group, int((groups / "pids.current").read_text(encoding="ascii"))
    # the kernel exempts root from the limit of a user
    if of_user is None or os.getuid() == 0:
        return None, 0
    count, user = 0, os.getuid()
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += sum(1 for _ in (folder / "task").iterdir())
    return of_user, count


def free_ports(host: str, ports: Sequence[int], enough: int) -> int:
    """Return how many of these ports of an address are free, counted up to ``enough``."""
    free = 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        if free >= enough:
            break
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            free += 1
    return free


def clock_difference_s(url: str | None) -> float | str | None:
    """Return the ledger server's time minus this host's in seconds, or why it is unknown. None for
    an embedded server, which has this host's clock."""
    given = external_url(url, os.environ)
    return None if given is None else asyncio.run(_difference(given))


async def _difference(url: str) -> float | str:
    try:
        board = JoinBoard(connect(url, patience_s=_CLOCK_S), "doctor")
        try:
            async with asyncio.timeout(2 * _CLOCK_S):
                return await board.clock_difference_s()
        finally:
            await board.aclose()
    except TimeoutError:
        return f"{hide_password(url)} gave no answer within {2 * _CLOCK_S:g} s"
    except HeadraceError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a folder that exists or will be created."""

    folder: Path
    """The folder itself, or the nearest one above it that exists."""
    free_bytes: int
    is_writable: bool


def disk_of(folder: Path, timeout_s: float = _DISK_S) -> Disk | str:
    """Return the file system of a folder, or why it is unknown."""
    found: list[Disk] = []
    # a thread, since a network file system without an answer can block a call for ever
    looking = threading.Thread(target=lambda: found.append(_disk_of(folder)), daemon=True)
    looking.start()
    looking.join(timeout_s)
    return found[0] if found else f"the file system of {folder} gave no answer within {timeout_s:g} s"


def _disk_of(folder: Path) -> Disk:
    place = folder.absolute()
    there = next(parent for parent in (place, *place.parents) if parent.is_dir())
    return Disk(there, shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK))
