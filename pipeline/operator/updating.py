"""An operator's changes to a running run's settings and code (``pipeline.config.changing`` has the rules).

A change is a numbered entry in the run's registry. Workers apply it where it takes effect, and
acknowledge it in their heartbeats.

A new version of code is copied and checked, and from then on is a change of settings like any other. A
folder with Headrace's own packages is code of the workers; any other holds reward functions. The check
imports the code in a separate process (reward functions under the sandbox's limits), so a version that
cannot be imported never reaches the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.operations import CODE_KEYS, WORKERS
from pipeline.operator.attached import Attached, workers_of
from pipeline.operator.steering import MAX_REASON_CHARS, check_running, operator
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.fleet.state import Worker
    from pipeline.runtime.clock import Clock
    from pipeline.runtime.registry.settings_change import SettingsChange

_CHECK_S = 120.0
"""Enough to import all workers on a busy machine."""


async def prepare_code(at: Attached, config: RunConfig, source: Path) -> tuple[str, str]:
    """Copy and check a new version of code; return the setting that selects it, and the version.

    ``config`` is the one in force. Raises ConfigError: the code cannot be copied or imported, contains
    nothing that the run uses, differs in shared code, or concerns workers that it would not reach."""
    from pipeline.config.operations import REWARDS, WORKERS

    if packages := _own_packages(source):
        return WORKERS, await _prepare_workers(at, config, source, packages)
    return REWARDS, await prepare_rewards(at, config, source)


async def prepare_rewards(at: Attached, config: RunConfig, source: Path) -> str:
    """Copy and check a new version of the reward functions; return the version.

    ``config`` is the one in force. Raises ConfigError: the code cannot be copied or imported, contains
    none of the run's functions, or would not reach all of its reward workers."""
    import asyncio

    from pipeline.config.operations import REWARDS
    from pipeline.files.code_copies import checked_code, keep_code

    await check_reach(at, config, REWARDS)
    version = await asyncio.to_thread(keep_code, source, at.run_dir)
    if version == config.code.rewards:
        raise ConfigError(f"{source} is version {version}, which is already in effect; nothing was changed")
    await check_rewards(config, checked_code(at.run_dir, version), source)
    return version


async def check_rewards(config: RunConfig, folder: Path, source: Path) -> None:
    """Import the run's reward functions from ``folder``. Raises ConfigError."""
    from pipeline.config.import_path import is_import_path
    from pipeline.files.code_copies import module_names
    from pipeline.rewards.pool import VerifierPool

    there = module_names(folder)
    paths = sorted(path for path in config.verifier_paths if is_import_path(path))
    used = {path.partition(":")[0].partition(".")[0] for path in paths}
    if not used & there:
        names = ", ".join(sorted(used)) or "none: its verifiers are Headrace's own"
        raise ConfigError(f"{source} has no module that the run's reward functions are in; expected one of: {names}")
    section = config.reward.model_copy(update={"processes": 1})
    async with VerifierPool(section, configured=config.verifier_paths, code=folder) as pool:
        await pool.start(paths)
        for function in config.reward.functions.values():
            await pool.start([function.verifier], whole_group=function.whole_group)


async def _prepare_workers(at: Attached, config: RunConfig, source: Path, packages: list[str]) -> str:
    """Copy and check a new version of Headrace's packages; return the version."""
    import asyncio

    from pipeline.config.operations import WORKERS
    from pipeline.files.code_copies import checked_code, differing, keep_code, shared_digests
    from pipeline.observability.start_record import read_starts
    from protocol.headrace import PACKAGES

    remedy = f"for such a change `headrace down`, install it, `headrace up --resume {config.run_dir}`"
    if missing := sorted(set(PACKAGES) - set(packages)):
        raise ConfigError(
            f"{source} has {packages[0]}, one of Headrace's packages, but no {missing[0]}; expected all of "
            f"{', '.join(PACKAGES)}, or only reward functions"
        )
    await check_reach(at, config, WORKERS)
    starts, _ = await asyncio.to_thread(read_starts, at.run_dir)
    shared = starts[-1].start.shared_code if starts else {}
    if not shared:
        raise ConfigError(
            f"{at.run_dir} was started by a Headrace that did not record its shared code, so nothing can be compared: {remedy}"
        )
    version = await asyncio.to_thread(keep_code, source, at.run_dir, PACKAGES)
    if version == config.code.workers:
        raise ConfigError(f"{source} is version {version}, which is already in effect; nothing was changed")
    folder = checked_code(at.run_dir, version)
    if (place := differing(shared, await asyncio.to_thread(shared_digests, folder))) is not None:
        raise ConfigError(
            f"{source} differs in {place} from the code the run was started with. All processes share that code, and the "
            f"supervisor keeps its own: {remedy}"
        )
    await asyncio.to_thread(_check_workers, at.run_dir, folder, source)
    return version


def _own_packages(source: Path) -> list[str]:
    from protocol.headrace import PACKAGES

    return [name for name in PACKAGES if (source / name / "__init__.py").is_file()]


def _check_workers(run_dir: Path, folder: Path, source: Path) -> None:
    """Import the version's workers in a separate process with the run's settings. Raises
    ConfigError."""
    import subprocess

    from pipeline.process.descendants import worker_mark
    from pipeline.supervisor.starter import marked_environment
    from protocol import headrace

    command = headrace.of_root(headrace.command("workers.code_check", str(run_dir)), folder)
    environment = marked_environment(worker_mark(run_dir, "code-check"))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment,
            timeout=_CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{source}: importing its workers took over {_CHECK_S:g} s; nothing is changed") from None
    except OSError as error:
        raise ConfigError(f"{source}: its workers cannot be imported: {error}; nothing is changed") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"its process ended with code {done.returncode}"]
        raise ConfigError(f"{source}: its workers cannot be imported: {lines[-1]}; nothing is changed")


async def check_reach(at: Attached, config: RunConfig, key: str) -> None:
    """Raise ConfigError if the setting concerns workers on other hosts, which the code cannot reach."""
    from pipeline.config.changing import coded_roles
    from pipeline.config.operations import REWARDS
    from pipeline.supervisor.takeover import is_own

    reason = "rewards of one group must be comparable" if key == REWARDS else "its workers must run the same code"
    for role in sorted(coded_roles(key)):
        guests = [beat for beat in await workers_of(at, role) if not is_own(beat.who.worker)]
        if guests or role in config.launch.launched:
            there = (
                f"{guests[0].who.worker} is on {guests[0].host}"
                if guests
                else f"launch.roles has {role} workers elsewhere"
            )
            raise ConfigError(
                f"{there}, which the new code would not reach, and {reason}: end those workers first (`headrace "
                f"fleet drain`), or use `headrace down` and `headrace up --resume`"
            )


_POLL_S = 0.02
_POLL_SHARE = 0.02
"""Polling interval relative to the time waited so far, so that slow workers are polled less often."""
_LONGEST_POLL_S = 0.5
_MAX_CHANGES = 1000
"""Maximum number of changes of one run. Each takes a few hundred bytes in the registry."""


@dataclass(frozen=True, slots=True)
class TakenChange:
    """Whether a worker has acknowledged a change."""

    worker: str
    is_taken: bool
    first_update: int = 0
    """The learner's first update under the change; 0 for other workers."""


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """Who has acknowledged a change when waiting ended."""

    taken: list[TakenChange]
    """One entry for the supervisor and each worker concerned."""
    undone_by: SettingsChange | None = None
    """The change that rolled this version of code back; None if it is in force."""

    @property
    def is_taken(self) -> bool:
        """Whether everyone has acknowledged it."""
        return self.undone_by is None and all(one.is_taken for one in self.taken)


async def update(at: Attached, overrides: Sequence[str], reason: str = "") -> SettingsChange:
    """Change settings (``section.key=value``) of a running run; return the change. Raises ConfigError:
    the run is not running, a setting may not change, or a value is invalid."""
    from pipeline.config.changing import checked, value_of
    from pipeline.runtime.registry.settings_change import after

    words = _one_line(reason)
    await check_running(at)
    last = await at.registry.last_settings_change()
    present = present_config(at, last)
    sets = checked(present, overrides, num_updates=await _num_updates(at, overrides))
    former = {key: value_of(present, key) for key in sets}
    return await _add(at, after(last, sets, former, by=operator(), at_s=time.time(), reason=words))


async def update_code(at: Attached, source: Path, reason: str = "", *, is_lazy: bool = False) -> SettingsChange:
    """Switch a running run to other reward functions or other worker code; return the change.

    ``source`` is a folder of modules, a single module, or a Headrace source tree. With ``is_lazy``,
    workers switch only when they next restart. Raises ConfigError: the run is not running, or as for
    ``prepare_code``."""
    from pipeline.config.changing import value_of
    from pipeline.runtime.registry.settings_change import after

    words = _one_line(reason)
    await check_running(at)
    last = await at.registry.last_settings_change()
    present = present_config(at, last)
    key, version = await prepare_code(at, present, source)
    # a host may have joined while the code was checked
    await check_reach(at, present, key)
    sets, former = {key: f'"{version}"'}, {key: value_of(present, key)}
    return await _add(at, after(last, sets, former, by=operator(), at_s=time.time(), reason=words, is_lazy=is_lazy))


async def roll_back(at: Attached, reason: str = "") -> SettingsChange:
    """Undo the newest change in force; return the change that does so. Raises ConfigError: the run
    is not running, or no change is in force."""
    from pipeline.config.changing import checked
    from pipeline.files.code_copies import checked_code
    from pipeline.runtime.registry.settings_change import standing, undoing

    words = _one_line(reason)
    await check_running(at)
    changes = await at.registry.settings_changes()
    found = standing(changes)
    if not found:
        raise ConfigError(f"{at.run_dir} runs with its original settings: there is no change to roll back")
    undone = undoing(changes, found[-1:], by=operator(), at_s=time.time(), reason=words)
    if given := [f"{key}={value}" for key, value in undone.sets.items() if value != undone.former[key]]:
        checked(present_config(at, changes[-1]), given, num_updates=await _num_updates(at, given), may_be_code=True)
    for version in (undone.sets.get(key, "").strip('"') for key in CODE_KEYS):
        if version:
            checked_code(at.run_dir, version)
    return await _add(at, undone)


def present_config(at: Attached, last: SettingsChange | None) -> RunConfig:
    """Return the settings in force after the last change."""
    from pipeline.config.changing import with_settings

    return at.config if last is None else with_settings(at.config, last.holds)


async def wait_until_taken(
    at: Attached, change: SettingsChange, timeout_s: float, clock: Clock | None = None
) -> ChangeOutcome:
    """Wait up to ``timeout_s`` until the supervisor and every worker concerned have acknowledged the
    change, or a version of code is rolled back. A ledger that does not answer is waited for, too.

    Raises ConfigError if the run ends meanwhile."""
    from pipeline.runtime.clock import RealClock
    from pipeline.supervisor.run_folder import supervisor_pid

    clock = clock or RealClock()
    began_s = clock.monotonic()
    end_s = began_s + timeout_s
    found = ChangeOutcome([TakenChange("supervisor", is_taken=False)])
    while True:
        try:
            found = ChangeOutcome(await taken(at, change), await undone_by(at, change) if change.is_code else None)
        except LedgerUnavailable:
            if supervisor_pid(at.run_dir) is None:
                raise ConfigError(
                    f"{at.run_dir} ended before all workers had answered; change {change.number} is recorded, and "
                    f"`headrace update {at.run_dir}` shows its result"
                ) from None
        if found.is_taken or found.undone_by is not None or clock.monotonic() >= end_s:
            return found
        await clock.sleep(min(_LONGEST_POLL_S, max(_POLL_S, _POLL_SHARE * (clock.monotonic() - began_s))))


async def undone_by(at: Attached, change: SettingsChange) -> SettingsChange | None:
    """Return the change that rolled this one back; None if it is in force."""
    return next((one for one in await at.registry.settings_changes() if one.rolls_back(change.number)), None)


async def taken(at: Attached, change: SettingsChange) -> list[TakenChange]:
    """Return the state of the supervisor and of each worker concerned. A role without any worker
    counts as not having acknowledged."""
    from pipeline.config.changing import takers

    found = [TakenChange("supervisor", _written(at) >= change.number)]
    roles = takers(change.sets)
    if WORKERS in change.sets and (fleet := await at.registry.fleet()) is not None:
        roles &= {role for role, count in fleet.counts.items() if count}
    for role in () if change.is_lazy else sorted(roles):
        answers = {beat.who.worker: _answer(beat, change) for beat in await workers_of(at, role)}
        if change.is_code:
            # a worker that is being replaced has no heartbeat
            answers = {name: TakenChange(name, False) for name in await _wanted(at, role)} | answers
        found += answers.values() or [TakenChange(str(role), False)]
    return found


async def _wanted(at: Attached, role: Role) -> list[str]:
    """Return the names of the run's own workers in a role."""
    from pipeline.supervisor.fleet_plan import wanted_names

    fleet = await at.registry.fleet()
    names = {} if fleet is None else wanted_names(fleet.counts, fleet.left_out)
    return [name for name, its_role in names.items() if its_role is role]


def _answer(beat: Worker, change: SettingsChange) -> TakenChange:
    from pipeline.config.changing import CHANGEABLE, coded_roles

    coded = [key for key in CODE_KEYS if key in change.sets and beat.who.role in coded_roles(key)]
    has = all(beat.settings.code.get(key, "") == change.sets[key].strip('"') for key in coded)
    if beat.who.role in {CHANGEABLE[key].role for key in change.sets if key in CHANGEABLE}:
        has &= beat.settings.number >= change.number
    elif coded:
        return TakenChange(beat.who.worker, has)
    is_exact = beat.settings.number == change.number
    return TakenChange(beat.who.worker, has, beat.settings.first_update if is_exact else 0)


def _written(at: Attached) -> int:
    from pipeline.observability.settings_changes import read_changes

    changes = read_changes(at.run_dir)
    return changes[-1].number if changes else 0


def _one_line(reason: str) -> str:
    if len(reason) > MAX_REASON_CHARS:
        raise ConfigError(f"the reason has {len(reason)} characters; expected at most {MAX_REASON_CHARS}: shorten it")
    return " ".join(reason.split())


async def _add(at: Attached, change: SettingsChange) -> SettingsChange:
    if change.number > _MAX_CHANGES:
        raise ConfigError(f"{at.run_dir} has had {_MAX_CHANGES} changes of its settings, the most that a run can have")
    if not await at.registry.add_settings_change(change):
        raise ConfigError(f"the settings of {at.run_dir} are being changed by others; look at them, then try again")
    return change


async def _num_updates(at: Attached, overrides: Sequence[str]) -> int:
    """Return how many updates the run has made, by its history and its learner; 0 if no override
    depends on it, because reading a long history takes seconds."""
    if not any(text.strip().startswith("run.num_updates") for text in overrides):
        return 0
    from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history

    rows = run_history(at.run_dir / HISTORY_NAME).read()[0]
    made = max((row.update for row in rows if isinstance(row, UpdateRow)), default=0)
    beats = await workers_of(at, Role.LEARNER)
    return max([made, *(int(beat.counters.get("updates", 0)) for beat in beats)])
