"""How the processes of each worker ended, from the end of ``<run_dir>/logs/supervisor.jsonl``."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.observability.why.types import Ended

COUNTED_S = 600.0
"""Ends of this many last seconds are counted."""
_TAIL_BYTES = 1 << 18
_OF_ONE_DEATH_S = 60.0
"""A replaced process ends within this; replacement and end count as one."""


def read_exits(run_dir: Path, now_s: float) -> dict[str, Ended]:
    """Return the last end of each worker with an ended process; ``now_s`` is seconds since 1970."""
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
        # A line torn at either end of the tail, or a line without a worker.
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
