"""``python -P -m workers ROLE --run-dir DIR --name NAME``: one worker process.

The supervisor starts these; a person may start one by hand against a running fleet, which is how generators, reward and
reference workers join: no configuration names them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from pipeline.runtime.actor import run_actor
from protocol.ids import Role

_CLASSES = {
    Role.GENERATOR: ("workers.generator", "Generator"),
    Role.REWARD: ("workers.reward", "Reward"),
    Role.REFERENCE: ("workers.reference", "Reference"),
    Role.VALUE: ("workers.value", "Value"),
    Role.LEARNER: ("workers.learner", "Learner"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one worker until it drains, and return its exit code (``pipeline.runtime.exit_codes``)."""
    parser = argparse.ArgumentParser(
        prog="python -P -m workers",
        description="Run one worker of a run.",
        epilog="example: python -P -m workers generator --run-dir runs/demo --name generator-2",
    )
    parser.add_argument("role", choices=[str(role) for role in _CLASSES])
    parser.add_argument("--run-dir", type=Path, required=True, help="folder that `headrace up` made")
    parser.add_argument("--name", required=True, help="unique in the run, for example generator-2")
    options = parser.parse_args(arguments)
    module, name = _CLASSES[Role(options.role)]

    def load() -> type:
        return getattr(importlib.import_module(module), name)

    return run_actor(load, options.run_dir, options.name)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking the interpreter and torch apart takes seconds, on a busy host many
