"""Why an embedded ledger server does not answer, from the run's folder and the process table; and how
workers' processes ended, from the supervisor's log.

The first is tried before any request to the ledger, whose connections and retries would take far longer.
It takes a second, or three if the server's process is alive and not stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.fleet.why.types import Cause, Chain, Ended, Outlook, Snapshot
from pipeline.ledger.address import LedgerAddress, read_address
from pipeline.ledger.server.lock import holders, is_locked
from pipeline.ledger.server.probe import ServerState, probe
from pipeline.process.records import identify

FIRST_S = 1.0
SECOND_S = 2.0
"""Seconds to wait for a server that may only be slow: at first, and once more."""


def silence(run_dir: Path, *, is_supervised: bool) -> str | None:
    """Return a clause that says why the run's embedded server does not answer. None if it answers, if the
    run has ended, or if the server is not embedded."""
    address = read_address(run_dir)
    if address is None or not address.is_embedded:
        return None
    socket, password = Path(address.socket), unquote(urlsplit(address.url).password or "")
    pid, waited_s = _process(run_dir, address), FIRST_S
    probed = probe(socket, password, timeout_s=FIRST_S)
    if probed.state is ServerState.SILENT and pid and not _is_stopped(pid):
        probed, waited_s = probe(socket, password, timeout_s=SECOND_S), FIRST_S + SECOND_S
    match probed.state:
        case ServerState.SERVES:
            return None
        case ServerState.LOADING:
            return f"its server (process {probed.pid}) is still reading its file, {probed.loaded_bytes >> 20} MB so far"
        case ServerState.STRANGE:
            return f"another program answers at {socket}: {probed.words}"
        case _ if pid:
            how = state_words(pid)
            return f"its server (process {pid}) is running but gave no answer within {waited_s:g} s{how}"
        case _ if is_locked(run_dir / "ledger"):
            return f"its server is being started or is ending: {probed.words}"
        case _:
            return f"its server has ended ({probed.words})" if is_supervised else None


def no_ledger_chain(s: Snapshot) -> Chain:
    """Explain a run whose ledger does not answer."""
    link = "everything waits for the ledger: " + (s.ledger_error or "it does not answer")
    if s.has_supervisor:
        doing = (
            "the supervisor restarts an embedded server that has ended within seconds, and replaces one that stays "
            "silent. A server of your own you restart yourself. Workers wait for ledger.outage_timeout_s"
        )
        return Chain((link,), Cause.LEDGER, "ledger", Outlook.MENDS, doing)
    return Chain((link,), Cause.LEDGER, "ledger", Outlook.YOU, f"start the server, then `headrace up --resume {s.run}`")


def whereabouts(run_dir: Path) -> str:
    """Describe the embedded server's process in a clause; empty if there is none."""
    address = read_address(run_dir)
    if address is None or not address.is_embedded:
        return ""
    pid = _process(run_dir, address)
    return f"; process {pid} is running{state_words(pid)}" if pid else ""


def state_words(pid: int) -> str:
    """Return a clause that says why a process may be silent, by its state."""
    if _is_stopped(pid):
        return f": it is stopped (SIGSTOP, or a debugger); `kill -CONT {pid}` lets it go on"
    return ": it waits for its disk" if _state(pid) == "D" else ": it hangs, or is slow"


def _process(run_dir: Path, address: LedgerAddress) -> int:
    """Return the server's process id; 0 if it has exited or cannot be identified."""
    if address.process is not None and identify(address.pid) == address.process:
        return address.pid
    return next(iter(holders(run_dir / "ledger")), 0)


def _is_stopped(pid: int) -> bool:
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The process name before the last bracket may contain any character.
    return status.rpartition(")")[2].split()[0]


COUNTED_S = 600.0
"""Exits within this many last seconds are counted."""
_TAIL_BYTES = 1 << 18
_OF_ONE_DEATH_S = 60.0
"""A replaced process exits within this time; replacement and exit then count as one."""


def read_exits(run_dir: Path, now_s: float) -> dict[str, Ended]:
    """Return the last exit of each worker that had one. ``now_s`` is in seconds since 1970."""
    path = run_dir / "logs" / "supervisor.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, Ended] = {}
    for line in lines:
        try:
            row = json.loads(line)
            worker, event, at = row["worker"], row["event"], datetime.fromisoformat(row["at"])
        # A line torn by the start of the tail or the end of the file, or a line without a worker.
        except (ValueError, RecursionError, KeyError, TypeError):
            continue
        ended = _ended(row, event, now_s - at.astimezone(UTC).timestamp())
        before = found.get(worker)
        if ended is None or (before and before.is_replaced and before.ago_s - ended.ago_s < _OF_ONE_DEATH_S):
            continue
        num_before = before.num if before is not None and before.ago_s < COUNTED_S else 0
        found[worker] = replace(ended, num=num_before + 1)
    return found


def _ended(row: dict[str, Any], event: str, ago_s: float) -> Ended | None:
    if event == "worker_replaced":
        return Ended(f"replaced, {row.get('reason', 'frozen or stuck')}", ago_s, is_replaced=True)
    if event != "worker_exited":
        return None
    error = str(row.get("error", ""))
    return Ended(f"it ended ({row.get('meaning', row.get('exit_code'))})", ago_s, error=error)
