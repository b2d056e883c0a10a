"""Private files and folders (addresses with passwords, sockets, keys), and files of bounded length.

Files are of mode 0600 and folders of mode 0700. A bounded file is one that other processes append
to: its beginning is cut off, and the file says how much was cut.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

MAX_BYTES = 8 << 20
KEPT_BYTES = 1 << 20


def keep_private() -> None:
    """Let this process and those that it starts make files for their owner alone, and leave no core
    file, which would hold passwords. Who must have one sets the limit for one process:
    ``prlimit --pid PID --core=unlimited``."""
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 in one step: a reader sees the old content or the new, never a
    part.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    partial.replace(path)


def cut(path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut a file longer than ``max_bytes`` down to its last whole lines within ``kept_bytes``;
    return whether it was.

    A process that opened its file to append (every worker's output, the ledger server's log) goes
    on at the new end; a line that it writes in that very instant may be lost. Raises OSError.
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
