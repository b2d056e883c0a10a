"""Files and folders that only their owner may read: addresses with passwords, sockets, keys.

*Consumes* paths. *Produces* files of mode 0600 and folders of mode 0700. *Waits for* nothing.
"""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path


def keep_private() -> None:
    """Let this process and those that it starts make files for their owner alone, and leave no core file, which would hold
    passwords. Who must have one sets the limit for one process: ``prlimit --pid PID --core=unlimited``."""
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 in one step: a reader sees the old content or the new, never a part."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    partial.replace(path)


def is_private_folder(path: Path) -> bool:
    """Whether ``path`` is a folder, not a link to one, that belongs to us and that nobody else may enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
