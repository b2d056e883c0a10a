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
        "", "Version of the reward functions, a folder of the run's `code/`. Empty: those of reward.path."
    )
    workers: CodeVersionName = setting(
        "",
        "Version of Headrace's own packages for the workers, a folder of the run's `code/`. Empty: the installed ones.",
    )
    canary_pieces: Positive = setting(
        16, "Pieces of work that the first worker does with a new version before other workers take it."
    )
    canary_timeout_s: float = setting(
        60.0, "The first worker also counts as good if it is ready and idle, and got fewer pieces in this time.", gt=0.0
    )
    judged_updates: Positive = setting(
        8,
        "Updates before and after a new version whose rates are compared: a rate lower by a third rolls it back. So "
        "does a lack of updates for 1.5 times the longest time that as many took before, and at least a minute.",
    )
    lazy_limit_s: float = setting(
        86_400.0, "Workers that have not restarted this long after `headrace update --lazily` are replaced.", gt=0.0
    )
