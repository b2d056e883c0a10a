"""``workers.starter RUN_DIR DESCRIPTOR ROOM``: imports what a run's workers import, and forks them.

The supervisor starts it (``pipeline.supervisor.starter``), and it ends with the supervisor. Its
workers go on. It owns no thread, no CUDA context and no connection when it forks."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.process.forking import serve
from protocol import headrace
from workers import __main__ as worker

_ROLES = (
    "workers.generator.generator",
    "workers.learner.learner",
    "workers.scorers.reference",
    "workers.scorers.reward",
    "workers.scorers.value",
)


def imports(config: RunConfig) -> Iterator[str]:
    """Yield the modules that the workers of a configuration import, but for vLLM's."""
    yield from _ROLES
    if config.generation.engine == "local":
        yield "workers.engines.generation.local.build"
    if config.learner.backend == "torch":
        yield "workers.engines.training.torch"
    if config.needs_reference and config.reference.backend == "torch":
        yield "workers.engines.scoring.torch"
    if config.declaration.has_critic and config.value.backend == "torch":
        yield "workers.engines.value.torch"
    if config.reward.model is not None:
        yield "workers.engines.scoring.reward_model"


def main() -> NoReturn:
    """Import, and fork workers until the supervisor has ended."""
    run_dir, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    for module in imports(read_resolved(run_dir)):
        importlib.import_module(module)
    if reason := unforkable():
        sys.exit(f"{reason}; workers import for themselves")
    gc.collect()
    # Imported modules are no garbage: left alone, their memory stays shared.
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, _work)
    os._exit(0)


def _work(arguments: Sequence[str]) -> NoReturn:
    """Run the worker of a command line that ``headrace.command`` made."""
    skipped = len(headrace.command("workers"))
    sys.argv[:] = ["workers", *arguments[skipped:]]
    worker.main()


def unforkable(devices: str = "/dev/nvidia") -> str | None:
    """Return why this process must not be forked: it holds a device's file open, or has threads."""
    files = (str(path.resolve()) for path in Path("/proc/self/fd").iterdir())
    if opened := [file for file in files if file.startswith(devices)]:
        return f"an import has opened {opened[0]}, and CUDA does not work in forked processes"
    if (num_threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"the imports have started {num_threads - 1} threads, which a forked process has not"
    return None


if __name__ == "__main__":
    main()
