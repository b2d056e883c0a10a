"""``workers.starter RUN [ROLE ...] DESCRIPTOR ROOM``: imports what a run's workers import, and forks
them.

RUN is the run's folder, or the file of a configuration that is still being checked. With roles,
only those roles' workers. The supervisor starts it (``pipeline.supervisor.starter``),
and it ends with the supervisor, while its workers continue. It has no thread, CUDA context or
connection when it forks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.config.load import load_config, read_resolved
from pipeline.process.forking import serve
from protocol import headrace
from protocol.ids import Role
from workers import __main__ as worker
from workers import standby
from workers.preparation import ROLES, import_all


def main() -> NoReturn:
    """Import, and fork workers until the supervisor has ended."""
    run, *roles, descriptor, _ = sys.argv[1:]
    given = tuple(map(Role, roles)) or tuple(ROLES)
    config = read_resolved(Path(run)) if Path(run).is_dir() else load_config([Path(run)])
    # frozen, too: forked workers share its memory
    import_all(config, given)
    if reason := unforkable():
        sys.exit(f"{reason}; each worker imports on its own")
    with socket.socket(fileno=int(descriptor)) as channel:
        serve(channel, work)
    os._exit(0)


def work(arguments: Sequence[str]) -> NoReturn:
    """Run the worker or standby of a command line from ``headrace.command``."""
    skipped = len(headrace.command("workers"))
    module = arguments[skipped - 1]
    sys.argv[:] = [module, *arguments[skipped:]]
    main_of = standby.main if module == "workers.standby" else worker.main
    main_of()


def unforkable(devices: str = "/dev/nvidia") -> str | None:
    """Return why this process must not fork: it has a device file open, or threads."""
    files = (str(path.resolve()) for path in Path("/proc/self/fd").iterdir())
    if opened := [file for file in files if file.startswith(devices)]:
        return f"an import has opened {opened[0]}, and CUDA does not work in forked processes"
    tasks = Path("/proc/self/task")
    others = [(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())]
    if others:
        return f"the imports have started {len(others)} threads ({', '.join(others[:4])}), which a forked process would lack"
    return None


if __name__ == "__main__":
    main()
