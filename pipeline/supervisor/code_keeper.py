"""Rolls out versions of code to the run's workers, and rolls back one that fails.

The supervisor's loop calls it twice a second with heartbeats; ``rollout`` makes the decisions. It
reads the changes of the run's settings and the learner's history, and is told when workers fail or
hang. It drains workers so that they restart with the new version, rolls changes back, and marks a
version that has proved good. A worker that starts for any other reason runs the version in force.

If a rollback leads to a damaged version, workers go further back: to the newest intact version that
a change has set, else to the installed code."""

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

from pipeline.config.changing import coded_roles, takers
from pipeline.config.operations import CODE_KEYS, WORKERS
from pipeline.config.schema import RunConfig
from pipeline.files.code_copies import CODE_FOLDER, checked_code, differing, remove_code, shared_digests
from pipeline.fleet.state import Worker
from pipeline.observability.history import HISTORY_NAME, HistoryTail, RefusedRow, UpdateRow
from pipeline.process.work import LEAST_S
from pipeline.runtime.registry.contract import Registry, WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange, after, standing, undoing
from pipeline.runtime.registry.waits import EndedBy
from pipeline.supervisor.host_fleet import HostFleet, meaning
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.rollout import CodedMember, Rollout, RolloutState, UpdateSample
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import ConfigError
from protocol.ids import Role

_BY: Final = "supervisor"
_BY_CHANCE: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM})
"""Kills from outside; the version is blamed for one only on its canary."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _HeldVersion:
    key: str
    change: SettingsChange
    value: str
    rollout: Rollout
    old_pids: dict[str, int]
    """Process ids that were running before it, by worker."""


class CodeKeeper:
    def __init__(self, config: RunConfig, run_dir: Path, fleet: HostFleet, settings: SettingsKeeper) -> None:
        self._config = config
        self._started_by = [version for version in (config.code.rewards, config.code.workers) if version]
        self._fleet, self._settings = fleet, settings
        self._run_dir, self._history_path = run_dir, run_dir / HISTORY_NAME
        self._history: HistoryTail | None = None
        """Only read while a rollout is in progress."""
        self._number = 0
        """The last change read."""
        self._tidied = 0
        """The last change after which old versions were removed."""
        self._changes: Sequence[SettingsChange] = ()
        self._versions: dict[str, _HeldVersion] = {}
        fleet.blames_code = self._is_to_blame

    async def begin(self, version: str) -> None:
        """Start workers with the version of Headrace in force when this run starts.

        Raises ConfigError: it is missing, was changed, or differs from this process in code that
        all processes share."""
        if not version:
            return
        folder = await asyncio.to_thread(checked_code, self._run_dir, version, starts=WORKERS)
        if (place := differing(shared_digests(), await asyncio.to_thread(shared_digests, folder))) is not None:
            raise ConfigError(
                f"the run's workers use version {version} of their code, which differs from this Headrace in {place}; "
                "all processes of a run must share that. Resume with the installed code: --set 'code.workers=\"\"'"
            )
        self._fleet.go_by(folder)

    async def poll(self, registry: Registry, beats: Sequence[Worker], now: float, *, is_paused: bool = False) -> None:
        """Advance the rollouts in progress. ``is_paused``: whether an operator has paused the run.
        Raises LedgerUnavailable."""
        await self._read(registry, beats, now)
        on_the_way = [version for version in self._versions.values() if not self._is_done(version)]
        if not on_the_way:
            self._history = None
            await self._tidy()
            return
        if self._history is None:
            self._history = HistoryTail(self._history_path)
        rows = await asyncio.to_thread(self._history.read)
        updates = [UpdateSample(row.at_s, row.loss) for row in rows if isinstance(row, UpdateRow | RefusedRow)]
        is_held_up = is_paused or self._is_held_up(beats)
        for version in on_the_way:
            before, rollout = version.rollout.phase, version.rollout
            workers = self._workers(version, beats, now)
            for worker in rollout.evaluate(now, time.time(), workers, updates, is_held_up=is_held_up):
                why = f"{version.key} is now {version.value or 'that of the start'}"
                self._fleet.executor.act(self._fleet.plan.renew(worker, now, why))
            if rollout.phase is not before:
                log.info("code_rollout", setting=version.key, version=version.value, phase=str(rollout.phase))
            if rollout.phase is RolloutState.SETTLED:
                await self._settings.settle(registry, version.change.number)
            elif rollout.phase is RolloutState.FAILED and await self.undo(registry, version.change, rollout.failure):
                # the version now in force may change the other rollouts
                await self._read(registry, beats, now)
                return

    async def _tidy(self) -> None:
        if self._tidied < self._number:
            self._tidied = self._number
            await asyncio.to_thread(tidy, self._run_dir, self._changes, self._started_by)

    # -- rollback ----------------------------------------------------------------------------------

    def newest(self, since_s: float, role: Role) -> SettingsChange | None:
        """Return the newest change in force that concerns a role, if made after ``since_s`` (wall
        clock)."""
        found = [change for change in standing(self._changes) if role in takers(change.sets)]
        return found[-1] if found and found[-1].at_s >= since_s else None

    async def undo(self, registry: Registry, change: SettingsChange, why: str) -> bool:
        """Roll back a change. Returns False if it is no longer in force or another change came
        first."""
        changes = await registry.settings_changes()
        undone = [one for one in standing(changes) if one.number == change.number]
        if not undone:
            return False
        back = undoing(changes, undone, by=_BY, at_s=time.time(), reason=why)
        if not await registry.add_settings_change(back):
            # another change came first; the next poll tries again
            return False
        log.error("code_rolled_back", number=change.number, back_to=back.sets, reason=why)
        # before any worker starts again
        await self._settings.apply_changes(registry, ())
        return True

    async def _go_further_back(self, registry: Registry, back: SettingsChange, key: str, why: str) -> bool:
        """Add a change to the newest intact version, since the rollback's target is damaged.
        Returns whether it was added."""
        version = await asyncio.to_thread(whole_version, self._run_dir, self._changes, key)
        sets, former = {key: f'"{version}"'}, {key: back.sets[key]}
        change = after(self._changes[-1], sets, former, by=_BY, at_s=time.time(), reason=why, undone=back.undone)
        if not await registry.add_settings_change(change):
            return False
        log.error("code_goes_further_back", setting=key, damaged=version_of(back, key), back_to=sets[key], reason=why)
        await self._settings.apply_changes(registry, ())
        return True

    # -- signs -------------------------------------------------------------------------------------

    async def _read(self, registry: Registry, beats: Sequence[Worker], now: float) -> None:
        """Read new changes until every version in force can be run."""
        while (last := await registry.last_settings_change()) is not None and last.number != self._number:
            self._changes = await registry.settings_changes()
            for key in CODE_KEYS:
                # a rollback also names settings that it does not change
                made = [one for one in self._changes if key in one.sets and one.sets[key] != one.former.get(key)]
                known = self._versions.get(key)
                if not made or (known is not None and known.change.number == made[-1].number):
                    continue
                change, version = made[-1], version_of(made[-1], key)
                why = await asyncio.to_thread(damage, self._run_dir, version)
                if why and change.undoes:
                    if not await self._go_further_back(registry, change, key, why):
                        # another change came first; the next poll tries again
                        return
                    break
                self._hold(key, version, change, beats, now, why)
            else:
                self._number = self._changes[-1].number

    def _hold(
        self, key: str, version: str, change: SettingsChange, beats: Sequence[Worker], now: float, why: str
    ) -> None:
        """Begin the rollout of a version. ``why``: reason that no worker can run it, which rolls it
        back."""
        rollout = Rollout(
            self._config.code, restart_timeout_s=self._config.restart_timeout_s,
            standstill_s=self._config.supervisor.stuck_after_s or LEAST_S,
            now_s=now, made_s=change.at_s, is_lazy=change.is_lazy, is_way_back=bool(change.undoes),
        )  # fmt: skip
        by_pid = {beat.pid: beat.settings.code.get(key, "") for beat in beats}
        pids = self._fleet.processes.pids
        old = {worker: pid for worker, pid in pids.items() if by_pid.get(pid, "") != version}
        self._versions[key] = _HeldVersion(key, change, version, rollout, old)
        if why:
            rollout.refused(why)
        elif key == WORKERS:
            self._fleet.go_by(self._run_dir / CODE_FOLDER / version if version else None)

    def _is_done(self, version: _HeldVersion) -> bool:
        # a failed version counts until its rollback is in force
        is_settled = self._settings.is_settled(version.change.number)
        return is_settled or version.rollout.phase is RolloutState.SETTLED

    def _workers(self, version: _HeldVersion, beats: Sequence[Worker], now: float) -> dict[str, CodedMember]:
        """Return this host's workers that the version concerns, in the order of replacement.

        Workers of the largest role come last, and the canary is the last one."""
        plan, pids, there = self._fleet.plan, self._fleet.processes.pids, self._fleet.own(beats)
        found: dict[str, CodedMember] = {}
        members = Counter(one.role for one in plan.workers)
        order = sorted(plan.workers, key=lambda one: (members[one.role], one.role, len(one.name), one.name))
        for worker in order:
            if worker.is_given_up or worker.role not in coded_roles(version.key):
                continue
            beat, pid = there.get(worker.name), pids.get(worker.name)
            # a drain has its own limits, so it counts as alive
            sign: object = now if plan.is_draining(worker.name) else (pid, None if beat is None else _sign(beat))
            if beat is None or not _is_ready(beat):
                is_old = pid is not None and version.old_pids.get(worker.name) == pid
                found[worker.name] = CodedMember(is_new=not is_old, sign=sign)
            else:
                is_new = beat.settings.code.get(version.key, "") == version.value
                found[worker.name] = CodedMember(
                    is_new, is_ready=True, progress=beat.progress, held=beat.held, sign=sign
                )
        return found

    def _is_held_up(self, beats: Sequence[Worker]) -> bool:
        """Whether a worker is missing, or waits for something that code cannot be blamed for."""
        there = self._fleet.own(beats)
        wanted = [there.get(worker.name) for worker in self._fleet.plan.workers if not worker.is_given_up]
        return any(beat is None or not _is_ready(beat) or _is_excused(beat.waiting_for) for beat in wanted)

    def _is_to_blame(self, exit_: Exit, stood: str) -> bool:
        """Whether the version that a worker ran is to blame for its end; if so its rollout fails.
        ``stood``: how the worker hung, if it was killed for that."""
        for version in self._versions.values():
            is_old = version.old_pids.get(exit_.worker) == exit_.pid
            if is_old or self._is_done(version) or exit_.role not in coded_roles(version.key):
                continue
            is_trying = version.rollout.phase is RolloutState.CANARY
            is_by_chance = exit_.code in _BY_CHANCE and not is_trying
            why = f"was stuck: {stood}" if stood else _end(exit_)
            if not is_by_chance and version.rollout.ended(exit_.worker, why):
                return True
        return False


def _is_ready(beat: Worker) -> bool:
    return not beat.is_silent and beat.waiting_for.is_in_service


def _is_excused(at: WaitingFor) -> bool:
    """Return whether a wait cannot be the code's fault: it is of the outside, or of a first computation."""
    return at is WaitingFor.COMPILE or at.ended_by is EndedBy.OUTSIDE


def _sign(beat: Worker) -> object:
    """Return a value that changes with each sign of life of a starting process."""
    return (beat.progress, beat.work.steps, beat.begun, beat.waiting_for)


def _end(exit_: Exit) -> str:
    error = "" if exit_.error is None else f": {exit_.error}"
    return f"ended ({meaning(exit_.code)}){error}"


MAX_KEPT: Final = 16
"""Number of versions kept; each has at most 64 MiB."""
SPARED_S: Final = 3600.0
"""Versions copied more recently are never removed."""


def version_of(change: SettingsChange, key: str) -> str:
    """Return the version that a change sets; empty for the code of the run's start."""
    return change.sets[key].strip('"')


def damage(run_dir: Path, version: str) -> str:
    """Return why no worker can run a version; empty if it is intact."""
    try:
        if version:
            checked_code(run_dir, version)
    except ConfigError as error:
        return str(error)
    return ""


def whole_version(run_dir: Path, changes: Sequence[SettingsChange], key: str) -> str:
    """Return the newest intact version that a change in force has set; empty without one."""
    made = [version_of(change, key) for change in reversed(standing(changes)) if key in change.sets]
    return next((version for version in made if not damage(run_dir, version)), "")


def named_versions(changes: Sequence[SettingsChange]) -> list[str]:
    """Return the versions in force and those that changes in force name, newest first."""
    named = [changes[-1].holds] if changes else []
    for change in reversed(standing(changes)):
        named += [change.sets, change.former]
    found = [values[key].strip('"') for values in named for key in CODE_KEYS if key in values]
    return [version for version in dict.fromkeys(found) if version]


def tidy(run_dir: Path, changes: Sequence[SettingsChange], started_by: Sequence[str] = ()) -> None:
    """Remove versions that neither the run's start nor a recent change names. A failure is logged."""
    kept = [*started_by, *named_versions(changes)[:MAX_KEPT]]
    try:
        removed = remove_code(run_dir, kept, before_s=time.time() - SPARED_S)
    except OSError as error:
        log.warning("code_not_removed", reason=str(error))
        return
    if removed:
        log.info("code_removed", versions=removed, kept=kept)
