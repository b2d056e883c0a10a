"""A small ``/dev/shm`` for one fleet, in a mount namespace; all other files are this machine's."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.drill.fleet import ROOT

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a fleet's own, in its own mounts
_LIFE_S = 1800
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class SmallMemory:
    """The namespace, which exists as long as its process."""

    pid: int
    num_bytes: int

    @property
    def folder(self) -> Path:
        """Its ``/dev/shm``, as this machine's other processes see it."""
        return Path(f"/proc/{self.pid}/root{_MEMORY}")

    def on(self) -> list[str]:
        """Return the command prefix that runs a command there."""
        return ["nsenter", "-t", str(self.pid), "-m", f"--wdns={ROOT}"]


@contextmanager
def small_memory(num_bytes: int) -> Iterator[SmallMemory | None]:
    """Make a small memory; yields None if that is not permitted."""
    mount = f"mount -t tmpfs -o size={num_bytes},mode=1777 tmpfs {_MEMORY} && echo && exec sleep {_LIFE_S}"
    try:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", mount],  # noqa: S607
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        yield None
        return
    assert process.stdout is not None
    with process:
        try:
            said = select.select([process.stdout], [], [], _START_S)[0] and os.read(process.stdout.fileno(), 1)
            yield SmallMemory(process.pid, num_bytes) if said else None
        finally:
            process.kill()


def fill(folder: Path) -> Path:
    """Write a file that takes all the room; return it."""
    ballast = folder / ".ballast"
    deadline = time.monotonic() + _START_S
    with ballast.open("wb", buffering=0) as file:
        try:
            while time.monotonic() < deadline:
                file.write(bytes(os.sysconf("SC_PAGE_SIZE")))
        except OSError:
            pass
    return ballast
