"""The few settings that a command which looks must know of a run, read without the schema:
importing that takes 0.2 s.

*Consumes* the resolved configuration beside the run: it holds every setting, and was checked when
it was written. *Produces* a ``Glance``. *Waits for* the file system. A file that lacks one of these
settings, as that of an older version may, is read with the schema, which knows the defaults.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from pipeline.config import RESOLVED_NAME


class RunGlance(msgspec.Struct, frozen=True):
    """Of ``[run]``."""

    name: str


class AlgorithmGlance(msgspec.Struct, frozen=True):
    """Of ``[algorithm]``."""

    name: str
    dynamic_sampling: bool


class LedgerGlance(msgspec.Struct, frozen=True):
    """Of ``[ledger]``."""

    max_memory_mb: int


class SupervisorGlance(msgspec.Struct, frozen=True):
    """Of ``[supervisor]``."""

    silent_after_s: float
    stuck_after_s: float | None = None


class ValueGlance(msgspec.Struct, frozen=True):
    """Of ``[value]``."""

    pretrain_steps: int
    batch_trajectories: int
    min_explained_variance: float | None = None


class Glance(msgspec.Struct, frozen=True):
    """Settings by section and key, as in ``RunConfig``."""

    run: RunGlance
    algorithm: AlgorithmGlance
    ledger: LedgerGlance
    supervisor: SupervisorGlance
    value: ValueGlance


def glance(run_dir: Path) -> Glance:
    """Read a few settings of the run in a folder. Raises ConfigError when the folder holds no run,
    or a file that is none.
    """
    try:
        return msgspec.convert(tomllib.loads((run_dir / RESOLVED_NAME).read_text(encoding="utf-8")), Glance)
    except (OSError, ValueError):  # a setting is not there, or the file is not TOML; the schema says which
        from pipeline.config.describe import public_settings
        from pipeline.config.load import read_resolved

        return msgspec.convert(public_settings(read_resolved(run_dir)), Glance)
