"""Two simple rules that the analysis must beat, on the same tables.

*Oldest silent heartbeat*: once no step was made for ten seconds, blame the worker whose progress or
whose last row is the oldest. *Longest queue*: at the same moment, blame the worker with the most
work in its mailbox. Each names three."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.flow.rows import FlowCause, FlowIncident, LinkRow, StateRow

_STALL_S = 10.0


class StallRule:
    """Notices that the worker with the highest version makes no step, and blames by a score."""

    def __init__(self, by: str) -> None:
        self._by = by
        self._rows: dict[str, StateRow] = {}
        self._moved: dict[str, float] = {}
        """Time of the last row with progress, by worker."""
        self._step_s: float | None = None
        self._version = 0.0
        self._is_over = False

    def tick(self, now_s: float, states: Sequence[StateRow], links: Sequence[LinkRow]) -> list[FlowIncident]:
        """Take rows in; return one incident in a stall."""
        del links
        for row in states:
            before = self._rows.get(row.worker)
            if before is None or row.done > before.done:
                self._moved[row.worker] = row.time_s
            self._rows[row.worker] = row
            if row.policy_version > self._version:
                self._version, self._step_s, self._is_over = row.policy_version, now_s, False
        if self._step_s is None or self._is_over or now_s - self._step_s < _STALL_S:
            return []
        self._is_over = True
        ranked = sorted(self._rows.values(), key=self._score, reverse=True)[:3]
        causes = tuple(FlowCause(row.worker, self._by, 0.5, (self._by,)) for row in ranked)
        return [FlowIncident(now_s, now_s, causes)]

    def _score(self, row: StateRow) -> tuple[float, str]:
        if self._by == "longest queue":
            return row.input_depth, row.worker
        return -self._moved[row.worker], row.worker
