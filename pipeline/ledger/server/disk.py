"""Describes a ledger disk that does not accept writes."""

from __future__ import annotations

import shutil
from pathlib import Path

_LEAST_BYTES = 1 << 20
"""A disk with less free space counts as full."""


def disk_trouble(folder: Path | None, *, is_refused: bool) -> str:
    """Return a sentence about the disk that does not accept writes, or "".

    Args:
        folder: The embedded server's; None for an external server, whose disk is not visible.
        is_refused: Whether the server has refused a write because of its disk."""
    if folder is None or not folder.is_dir():
        return "the disk of the ledger's server does not accept writes" if is_refused else ""
    room = shutil.disk_usage(folder)
    if not is_refused and room.free >= _LEAST_BYTES:
        return ""
    size, free = room.total / 2**20, room.free / 2**20
    return f"the ledger's disk does not accept writes: {folder} has {free:,.1f} MB free of {size:,.0f} MB"
