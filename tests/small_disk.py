"""A real disk without room, for tests of what a full one does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE_BYTES = 4096
_PAGES = 256


class SmallDisk:
    """A disk of 1 MiB, of which a test leaves some pages free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, num_pages: int) -> None:
        """Fill the disk up to so many free pages."""
        ballast = self.folder / "ballast"
        ballast.unlink(missing_ok=True)
        with ballast.open("wb", buffering=0) as file:
            try:
                for _ in range(_PAGES):
                    file.write(bytes(PAGE_BYTES))
            except OSError:
                pass
            file.truncate(max(0, file.tell() - num_pages * PAGE_BYTES))


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount a small disk at ``folder``; skip the test where this machine permits no mount."""
    folder.mkdir(mode=0o700)
    size = f"size={_PAGES * PAGE_BYTES},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, text=True, timeout=20
    )
    if done.returncode:
        pytest.skip(f"no small disk can be mounted: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
