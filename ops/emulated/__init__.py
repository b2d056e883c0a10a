"""Engines that compute nothing and take the configured time, for drills and benchmarks."""

from typing import Final

OVERRIDES: Final = (
    "generation.engine=ops.emulated.build:generation",
    "learner.backend=ops.emulated.build:training",
    "reference.backend=ops.emulated.build:scoring",
    "value.backend=ops.emulated.build:value",
)
"""Settings, as for ``--set``, with which a run has only emulated engines."""
