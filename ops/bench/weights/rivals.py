"""Other ways for weights to travel: memcpy, a file's copy, gloo's broadcast."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

_PATIENCE = timedelta(seconds=120)


class Memcpy:
    """One copy within a process, into pages that exist already."""

    def __init__(self, source: np.ndarray) -> None:
        self._source = source
        self._target = np.ones_like(source)

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


class FileCopy:
    """A file copied beside itself, as by a program that hands weights over in files."""

    def __init__(self, source: np.ndarray, folder: Path) -> None:
        own = f"rival-{os.getpid()}"
        self._source, self._target = folder / f"{own}.source", folder / f"{own}.target"
        source.tofile(self._source)

    def __call__(self) -> None:
        """Copy, into a new file."""
        self._target.unlink(missing_ok=True)
        shutil.copyfile(self._source, self._target)

    def close(self) -> None:
        self._source.unlink()
        self._target.unlink(missing_ok=True)


class Broadcast:
    """gloo over loopback, to one other process."""

    def __init__(self, source: np.ndarray, folder: Path) -> None:
        """Send ``source``; the two processes find each other by a file in ``folder``."""
        meeting = folder / "rival.gloo"
        meeting.unlink(missing_ok=True)
        self._process = subprocess.Popen([sys.executable, "-m", __name__, str(meeting), str(source.size)])
        _join(meeting, 0)
        self._tensor = torch.from_numpy(source)

    def __call__(self) -> None:
        """Send; return when the other process has all of it."""
        dist.broadcast(torch.ones(1), 0)
        dist.broadcast(self._tensor, 0)
        dist.barrier()

    def close(self) -> None:
        dist.broadcast(torch.zeros(1), 0)
        dist.destroy_process_group()
        self._process.wait(30)


def _join(meeting: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=_PATIENCE)


def main() -> None:
    _join(Path(sys.argv[1]), 1)
    target, go = torch.empty(int(sys.argv[2]), dtype=torch.uint8), torch.ones(1)
    while True:
        dist.broadcast(go, 0)
        if not go.item():
            break
        dist.broadcast(target, 0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
