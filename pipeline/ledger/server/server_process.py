"""The process that serves a run's ledger: finding it, signalling it, and waiting until it is gone.

Two servers must never append to one file. The server itself holds its folder's lock
(``pipeline.ledger.server.lock``), and ``ledger.json`` records its process. While either shows a
server, none may be started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from pipeline.ledger.address import LedgerAddress, read_address
from pipeline.ledger.server.lock import holders, is_locked
from pipeline.process.records import identify, process_runs, this_host
from protocol.errors import LedgerUnavailable

POLL_S = 0.005


class ServerHandle:
    """A handle on the server of one run's folder, whichever command started it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.absolute()
        self.folder = self._run_dir / "ledger"
        self.configuration = self.folder / "server.conf"
        self.address: LedgerAddress | None = None
        """As it was last read or written."""
        self.started: subprocess.Popen[bytes] | None = None
        """The process, when it is a child of this one."""

    def known(self) -> LedgerAddress | None:
        """Return the address as written now: another command may have started the server."""
        address = read_address(self._run_dir)
        if address is not None and address.is_embedded:
            self.address = address
        return self.address

    def is_there(self) -> bool:
        """Whether its process lives or its lock is held: no other may be started then."""
        if self.started is not None:
            # reap it, or it stays a zombie
            self.started.poll()
        return is_locked(self.folder) or self.recorded() is not None

    def recorded(self) -> int | None:
        """Return the recorded server's process id while that very process lives."""
        address = self.known()
        if self.started is not None and self.started.poll() is None:
            return self.started.pid
        if address is None or address.pid <= 0:
            return None
        if address.process is not None:
            return address.pid if identify(address.pid) == address.process else None
        return address.pid if process_runs(address.pid) and self._is_its_program(address.pid) else None

    def signal(self, number: signal.Signals) -> list[int]:
        """Signal the server and its forks; return their ids. Raises LedgerUnavailable for another
        user's."""
        found = {pid for pid in holders(self.folder) if self._is_its_program(pid)}
        if (recorded := self.recorded()) is not None:
            found.add(recorded)
        for pid in found:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise LedgerUnavailable(
                    f"process {pid} serves {self.folder} and is another user's, so it cannot be ended here, and "
                    f"nothing was started. That user must run `headrace down {self._run_dir}`; or end it as root: "
                    f"kill {pid}"
                ) from error
        return sorted(found)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Return whether no such process is there, or comes to be gone within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.is_there():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """End every process that may write to the folder. Raises LedgerUnavailable if one stays."""
        pids = self.signal(number)
        if self.wait_until_gone(timeout_s):
            return
        here = ", ".join(map(str, pids))
        address = self.known()
        elsewhere = address.process.host if address and address.process and address.process.host != this_host() else ""
        if pids:
            what = f"process {here} was killed and has not ended, as a rule because of its disk; check that host's disk"
        elif elsewhere:
            what = f"its server was started on {elsewhere}: end it there, with `headrace down {self._run_dir}`"
        else:
            what = f"no visible process of ours holds it: find it with `fuser {self.folder / 'server.lock'}`"
        raise LedgerUnavailable(
            f"{self.folder} is held by a ledger server that does not answer. Nothing was started: {what}"
        )

    def _is_its_program(self, pid: int) -> bool:
        """Return whether a process runs with this folder's settings: ids are reused."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            # no /proc here, or the process has ended
            return False
        for word in words[1:]:
            with suppress(OSError, ValueError):
                if word.endswith(b".conf") and self.configuration.samefile(os.fsdecode(word)):
                    return True
        return False
