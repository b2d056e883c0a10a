"""A change of a running run's settings, and a worker's answer to it.

Changes are numbered from 1 and never removed. The last one applies until the next. A rollback is a change
too: it restores the values from before the changes that it undoes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SettingsChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change. Keys are ``section.key``, values are TOML."""

    number: int
    sets: dict[str, str]
    """The changed settings with their new values."""
    former: dict[str, str]
    """Their values before this change."""
    holds: dict[str, str]
    """All settings changed by this and earlier changes, with their values from now on."""
    by: str
    """An operator's user and host, or ``supervisor``."""
    at_s: float
    """Seconds since 1970, by the clock of the host that made it."""
    reason: str = ""
    undoes: int = 0
    """Number of the first change that this one rolls back; 0 if none."""
    is_lazy: bool = False
    """Whether workers apply it, a version of code, when they restart anyway."""
    is_settled: bool = False
    """Only in the run's folder: whether this version of code has proved good."""
    undone: tuple[int, ...] = ()
    """Numbers of all changes that this one rolls back. Empty in a rollback by an earlier release, which rolls
    back ``undoes`` and all after it."""

    def rolls_back(self, number: int) -> bool:
        """Return whether this rolls back the change with that number."""
        if self.undone:
            return number in self.undone
        return 0 < self.undoes <= number < self.number

    @property
    def is_code(self) -> bool:
        return any(key.startswith("code.") for key in self.sets)


class SettingsTaken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's report about changes, in its heartbeat."""

    number: int = 0
    """The last change that it has applied; 0 if none."""
    first_update: int = 0
    """For the learner: the first update that it made, or will make, with the change."""
    failed: int = 0
    """Number of the first change that the worker gave up because its first work failed; the learner continues
    with the former values. Stays until the change is rolled back."""
    failed_to: int = 0
    """Number of the last change that failed with it; 0 if it failed alone."""
    why: str = ""
    """Why it failed, at most ``contract.MAX_DETAIL_CHARS``."""
    code: dict[str, str] = {}
    """Versions of code that this process runs, by setting (``pipeline.config.operations``)."""


def after(
    last: SettingsChange | None,
    sets: dict[str, str],
    former: dict[str, str],
    *,
    by: str,
    at_s: float,
    reason: str = "",
    undone: Sequence[int] = (),
    is_lazy: bool = False,
) -> SettingsChange:
    """Return the change that follows ``last``. ``undone`` are the numbers of changes that it rolls back."""
    holds = {**(last.holds if last else {}), **sets}
    number = last.number + 1 if last else 1
    return SettingsChange(
        number=number, sets=sets, former=former, holds=holds, by=by, at_s=at_s, reason=reason,
        undoes=min(undone, default=0), undone=tuple(undone), is_lazy=is_lazy,
    )  # fmt: skip


def standing(changes: Sequence[SettingsChange]) -> list[SettingsChange]:
    """Return the changes in effect, in order: neither rolled back nor rollbacks themselves."""
    found: list[SettingsChange] = []
    for change in changes:
        if change.undoes:
            found = [earlier for earlier in found if not change.rolls_back(earlier.number)]
        else:
            found.append(change)
    return found


def without(changes: Sequence[SettingsChange], undone: Sequence[SettingsChange]) -> dict[str, str]:
    """Return what the settings of ``undone`` would be without these changes: as set by the other changes in
    effect, otherwise as before all changes. ``changes`` are all changes of the run."""
    gone = {change.number for change in undone}
    start = {key: value for change in reversed(changes) for key, value in change.former.items()}
    held = {
        key: value for change in standing(changes) if change.number not in gone for key, value in change.sets.items()
    }
    return {key: held.get(key, start[key]) for change in undone for key in change.sets}


def undoing(
    changes: Sequence[SettingsChange], undone: Sequence[SettingsChange], *, by: str, at_s: float, reason: str = ""
) -> SettingsChange:
    """Return the change that follows all ``changes`` of a run and rolls back ``undone``. All others stay in
    effect, including later ones."""
    sets = without(changes, undone)
    former = {key: changes[-1].holds[key] for key in sets}
    numbers = [change.number for change in undone]
    return after(changes[-1], sets, former, by=by, at_s=at_s, reason=reason, undone=numbers)
