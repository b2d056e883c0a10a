"""The table of a run's settings for code that was brought into it while it ran."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import StringConstraints

from pipeline.config.base import Positive, Section, setting

REWARDS: Final = "code.rewards"
WORKERS: Final = "code.workers"
CODE_KEYS: Final = (REWARDS, WORKERS)
"""Settings whose values are versions of code; empty for that of the start."""
CodeVersionName = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")]


class CodeSection(Section):
    """Code that `headrace update --code` has brought into the running run, and how it is judged."""

    rewards: CodeVersionName = setting(
        "", "Version of the reward functions, a folder of the run's `code/`. Empty: as reward.path has them."
    )
    workers: CodeVersionName = setting(
        "", "Version of Headrace's own packages for the workers, a folder of the run's `code/`. Empty: as installed."
    )
    canary_pieces: Positive = setting(
        16, "Pieces of work that the first worker with a new version does before others take it."
    )
    canary_timeout_s: float = setting(
        60.0, "A first worker that is ready, holds no work, and was given less in this time counts as good.", gt=0.0
    )
    judged_updates: Positive = setting(
        8,
        "Updates before a new version and after it whose rates are compared: a rate lower by a third rolls it back. So does "
        "a lack of updates for 1.5 times the longest that so many took before, and at least a minute.",
    )
    lazy_limit_s: float = setting(
        86_400.0, "`headrace update --lazily`: workers that have not restarted this long after it are replaced.", gt=0.0
    )
