"""Reads a run's effective training time from its folder, incrementally.

The inputs are the learner's history, the supervisor's starts and repairs, and the fleet's history. Each
read takes only the new lines of the learner's history and keeps three numbers per row.

By device: a generator's or scorer's computing time counts in proportion to the written tokens that
entered an update; a learner's, in proportion to the trained tokens whose update was kept. It is divided
by all time for which workers were wanted, including restarts and waits. Tokens in flight at the end
count as unused.

Source: ByteRobust (arXiv 2509.16293) defines ETTR by the job's time; this one is by each worker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.fleet.repair.records import read_repair_sums
from pipeline.observability.effective_time import EffectiveTime, effective_time
from pipeline.observability.fleet_history import FleetRow, RoleUse, fleet_history, role_uses
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.observability.start_record import RunStart, read_starts, up_spans
from protocol.ids import Role


class EffectiveTimeReader:
    """Reader of one run. Blocks; any thread may use it, one at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        # a learner that resumed has taken back updates
        self._history = run_history(run_dir / HISTORY_NAME).tail(self._clear)
        self._clear()

    def read(self) -> EffectiveTime | None:
        """Return the ratios so far; None before a few updates. Damaged lines are skipped. Raises
        OSError."""
        for row in self._history:
            if isinstance(row, UpdateRow):
                self._at_s.append(row.at_s)
                self._num_response_tokens += row.num_response_tokens
                self._num_trained_tokens += row.num_trained_tokens
        fleet, _ = fleet_history(self._run_dir).read()
        starts, _ = read_starts(self._run_dir)
        lost_s = read_repair_sums(self._run_dir)
        return run_effective_time(
            self._at_s, starts, fleet, lost_s,
            num_response_tokens=self._num_response_tokens, num_trained_tokens=self._num_trained_tokens,
        )  # fmt: skip

    def _clear(self) -> None:
        self._at_s = list[float]()
        self._num_response_tokens = self._num_trained_tokens = 0


def run_effective_time(
    updates_at_s: Sequence[float],
    starts: Sequence[RunStart],
    fleet: Sequence[FleetRow],
    lost_s: Mapping[str, float],
    *,
    num_response_tokens: int,
    num_trained_tokens: int,
) -> EffectiveTime | None:
    """Return a run's ratios up to its last record; None before a few updates. ``lost_s`` is the time
    under repair, by part."""
    last_s = [*updates_at_s[-1:], *(row.at_s for row in fleet[-1:])]
    by_device = device_share(fleet, num_response_tokens=num_response_tokens, num_trained_tokens=num_trained_tokens)
    spans = up_spans(starts, max(last_s, default=0.0))
    return effective_time(updates_at_s, spans, by_device, lost_s)


_AT_WORK = (Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.VALUE, Role.LEARNER)


def device_share(fleet: Sequence[FleetRow], *, num_response_tokens: int, num_trained_tokens: int) -> float | None:
    """Return productive time over total time of the working roles, from 0 to 1; None if there was none.

    Args:
        fleet: How the fleet has spent its time so far.
        num_response_tokens: Response tokens in all updates that were kept.
        num_trained_tokens: How many of them carried loss."""
    uses = {use.role: use for use in role_uses(fleet) if use.role in _AT_WORK}
    all_workers = sum(use.workers for use in uses.values())
    if not all_workers:
        return None
    used = _share(num_response_tokens, uses.get(Role.GENERATOR))
    stands = _share(num_trained_tokens, uses.get(Role.LEARNER))
    productive = sum(
        use.workers * use.compute_share * (stands if role == Role.LEARNER else used) for role, use in uses.items()
    )
    return productive / all_workers


def _share(num_tokens: int, of: RoleUse | None) -> float:
    return min(1.0, num_tokens / of.num_tokens) if of is not None and of.num_tokens else 0.0
