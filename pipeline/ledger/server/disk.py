"""Whether the ledger's disk takes writes, in words for people."""

from __future__ import annotations

import shutil
from pathlib import Path

_LEAST_BYTES = 1 << 20
"""Free on a disk that takes writes."""


def disk_trouble(folder: Path | None, *, is_refused: bool) -> str:
    """Return which disk takes no writes, else "".

    Args:
        folder: The embedded server's; None for an external server, whose disk cannot be seen.
        is_refused: The server has refused a write because of its disk."""
    if folder is None or not folder.is_dir():
        return "the disk of the ledger's server takes no writes" if is_refused else ""
    room = shutil.disk_usage(folder)
    if not is_refused and room.free >= _LEAST_BYTES:
        return ""
    size, free = room.total / 2**20, room.free / 2**20
    return f"the ledger's disk takes no writes: {folder} has {free:,.1f} MB free of {size:,.0f} MB"
