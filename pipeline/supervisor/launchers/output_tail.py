"""The last lines of a file."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 64 << 10
NUM_LINES = 20


def last_lines(path: Path) -> str:
    """Return a file's last 20 lines of at most 64 KiB; empty without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-NUM_LINES:])
