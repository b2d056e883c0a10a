"""Files that other processes append to, kept short by cutting off their beginning.

*Consumes* paths. *Produces* files of bounded length that say how much was cut. *Waits for* the disk. A process that opened its
file to append (every worker's output, the ledger server's log) goes on at the new end; a line that it writes in that very
instant may be lost.
"""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 8 << 20
KEPT_BYTES = 1 << 20


def cut(path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut a file longer than ``max_bytes`` down to its last whole lines within ``kept_bytes``; return whether it was.

    Raises OSError.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        tail = os.pread(file.fileno(), kept_bytes, size - kept_bytes)
        tail = tail[tail.find(b"\n") + 1 :]
        file.truncate(0)
        file.write(
            f"[the first {size - len(tail)} bytes were cut off here: at most {max_bytes} are kept]\n".encode() + tail
        )
    return True
