"""A run with a mirror has its checkpoints copied; any other imports nothing of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import RunConfig

if TYPE_CHECKING:
    from pipeline.supervisor.mirror_runner import MirrorRunner


class NoMirror:
    """In place of ``MirrorRunner`` for a run without a mirror: does nothing."""

    def keep(self, now: float) -> None:
        """Do nothing."""

    async def finish(self, is_stopped: Callable[[], bool], *, plain: bool = True) -> str:
        """Return "": everything is where it should be."""
        return ""

    def close(self) -> None:
        """Do nothing."""


def mirroring(config: RunConfig, run_dir: Path) -> MirrorRunner | NoMirror:
    """Return what copies the checkpoints of a run."""
    if config.checkpoint.mirror is None:
        return NoMirror()
    from pipeline.supervisor.mirror_runner import MirrorRunner

    return MirrorRunner(config, run_dir)
