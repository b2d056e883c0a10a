"""Writes the changes of a run's settings to its folder, and rolls back one that failed.

*Consumes* the registry's changes, and heartbeats, which report failures. *Produces*
``settings-changes.json``, from which a resume and every view of the run read the settings in force,
and rollbacks. *Waits for* nothing: the supervisor's polls call it twice a second, and repeat a failed
write. Only this module writes that file; the command that made a change waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from pipeline.config import CHANGES_NAME
from pipeline.config.changed import changed_settings
from pipeline.config.changing import triers, value_of
from pipeline.config.schema import RunConfig
from pipeline.files import write_private
from pipeline.fleet.state import Worker
from pipeline.observability.settings_changes import read_changes
from pipeline.runtime.registry.contract import Registry
from pipeline.runtime.registry.settings_change import SettingsChange, after, standing, undoing

log = structlog.get_logger(__name__)

_BY = "supervisor"
_AT_RESUME = "given to `headrace up --resume`"


class SettingsKeeper:
    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config, self._path = config, run_dir / CHANGES_NAME
        self._number = 0
        """The last change in the file."""
        self._settled: frozenset[int] = frozenset()
        """Numbers of changes whose version of code has proved good."""
        self._told = 0
        """The last change in the log."""
        self._has_failed = False

    async def begin(self, registry: Registry) -> None:
        """Record as a change whatever this start sets differently from earlier changes, so that it
        applies to all workers. Raises OSError if the folder cannot be written to."""
        holds = await asyncio.to_thread(changed_settings, self._path.parent)
        known = await asyncio.to_thread(read_changes, self._path.parent)
        self._settled = frozenset(change.number for change in known if change.is_settled)
        last = await registry.last_settings_change()
        given = {key: value_of(self._config, key) for key in holds}
        sets = {key: value for key, value in given.items() if value != holds[key]}
        if last is not None and sets:
            former = {key: last.holds[key] for key in sets}
            change = after(last, sets, former, by=_BY, at_s=time.time(), reason=_AT_RESUME)
            if not await registry.add_settings_change(change):
                log.warning("settings_kept", why="an operator changed settings during the start", not_set=sets)
        await self._write(await registry.settings_changes())
        self._told = self._number

    async def apply_changes(self, registry: Registry, beats: Sequence[Worker]) -> None:
        """Write new changes to the folder, and roll back those that a worker reports as failed.
        ``beats``: heartbeats of the run's own workers, which alone are trusted."""
        await self._keep_file(registry)
        for beat in beats:
            if beat.settings.failed and not beat.is_silent:
                await self._roll_back(registry, beat)

    async def settle(self, registry: Registry, number: int) -> None:
        """Record that a version of code has proved good, for later supervisors and workers too."""
        self._settled |= {number}
        self._number = 0
        await self._keep_file(registry)

    def is_settled(self, number: int) -> bool:
        return number in self._settled

    async def _keep_file(self, registry: Registry) -> None:
        last = await registry.last_settings_change()
        if last is None or last.number == self._number:
            return
        changes = await registry.settings_changes()
        is_news = last.number > self._told
        try:
            await self._write(changes)
        except OSError as error:
            if not self._has_failed:
                log.error("settings_changes_not_written", reason=str(error), do="make room; it is tried again")
            self._has_failed = True
        else:
            self._has_failed = False
            self._told = last.number
            if is_news:
                log.info("settings_changed", number=last.number, sets=last.sets, by=last.by, reason=last.reason)

    async def _roll_back(self, registry: Registry, beat: Worker) -> None:
        """Roll back the changes that a worker reports as failed, if its role is one that tries
        them. Later changes stay: one of them may correct the failed one."""
        taken, changes = beat.settings, await registry.settings_changes()
        given_up = range(taken.failed, max(taken.failed, taken.failed_to) + 1)
        failed = [
            change for change in standing(changes) if change.number in given_up and beat.who.role in triers(change.sets)
        ]
        if not failed:
            return
        undone = undoing(changes, failed, by=beat.who.worker, at_s=time.time(), reason=taken.why)
        if await registry.add_settings_change(undone):
            log.error("settings_rolled_back", number=failed[0].number, back_to=undone.sets, reason=undone.reason)

    async def _write(self, changes: Sequence[SettingsChange]) -> None:
        if changes:
            told = [msgspec.structs.replace(one, is_settled=self.is_settled(one.number)) for one in changes]
            await asyncio.to_thread(write_private, self._path, msgspec.json.encode(told))
            self._number = changes[-1].number
