"""A process that this supervisor did not start: watched, signalled and awaited without being its
parent.

*Consumes* the identity of a process. *Produces* signals to it and, when it has ended, its exit code
as it wrote it down itself. *Waits for* nothing but in ``wait``: its end is polled.

On Linux a descriptor of the process (pidfd) is held from the start, so that no signal can ever
reach a later process of the same number. Elsewhere the identity is checked again before each
signal.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from pipeline.process.records import ProcessIdentity, identify

_POLL_S = 0.01


class AdoptedProcess:
    """One process, as its adopter sees it; the face that ``subprocess.Popen`` has."""

    def __init__(self, identity: ProcessIdentity, read_exit_code: Callable[[], int | None]) -> None:
        """Hold on to a process.

        Args:
            identity: Which one.
            read_exit_code: Returns what the process wrote down of its end; None when it wrote
                nothing.

        Raises:
            ProcessLookupError: it has ended already.
        """
        self.pid = identity.pid
        self._identity = identity
        self._read_exit_code = read_exit_code
        self._code: int | None = None
        self._descriptor = _open_descriptor(identity.pid)
        # after the descriptor was opened: so it is of this very process
        if identify(identity.pid) != identity:
            self._close()
            raise ProcessLookupError(f"process {identity.pid} is not the one that was started {identity.started}")

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. One that ended without a word was
        killed.
        """
        if self._code is None and not self._runs():
            told = self._read_exit_code()
            self._code = -signal.SIGKILL if told is None else told
            self._close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self.poll() is not None:
            return
        with suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 10.0) -> int:
        """Return the exit code once it has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(_POLL_S)
        return code

    def _runs(self) -> bool:
        if self._descriptor is None:
            return identify(self.pid) == self._identity
        # not select(), which refuses descriptors from 1024 on
        looking = select.poll()
        looking.register(self._descriptor, select.POLLIN)
        return not looking.poll(0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except AttributeError:  # not Linux
        return None
