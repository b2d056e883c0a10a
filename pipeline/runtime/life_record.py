"""A worker's own record of its life (``pipeline.process.records``), written as it goes on."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pipeline.process.last_error import LastError, last_error
from pipeline.process.records import Life, identify, worker_pid, write_life


class LifeRecord:
    """This process's own record. A refused write is ignored: a later supervisor then knows less."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self._run_dir = run_dir
        self._worker = worker
        self._identity = identify(worker_pid())
        self._epoch = 0

    def registered(self, epoch: int) -> None:
        """Record the incarnation ``epoch``."""
        self._epoch = epoch
        self._write(None, None, 0)

    def ended(self, code: int, error: BaseException | None, delivered: int = 0) -> None:
        """Record the exit code, the error if one ended it, and the finished pieces of work."""
        self._write(code, None if error is None else last_error(error), delivered)

    def _write(self, exit_code: int | None, error: LastError | None, delivered: int) -> None:
        if self._identity is not None:
            with contextlib.suppress(OSError):
                life = Life(self._identity, self._epoch, exit_code, error, delivered)
                write_life(self._run_dir, self._worker, life)
