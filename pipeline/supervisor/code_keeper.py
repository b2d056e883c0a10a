"""Brings versions of code to the run's workers, and rolls back one that fails.

The supervisor's loop calls it twice a second, with heartbeats; ``rollout`` has the decisions. It
reads the changes of the run's settings and the learner's history. The host's fleet reports bad ends
of workers. It drains workers, which are started again, rolls changes back, and marks a version that
has proved good. A worker that starts for any reason goes by the version that then holds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from pipeline.config.changing import coded_roles
from pipeline.config.code import CODE_KEYS, WORKERS
from pipeline.config.schema import RunConfig
from pipeline.files.code_copies import checked_code
from pipeline.files.shared_code import differing, shared_digests
from pipeline.observability.history import HISTORY_NAME, HistoryTail, RefusedRow, UpdateRow
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import Heartbeat, Registry, WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange, standing, undoing
from pipeline.supervisor.host_fleet import HostFleet, meaning
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.rollout import CodedMember, Rollout, RolloutPolicy, RolloutState, UpdateGlance
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import ConfigError

_BY: Final = "supervisor"
_NOT_READY: Final = frozenset({WaitingFor.STARTING, WaitingFor.DRAINING, WaitingFor.STOPPED})
_BY_CHANCE: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM})
"""Ends from outside: the version is blamed only while its first worker tries it."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _HeldVersion:
    """The version of one setting that holds."""

    change: SettingsChange
    value: str
    rollout: Rollout
    old_pids: dict[str, int]
    """Processes that were there before it."""


class CodeKeeper:
    """The supervisor's part in versions of code."""

    def __init__(self, config: RunConfig, run_dir: Path, fleet: HostFleet, settings: SettingsKeeper) -> None:
        code = config.code
        self._limits = RolloutPolicy(
            canary_pieces=code.canary_pieces,
            canary_timeout_s=code.canary_timeout_s,
            judged_updates=code.judged_updates,
            lazy_limit_s=code.lazy_limit_s,
            replace_timeout_s=config.supervisor.start_timeout_s + config.supervisor.drain_ceiling_s,
        )
        self._fleet, self._settings = fleet, settings
        self._run_dir, self._history_path = run_dir, run_dir / HISTORY_NAME
        self._history: HistoryTail | None = None
        """Read while a version is on its way."""
        self._number = 0
        """The last change that was read."""
        self._changes: Sequence[SettingsChange] = ()
        self._versions: dict[str, _HeldVersion] = {}
        fleet.blames_code = self._is_to_blame

    async def begin(self, version: str) -> None:
        """Start workers by the version of Headrace's packages that holds at this start of the run.
        Raises ConfigError: it is not there, was changed, or has other shared code than we."""
        if not version:
            return
        folder = await asyncio.to_thread(checked_code, self._run_dir, version)
        if (place := differing(shared_digests(), await asyncio.to_thread(shared_digests, folder))) is not None:
            raise ConfigError(
                f"the run's workers go by version {version} of their code, which has other code in {place} than this "
                "Headrace; all processes share that. Resume by the installed code: --set 'code.workers=\"\"'"
            )
        self._fleet.go_by(folder)

    async def look(self, registry: Registry, beats: Sequence[Heartbeat], now: float) -> None:
        """Bring the versions that hold one step further. Raises LedgerUnavailable."""
        await self._read(registry, beats, now)
        on_the_way = [version for version in self._versions.values() if not self._is_done(version)]
        if not on_the_way:
            self._history = None
            return
        if self._history is None:
            self._history = HistoryTail(self._history_path)
        rows = await asyncio.to_thread(self._history.read)
        updates = [UpdateGlance(row.at_s, row.loss) for row in rows if isinstance(row, UpdateRow | RefusedRow)]
        for version in on_the_way:
            before, rollout = version.rollout.phase, version.rollout
            workers = self._workers(version, beats)
            for worker in rollout.look(now, time.time(), workers, updates):
                log.info("code_replaces_worker", worker=worker, setting=_key(version), version=version.value)
                self._fleet.carry_out(self._fleet.plan.renew(worker, now))
            if rollout.phase is not before:
                log.info("code_rollout", setting=_key(version), version=version.value, phase=str(rollout.phase))
            if rollout.phase is RolloutState.SETTLED:
                await self._settings.settle(registry, version.change.number)
            elif rollout.phase is RolloutState.FAILED:
                await self._roll_back(registry, version.change.number, rollout.failure)
                return

    # -- rollback ----------------------------------------------------------------------------------

    def newest(self, since_s: float) -> SettingsChange | None:
        """Return the newest change that stands, if it was made after ``since_s`` (wall clock)."""
        found = standing(self._changes)
        return found[-1] if found and found[-1].at_s >= since_s else None

    async def undo(self, registry: Registry, change: SettingsChange, why: str) -> bool:
        """Roll back a change; return whether it still stood."""
        return await self._roll_back(registry, change.number, why)

    async def _roll_back(self, registry: Registry, number: int, why: str) -> bool:
        changes = await registry.settings_changes()
        undone = [change for change in standing(changes) if change.number == number]
        if not undone:
            return False
        change = undoing(changes, undone, by=_BY, at_s=time.time(), reason=why)
        if not await registry.add_settings_change(change):
            # another change came first: the next look tries again
            return False
        log.error("code_rolled_back", number=undone[0].number, back_to=change.sets, reason=why)
        # before any worker starts again
        await self._settings.keep(registry, ())
        return True

    # -- signs -------------------------------------------------------------------------------------

    async def _read(self, registry: Registry, beats: Sequence[Heartbeat], now: float) -> None:
        last = await registry.last_settings_change()
        if last is None or last.number == self._number:
            return
        self._changes = await registry.settings_changes()
        self._number = self._changes[-1].number
        for key in CODE_KEYS:
            made = [change for change in self._changes if key in change.sets]
            known = self._versions.get(key)
            if not made or (known is not None and known.change.number == made[-1].number):
                continue
            change, value = made[-1], made[-1].sets[key].strip('"')
            rollout = Rollout(
                self._limits,
                now_s=now,
                made_s=change.at_s,
                is_lazy=change.is_lazy,
                is_way_back=bool(change.undoes),
            )
            by_pid = {beat.pid: beat.settings.code.get(key, "") for beat in beats}
            pids = self._fleet.processes.pids
            old = {worker: pid for worker, pid in pids.items() if by_pid.get(pid, "") != value}
            self._versions[key] = _HeldVersion(change, value, rollout, old)
            if key == WORKERS:
                await self._go_by(value, rollout)

    async def _go_by(self, value: str, rollout: Rollout) -> None:
        """Start workers by this version from now on. A damaged version is rolled back."""
        try:
            folder = await asyncio.to_thread(checked_code, self._run_dir, value) if value else None
        except ConfigError as error:
            rollout.refused(str(error))
            return
        self._fleet.go_by(folder)

    def _is_done(self, version: _HeldVersion) -> bool:
        # a failed one is rolled back until another change holds
        is_settled = self._settings.is_settled(version.change.number)
        return is_settled or version.rollout.phase is RolloutState.SETTLED

    def _workers(self, version: _HeldVersion, beats: Sequence[Heartbeat]) -> dict[str, CodedMember]:
        """Return the concerned workers of this host, in the order of their names. Those of the role
        with the most workers are last: the first to try a version is one of them."""
        key, pids = _key(version), self._fleet.processes.pids
        there = {beat.who.worker: beat for beat in beats if pids.get(beat.who.worker) == beat.pid}
        found: dict[str, CodedMember] = {}
        members = Counter(one.role for one in self._fleet.plan.workers)
        order = sorted(self._fleet.plan.workers, key=lambda one: (members[one.role], one.role, len(one.name), one.name))
        for worker in order:
            if worker.is_given_up or worker.role not in coded_roles(key):
                continue
            beat, pid = there.get(worker.name), pids.get(worker.name)
            if beat is None or is_silent(beat.silent_s) or beat.waiting_for in _NOT_READY:
                is_old = pid is not None and version.old_pids.get(worker.name) == pid
                found[worker.name] = CodedMember(is_new=not is_old)
            else:
                is_new = beat.settings.code.get(key, "") == version.value
                found[worker.name] = CodedMember(is_new, is_ready=True, progress=beat.progress)
        return found

    def _is_to_blame(self, exit_: Exit) -> bool:
        """Whether the version that a worker went by is to blame for its end; it then fails."""
        for version in self._versions.values():
            is_old = version.old_pids.get(exit_.worker) == exit_.pid
            if is_old or self._is_done(version) or exit_.role not in coded_roles(_key(version)):
                continue
            is_trying = version.rollout.phase is RolloutState.CANARY
            if (is_trying or exit_.code not in _BY_CHANCE) and version.rollout.ended(exit_.worker, _end(exit_)):
                return True
        return False


def _end(exit_: Exit) -> str:
    error = "" if exit_.error is None else f": {exit_.error}"
    return f"ended ({meaning(exit_.code)}){error}"


def _key(version: _HeldVersion) -> str:
    return next(key for key in CODE_KEYS if key in version.change.sets)
