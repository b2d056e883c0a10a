"""A change of a running run's settings, and a worker's answer to it.

Changes are numbered from 1 and never removed. The last one holds until the next. A rollback is a
change too: it sets what held before the change that it undoes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SettingsChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change. Keys are ``section.key``, values are in TOML."""

    number: int
    sets: dict[str, str]
    """Its settings, with their new values."""
    former: dict[str, str]
    """The values before it, of the same keys."""
    holds: dict[str, str]
    """All settings that this change and earlier ones have set, with their values from now on."""
    by: str
    """An operator's user and host, or ``supervisor``."""
    at_s: float
    """Seconds since 1970, by the clock of the host that made it."""
    reason: str = ""
    undoes: int = 0
    """Number of the change that this one rolls back; 0 for none."""
    is_lazy: bool = False
    """Whether workers take it, a version of code, when they restart anyway."""
    is_settled: bool = False
    """In the run's folder alone: whether this version of code has proved good."""

    @property
    def is_code(self) -> bool:
        """Whether it sets a version of code."""
        return any(key.startswith("code.") for key in self.sets)


class SettingsTaken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's report of changes, in its heartbeat."""

    number: int = 0
    """The last change that the worker goes by; 0: none."""
    first_update: int = 0
    """The learner's: the first update that it made, or will make, with it."""
    failed: int = 0
    """Number of a change whose first update failed; the learner then goes on with what held
    before."""
    why: str = ""
    """Why it failed, in at most ``contract.MAX_DETAIL_CHARS``."""
    code: dict[str, str] = {}
    """Versions of code that this process runs, by their setting (``pipeline.config.code``)."""


def after(
    last: SettingsChange | None,
    sets: dict[str, str],
    former: dict[str, str],
    *,
    by: str,
    at_s: float,
    reason: str = "",
    undoes: int = 0,
    is_lazy: bool = False,
) -> SettingsChange:
    """Return the change that follows ``last``."""
    holds = {**(last.holds if last else {}), **sets}
    number = last.number + 1 if last else 1
    return SettingsChange(
        number=number, sets=sets, former=former, holds=holds, by=by, at_s=at_s, reason=reason, undoes=undoes,
        is_lazy=is_lazy,
    )  # fmt: skip


def standing(changes: Sequence[SettingsChange]) -> list[SettingsChange]:
    """Return the changes that are not rolled back, and no rollbacks, in their order."""
    found: list[SettingsChange] = []
    for change in changes:
        if change.undoes:
            found = [earlier for earlier in found if earlier.number < change.undoes]
        else:
            found.append(change)
    return found


def undoing(
    last: SettingsChange, undone: Sequence[SettingsChange], *, by: str, at_s: float, reason: str = ""
) -> SettingsChange:
    """Return the change that follows ``last`` and sets what held before all of ``undone``: the
    newest that stand, in their order."""
    sets: dict[str, str] = {}
    for change in reversed(undone):
        sets |= change.former
    former = {key: last.holds[key] for key in sets}
    return after(last, sets, former, by=by, at_s=at_s, reason=reason, undoes=undone[0].number)
