"""A few settings of a run, read without the schema, whose import takes 0.2 s.

The resolved configuration in the run's folder holds every setting and was checked when written. A
file of an older version may lack a setting; then it is read with the schema, which has the
defaults."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from pipeline.config import RESOLVED_NAME
from pipeline.config.changed import changed_settings


class LightRun(msgspec.Struct, frozen=True):
    name: str
    num_updates: int


class LightLedger(msgspec.Struct, frozen=True):
    max_memory_mb: int
    outage_timeout_s: float
    scoring_deadline_s: float


class LightSupervisor(msgspec.Struct, frozen=True):
    silent_after_s: float
    stopped_after_s: float
    start_timeout_s: float
    checkpoint_timeout_s: float
    drain_timeout_s: float
    stuck_after_s: float | None = None


class LightWire(msgspec.Struct, frozen=True):
    send_timeout_s: float


class LightFleet(msgspec.Struct, frozen=True):
    min_generators: int
    max_generators: int | None = None


class LightValue(msgspec.Struct, frozen=True):
    pretrain_steps: int
    batch_trajectories: int
    min_explained_variance: float | None = None


class LightConfig(msgspec.Struct, frozen=True):
    """Settings by section and key, as in ``RunConfig``."""

    run: LightRun
    ledger: LightLedger
    supervisor: LightSupervisor
    value: LightValue
    fleet: LightFleet
    wire: LightWire


def read_light(run_dir: Path) -> LightConfig:
    """Read a few settings of a run. Raises ConfigError for a folder without a run."""
    try:
        return msgspec.convert(tomllib.loads((run_dir / RESOLVED_NAME).read_text(encoding="utf-8")), LightConfig)
    except (OSError, ValueError):
        # a setting is missing or the file is not TOML: the schema's error names it
        from pipeline.config.load import read_resolved
        from pipeline.config.public import public_settings

        return msgspec.convert(public_settings(read_resolved(run_dir)), LightConfig)


def wanted_updates(run_dir: Path, settings: LightConfig) -> int:
    """Return the number of updates a run shall make, including changes since its start. Raises as
    ``changed_settings``."""
    changed = changed_settings(run_dir).get("run.num_updates")
    return settings.run.num_updates if changed is None else int(changed)
