"""Removes what a run leaves outside its records: published weights, snapshots, flow records,
sockets, temporary folders."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pipeline.runtime.flow_ring import flow_folder
from pipeline.training.snapshots import snapshots_folder, value_snapshots_folder
from pipeline.weights.store import weight_folders
from protocol.endpoints import run_tag, socket_folders


def remains(run_dir: Path) -> list[Path]:
    """Return a run's folders that are worthless once its processes have ended."""
    temporary = Path(tempfile.gettempdir()).glob(f"{run_tag(run_dir)}*")
    snapshots = (snapshots_folder(run_dir), value_snapshots_folder(run_dir))
    memory = (*weight_folders(run_dir), flow_folder(run_dir), *snapshots)
    candidates = {*memory, *socket_folders(run_dir), *temporary}
    return sorted(folder for folder in candidates if folder.is_dir() and not folder.is_symlink())


def clear_leftovers(run_dir: Path) -> int:
    found = remains(run_dir)
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return len(found)
