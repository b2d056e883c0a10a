"""Private files (mode 0600) and folders (mode 0700), and files of bounded length.

Addresses with passwords, sockets and keys are private."""

from __future__ import annotations

import os
import resource
from pathlib import Path

MAX_BYTES = 8 << 20
KEPT_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
NUM_LINES = 20
"""Of a process's output, where its end is shown."""


def keep_private() -> None:
    """Make files of this process and its children private, and disable core files, which would hold
    passwords.

    ``prlimit --pid PID --core=unlimited`` enables a core file again."""
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def write_private(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file of mode 0600 atomically: a reader sees the old content or the new. ``sync``: so does one
    after a power cut."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(descriptor)
    partial.replace(path)


def cut(path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut a file above ``max_bytes`` to its last whole lines within ``kept_bytes``; return whether
    it was cut.

    A first line says how many bytes were removed. A process that appends to the file continues at
    the new end; a line written during the cut may be lost. Raises OSError."""
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
        head = f"[the first {size - len(tail)} bytes were cut off here: at most {max_bytes} are kept]\n"
        file.write(head.encode() + tail)
    return True


def tail(path: Path, begin: int = 0) -> str:
    """Return a file's text from byte ``begin`` on, at most its last 64 KiB; empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # a file that was cut may be shorter than `begin`
            file.seek(max(begin if begin <= size else 0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(path: Path) -> str:
    return "\n".join(tail(path).splitlines()[-NUM_LINES:])
