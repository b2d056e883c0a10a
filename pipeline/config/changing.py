"""Which settings may change while a run goes on, which role applies each and when, and why the
others may not change.

``headrace update`` checks changes here; workers and replay apply them here. All functions are
pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from pipeline.config import RESOLVED_NAME
from pipeline.config.describe import in_toml, settings
from pipeline.config.load import known_keys, override_key, parse_config, section_of, suggest, to_toml
from pipeline.config.operations import CODE_KEYS, REWARDS, WORKERS
from pipeline.config.schema import RunConfig
from pipeline.config.unread import unread
from protocol.errors import ConfigError
from protocol.ids import Role


@dataclass(frozen=True, slots=True)
class Changeable:
    role: Role
    when: str
    effect: str


_WORKERS: Final = frozenset(Role) - {Role.SUPERVISOR}
_BETWEEN: Final = "between two updates"
CHANGEABLE: Final[Mapping[str, Changeable]] = {
    one.key: Changeable(Role.LEARNER, _BETWEEN, one.live) for one in settings() if one.live
}
"""Settings that may change in a running run, in the schema's order."""

_NEW_RUN: Final = "start a new run"
_FIXED: Final[Mapping[str, str]] = {
    "run.name": f"the ledger's keys and the run's folder have this name; {_NEW_RUN}",
    "run.seed": f"every sampled token depends on it; {_NEW_RUN}",
    "run.dir": "the run's folder is there already; move it after `headrace down`",
    "model": f"the run's weights belong to this model; {_NEW_RUN}",
    "data": f"trajectory names depend on the order of these prompts; {_NEW_RUN}",
    "generation.temperature": (
        "the learner computes log-probs at one temperature, and trajectories in flight were sampled at the current one; "
        + _NEW_RUN
    ),
    "generation.max_response_tokens": (
        f"trajectories in flight would end at different lengths, and their rewards depend on it; {_NEW_RUN}"
    ),
    "algorithm.name": f"the rule determines the ledger's units; {_NEW_RUN}",
    "algorithm.group_size": f"groups in flight have the current size; {_NEW_RUN}",
    "algorithm.groups_per_update": f"the ledger was opened with this update size; {_NEW_RUN}",
    "algorithm.oversampling": f"the ledger was opened with it; {_NEW_RUN}",
    "algorithm.dynamic_sampling": f"the ledger was opened with it; {_NEW_RUN}",
    "algorithm.guidance": f"the ledger was opened with it; {_NEW_RUN}",
    "staleness": f"the ledger was opened with it, and every lease depends on it; {_NEW_RUN}",
    "reward": "groups are in flight, and the rewards of one group must be comparable",
    "learner.lora": f"the checkpoints hold this adapter; {_NEW_RUN}",
    "learner.freeze": f"the optimiser's state covers exactly these parameters; {_NEW_RUN}",
    "learner.optimizer": f"the checkpoints hold this optimiser's state; {_NEW_RUN}",
    "learner.schedule": f"the checkpoints hold this schedule; change learner.learning_rate, or {_NEW_RUN}",
    **dict.fromkeys(CODE_KEYS, "`headrace update --code` sets it, once it has copied and checked the code"),
    "fleet": "`headrace scale` changes it in a running run",
    "ledger": "all workers are connected to this ledger and agreed on its limits",
}
"""Why a setting or a whole section may not change. The longest matching key wins."""
_AT_A_START: Final = (
    "workers read it when they start; `headrace down`, then `headrace up --resume RUN --set {key}=VALUE`"
)


def refusal(key: str) -> str | None:
    """Return why a setting may not change in a running run, or None if it may. Raises ConfigError
    for an unknown key."""
    if key in CHANGEABLE:
        return None
    if not _is_known(key):
        raise ConfigError(f"unknown key `{key}`{suggest(key)}")
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if why := _FIXED.get(".".join(parts[:length])):
            return why
    return _AT_A_START.format(key=key)


def with_settings(config: RunConfig, settings: Mapping[str, str], origin: str = "--set") -> RunConfig:
    """Return a copy of a configuration with these settings, given as TOML values. Raises
    ConfigError if the schema or its cross-checks refuse them."""
    given = [f"{key}={value}" for key, value in settings.items() if in_toml(_held(config, key)) != value]
    if not given:
        return config
    found = parse_config(to_toml(config), RESOLVED_NAME, given, option=origin)
    # the address of the ledger, with its password, is in no file
    return found.model_copy(update={"ledger": config.ledger})


def value_of(config: RunConfig, key: str) -> str:
    """Return a setting's value as TOML, in the form that ``with_settings`` takes."""
    section, _, name = key.rpartition(".")
    held: Any = section_of(config, section)
    return in_toml(getattr(held, name))


def checked(
    config: RunConfig, overrides: Sequence[str], *, num_updates: int, may_be_code: bool = False
) -> dict[str, str]:
    """Check ``overrides`` (``section.key=value``) for a running run that has made ``num_updates``
    updates, and return what they change: TOML values by key. ``may_be_code`` allows changing code
    versions.

    Raises ConfigError if a setting is unknown, may not change or already has this value, or if a
    value is invalid, alone or in combination with others."""
    keys = [override_key(text) for text in overrides]
    for key in keys:
        if not (may_be_code and key in CODE_KEYS) and (why := refusal(key)) is not None:
            raise ConfigError(
                f"{key} cannot change in a running run: {why}. `headrace update --settings` lists those that can"
            )
    wanted = parse_config(to_toml(config), "the run's settings", overrides, option="--set")
    sets = {key: value_of(wanted, key) for key in dict.fromkeys(keys) if _held(wanted, key) != _held(config, key)}
    if not sets:
        given = ", ".join(f"{key}={value_of(config, key)}" for key in dict.fromkeys(keys))
        raise ConfigError(f"{given} is already in effect; nothing was changed")
    if useless := {key: why for key, why in unread(wanted).items() if key in sets}:
        key, why = next(iter(useless.items()))
        raise ConfigError(f"{key} would change nothing: {why}")
    _check_together(config, wanted, num_updates)
    return sets


def changed_since(start: RunConfig, now: RunConfig) -> dict[str, str]:
    """Return the changeable settings that differ from ``start``, in the form that ``with_settings``
    takes."""
    return {key: value_of(now, key) for key in CHANGEABLE if _held(now, key) != _held(start, key)}


def differ_in_changeable_alone(one: RunConfig, other: RunConfig) -> bool:
    """Return whether two configurations agree in every setting that workers read only at their
    start. Versions of reward functions count as changeable, those of worker code do not."""
    trees = [config.model_dump() for config in (one, other)]
    for tree in trees:
        for key in (*CHANGEABLE, REWARDS):
            section, _, name = key.partition(".")
            tree[section].pop(name, None)
    return trees[0] == trees[1]


def takers(sets: Mapping[str, str]) -> set[Role]:
    """Return the roles that apply these settings. Settings of a newer Headrace are ignored."""
    found = {CHANGEABLE[key].role for key in sets if key in CHANGEABLE}
    found |= {role for key in CODE_KEYS if key in sets for role in coded_roles(key)}
    return found


def triers(sets: Mapping[str, str]) -> set[Role]:
    """Return the roles whose workers try these settings with their first work and report a failure.
    Worker code is not among them: the supervisor tries it, and sees whether a worker exits."""
    return takers({key: value for key, value in sets.items() if key != WORKERS})


def coded_roles(key: str) -> frozenset[Role]:
    return frozenset({Role.REWARD}) if key == REWARDS else _WORKERS


def _check_together(present: RunConfig, wanted: RunConfig, num_updates: int) -> None:
    updates = wanted.run.num_updates
    if updates != present.run.num_updates:
        if updates <= num_updates:
            raise ConfigError(
                f"run.num_updates={updates}, but the run has already made {num_updates} updates: give a larger "
                f"number, or end it with `headrace down`"
            )
        if present.learner.schedule != "constant" and present.learner.schedule_updates is None:
            raise ConfigError(
                f"run.num_updates cannot change in a running run: learner.schedule {present.learner.schedule} "
                f"decays over the run's length, and the checkpoints contain that schedule. To extend a run later, "
                f"set learner.schedule_updates at its start"
            )
    if wanted.needs_reference != present.needs_reference:
        now = present.algorithm.kl_coefficient
        raise ConfigError(
            f"algorithm.kl_coefficient cannot change from {now:g} to {wanted.algorithm.kl_coefficient:g} in a "
            f"running run: the ledger was told at the start whether reference workers score every chunk; both "
            f"values must be above 0, or reference.always must be set from the start"
        )


def _held(config: RunConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    held = section_of(config, section)
    return getattr(held, name, None) if isinstance(held, BaseModel) else None


def _is_known(key: str) -> bool:
    known = set(known_keys())
    # a table of the user's own names: [reward.functions.NAME]
    return key in known or any(name.split(".NAME")[0] + "." in key + "." for name in known if ".NAME" in name)
