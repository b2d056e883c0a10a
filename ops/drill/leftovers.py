"""What a run that has ended left on the machine: a process, shared memory, a socket, a held lock or a temporary
folder.

Files in the run's folder do not count: they are the run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ops.drill.fleet import MEMORY
from pipeline.ledger.address import read_address
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.runtime.flow_ring import flow_folder
from pipeline.training.snapshots import snapshots_folder, value_snapshots_folder
from pipeline.weights.store import fetched_folder, weights_folder


def leftovers(run_dir: Path, memory: Path = MEMORY) -> list[str]:
    """Return a run's leftovers, one line each. ``memory``: the run's ``/dev/shm``."""
    return [*_processes(run_dir), *_shared_memory(run_dir, memory), *_sockets(run_dir), *_locks(run_dir)]


def _processes(run_dir: Path) -> Iterator[str]:
    name = os.fsencode(run_dir)
    children = set(marked(WORKER_MARK, worker_mark(run_dir)))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if (name in words or pid in children) and pid != os.getpid():
            yield f"process {pid}: {words.replace(bytes(1), b' ').decode(errors='replace').strip()}"


def _shared_memory(run_dir: Path, memory: Path) -> Iterator[str]:
    weights = (weights_folder(run_dir, shared_memory=True), fetched_folder(run_dir, shared_memory=True))
    snapshots = (snapshots_folder(run_dir), value_snapshots_folder(run_dir))
    for folder in (*weights, flow_folder(run_dir), *snapshots):
        if folder.is_relative_to(MEMORY):
            folder = memory / folder.relative_to(MEMORY)
        if folder.exists() and not folder.is_relative_to(run_dir):
            yield f"shared memory {folder}: {sorted(path.name for path in folder.iterdir())}"


def _sockets(run_dir: Path) -> Iterator[str]:
    tag = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
    # the name that protocol.endpoints gives it
    folders = [Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{tag}"]
    address = read_address(run_dir)
    if address is not None and address.socket:
        folders.append(Path(address.socket).parent)
    for folder in folders:
        if not folder.is_relative_to(run_dir) and folder.exists():
            yield f"temporary folder {folder}: {sorted(path.name for path in folder.iterdir())}"
    for path in run_dir.rglob("*"):
        if path.is_socket():
            yield f"socket {path}"


def _locks(run_dir: Path) -> Iterator[str]:
    for path in run_dir.rglob("*lock"):
        if not path.is_file():
            continue
        with path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield f"held lock {path}"
