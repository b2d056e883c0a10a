"""A supervised run with fake workers; also as a process of its own, for tests that kill it.

python -m tests.pipeline.supervisor.supervised FOLDER [OVERRIDE ...] [--scripts ROLE=WORD ...]"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from pipeline.fleet.status import RunSnapshot
from pipeline.preflight.checks import preflight
from pipeline.supervisor.run_folder import prepare_run_dir
from pipeline.supervisor.supervisor import RunOutcome, Supervisor
from protocol.ids import Role
from tests.pipeline.op_config import op_config

LIMIT_S = 80.0
"""Of a whole run, on a machine that others use, too."""


def fake_starter(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker_starter", str(run_dir)]


class Run:
    """One supervised run whose workers follow scripts."""

    def __init__(self, folder: Path, *overrides: str, resume: bool = False, **scripts: str) -> None:
        self.config = op_config(folder, *overrides)
        self.run_dir = prepare_run_dir(self.config, resume=resume)
        self.scripts = scripts
        self.snapshots: list[RunSnapshot] = []
        self.react: Callable[[RunSnapshot], None] = lambda _: None
        self.leave: Callable[[], None] | None = None
        self.supervisor = Supervisor(self.config, self.run_dir, preflight(self.config).spec, command=self._command)

    def _command(self, role: Role, run_dir: Path, name: str) -> list[str]:
        script = self.scripts.get(str(role), "live")
        command = [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker", str(role)]
        return [*command, "--run-dir", str(run_dir), "--name", name, "--script", script]

    def _watch(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)
        self.react(snapshot)

    def until_end(self) -> RunOutcome:
        """Supervise the run. Workers are forked, as those of a real run: each that imports for
        itself costs half a processor second."""

        async def bounded() -> RunOutcome:
            async with asyncio.timeout(LIMIT_S):
                return await self.supervisor.run(self._watch, watch_every_s=0.1, leave=self.leave)

        self.supervisor._is_forking = self.config.supervisor.preload
        with patch("pipeline.supervisor.supervisor.starter_command", fake_starter):
            return asyncio.run(bounded())

    def interrupt(self, _: RunSnapshot) -> None:
        """Ctrl-C, once."""
        self.react = lambda _: None
        os.kill(os.getpid(), signal.SIGINT)

    def when_live(self, act: Callable[[RunSnapshot], None], num_workers: int = 3) -> None:
        """Act once, when so many workers have heartbeats."""
        done: list[bool] = []

        def react(snapshot: RunSnapshot) -> None:
            if len(snapshot.workers) >= num_workers and not done:
                done.append(True)
                act(snapshot)

        self.react = react


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--scripts", nargs="*", default=[])
    options = parser.parse_args()
    scripts = dict(word.split("=") for word in options.scripts)
    return int(Run(options.folder, *options.overrides, **scripts).until_end().exit_code)


if __name__ == "__main__":
    sys.exit(main())
