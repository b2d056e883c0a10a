"""A process that another one started, with the interface of ``subprocess.Popen``.

On Linux a descriptor of the process (pidfd) is held from the start: no signal reaches a later
process of the same number. Elsewhere the identity is checked before each signal. The process writes
its own exit code to a file, since only a parent gets it from the system."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from pipeline.process.records import ProcessIdentity, identify

_POLL_S = 0.01


class AdoptedProcess:
    """A process that is not this one's child."""

    def __init__(self, identity: ProcessIdentity, read_exit_code: Callable[[], int | None]) -> None:
        """Hold a process; ``read_exit_code`` returns the code that it wrote down, None without one.
        Raises ProcessLookupError: the process has ended."""
        self._hold(identity.pid, read_exit_code)
        self._identity = identity
        # The check follows the opening, so the descriptor is of this process.
        if identify(identity.pid) != identity:
            self._close()
            raise ProcessLookupError(f"process {identity.pid} is not the one started at {identity.started}")

    @classmethod
    def child(cls, pid: int, read_exit_code: Callable[[], int | None]) -> Self:
        """Hold a process (Linux). Its parent waits for it no earlier than in ``read_exit_code``."""
        process = cls.__new__(cls)
        process._hold(pid, read_exit_code)
        return process

    def _hold(self, pid: int, read_exit_code: Callable[[], int | None]) -> None:
        self.pid = pid
        self._read_exit_code = read_exit_code
        self._code: int | None = None
        self._descriptor = _open_descriptor(pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs. Without a written one: killed."""
        if self._code is None and not self._runs():
            written = self._read_exit_code()
            self._code = -signal.SIGKILL if written is None else written
            self._close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is not None:
            return
        with suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 10.0) -> int:
        """Return the exit code once the process has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(_POLL_S)
        return code

    def _runs(self) -> bool:
        if self._descriptor is None:
            return identify(self.pid) == self._identity
        # select() refuses descriptors from 1024 on.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    # Not Linux.
    except AttributeError:
        return None
