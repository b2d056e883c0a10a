"""``python -P -m workers ROLE --run DIR``: one worker process.

The supervisor starts workers. An operator may also start generators, reward and reference workers
by hand for a running fleet, without configuring them. Such a worker leaves when its run ends or on
SIGTERM, and the supervisor does not restart it.

A run has one learner and one value worker, started by the supervisor. If they compute on several
ranks, this process launches the ranks and represents them (``workers.engines.training.ranks``)."""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.worker_process import run_actor
from protocol.headrace import importing
from protocol.ids import Role

_CLASSES = {
    Role.GENERATOR: ("workers.generator.generator", "Generator"),
    Role.ENVIRONMENT: ("workers.scorers.environment", "Environment"),
    Role.REWARD: ("workers.scorers.reward", "Reward"),
    Role.REFERENCE: ("workers.scorers.reference", "Reference"),
    Role.VALUE: ("workers.scorers.value", "Value"),
    Role.LEARNER: ("workers.learner.learner", "Learner"),
    Role.OBSERVER: ("workers.observer.observer", "Observer"),
}

_RANKED = frozenset({Role.LEARNER, Role.VALUE})
_ALONE = _RANKED | {Role.OBSERVER}


def work(arguments: list[str] | None = None, prepared: PreparedParts | None = None) -> int:
    """Run one worker until it drains; return its exit code (``pipeline.process.exit_codes``).

    ``prepared`` holds the parts that this process made as a standby."""
    parser = argparse.ArgumentParser(
        prog="python -P -m workers",
        description="Run one worker of a run.",
        epilog="example: python -P -m workers generator --run runs/demo",
    )
    parser.add_argument("role", choices=[str(role) for role in _CLASSES])
    parser.add_argument(
        "--run", "--run-dir", dest="run_dir", type=Path, required=True, help="folder that `headrace up` made"
    )
    parser.add_argument("--name", help="unique in the run; a worker of the same name is fenced. Default: ROLE-HOST-PID")
    options = parser.parse_args(arguments)
    role = Role(options.role)
    module, name = _CLASSES[role]
    worker = options.name or f"{role}-{socket.gethostname().partition('.')[0][:20]}-{os.getpid()}"
    if role in _ALONE and worker != role:
        parser.error(
            f"a run has one {role}, which its supervisor starts; generators, reward and reference workers may join"
        )

    def load() -> type:
        with importing():
            return getattr(importlib.import_module(module), name)

    if role in _RANKED:
        from workers.engines.training.ranks.launch import enter_rank, is_rank, launch_worker, num_ranks

        if is_rank():
            rank = enter_rank()
            with importing():
                from workers.engines.training.ranks.build import follower

            if rank:
                return follower(role, options.run_dir, rank)
        elif (wanted := num_ranks(role, options.run_dir)) > 1:
            return launch_worker(role, options.run_dir, worker, wanted)
    return run_actor(load, options.run_dir, worker, prepared)


def main() -> NoReturn:
    """Run one worker, and end the process with its exit code. Everything is closed by then. Tearing
    down the interpreter and torch would take seconds, more on a busy host, and is skipped."""
    finish(work())


def finish(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
