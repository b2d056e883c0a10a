"""Observations of a live run that no file keeps: its server processes, and the workers that the supervisor
replaces or that end badly.

A thread polls the process table and the end of the supervisor's log ten times a second. A ledger server is
known by its working folder, the run's ledger, and not by its command line. A child that rewrites the file for
its parent does not count."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from ops.drill.events import Event, Lost, Serving

_TURN_S = 0.1
_LOSSES = frozenset(
    (
        "worker_replaced",
        "worker_exited",
        "worker_evicted",
        "worker_given_up",
        "worker_killed",
        "fenced_process_ended",
        "unmanaged_worker_fenced",
    )
)
"""The supervisor's events about workers that are lost, or that it ends."""


class Witness:
    """Watches one run from its start to its end."""

    def __init__(self, run_dir: Path) -> None:
        self._ledger = run_dir / "ledger"
        self._log = run_dir / "logs" / "supervisor.jsonl"
        self._read = 0
        self._torn = b""
        self._servers: frozenset[int] = frozenset()
        self._events: list[Event] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)
        self._thread.start()

    def close(self) -> list[Event]:
        """Stop watching; return the observed events."""
        self._stopped.set()
        self._thread.join()
        self._poll()
        return self._events

    def _watch(self) -> None:
        while not self._stopped.wait(_TURN_S):
            self._poll()

    def _poll(self) -> None:
        servers = servers_of(self._ledger)
        if servers != self._servers:
            self._servers = servers
            self._events.append(Serving(tuple(sorted(servers))))
        for line in self._new_lines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if (how := row.get("event")) in _LOSSES:
                reason = row.get("reason") or row.get("meaning") or row.get("action")
                self._events.append(Lost(row["worker"], how, str(reason), time.monotonic()))

    def _new_lines(self) -> list[bytes]:
        try:
            # a new file
            if self._log.stat().st_size < self._read:
                self._read, self._torn = 0, b""
            with self._log.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        self._read += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        return lines


def servers_of(folder: Path) -> frozenset[int]:
    """Return the processes that work in a ledger's folder, without children of such a process."""
    found: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if Path(f"/proc/{entry.name}/cwd").readlink() != folder:
                continue
            status = Path(f"/proc/{entry.name}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            # the process has ended, or is another user's
            continue
        state, parent = status.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            found[int(entry.name)] = int(parent)
    return frozenset(pid for pid, parent in found.items() if parent not in found)
