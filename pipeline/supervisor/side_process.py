"""One helper process of a run's supervisor that is no worker, such as a sink's or a copy's.

Its standard input is a pipe that closes when the supervisor dies, which is the process's sign to
end. Its output goes to ``logs/NAME.out``. A process that failed may start again after a pause that
doubles with each failure. It never stops the run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0


class SideProcess:
    def __init__(self, run_dir: Path, name: str) -> None:
        self.output = f"logs/{name}.out"
        """Relative to the run's folder."""
        self._run_dir, self._mark = run_dir, worker_mark(run_dir, name)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_failed = 0
        self.next_s = 0.0
        """The earliest time of the next start, on the caller's clock."""

    @property
    def is_held(self) -> bool:
        """Whether a process was started whose end is not taken yet."""
        return self._process is not None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError."""
        with (self._run_dir / self.output).open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                env={**environment, WORKER_MARK: self._mark},
            )  # fmt: skip

    def take_end(self) -> int | None:
        """Return the exit code of a process that has ended, once; None while it runs or without
        one."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self.kill()
        return code

    def close_input(self, last_word: bytes = b"") -> None:
        stdin = None if self._process is None else self._process.stdin
        if stdin is not None and not stdin.closed:
            # OSError: the process has just died
            with suppress(OSError):
                if last_word:
                    os.write(stdin.fileno(), last_word)
                stdin.close()

    def kill(self) -> None:
        """Kill it, and what it has started. Returns once it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            end_marked(WORKER_MARK, self._mark)

    def failed(self, now: float) -> None:
        """Set the pause before the next start."""
        self.next_s = now + min(FIRST_PAUSE_S * 2.0**self._num_failed, LONGEST_PAUSE_S)
        self._num_failed += 1

    def worked(self) -> None:
        """Forget earlier failures, and their pause."""
        self._num_failed, self.next_s = 0, 0.0
