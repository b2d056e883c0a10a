"""The watch: explicit rules, then similarity with peers, over the frames of one fleet."""

from __future__ import annotations

import math

from pipeline.watch.findings import Finding
from pipeline.watch.frame import Frame
from pipeline.watch.tuning import Tuning


class Watch:
    """Watches one fleet. Holds all state, bounded by the workers and metrics of the last frame."""

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or Tuning()
        self._silent: set[str] = set()

    def tick(self, frame: Frame) -> list[Finding]:
        """Return the findings that are new with this frame. Workers may come and go."""
        if "heartbeat_age_s" not in frame.metrics:
            return []
        ages = frame.values[:, frame.metrics.index("heartbeat_age_s")]
        limit = self._tuning.silent_s
        old = [at for at, age in enumerate(ages) if age > limit]
        if len(old) > math.ceil(self._tuning.common_share * len(frame.workers)):
            return []
        names = {frame.workers[at] for at in old}
        found = [
            Finding(
                frame.workers[at], frame.roles[at], frame.time_s - float(ages[at]), frame.time_s, "silent",
                "heartbeat_age_s", float(ages[at]) / limit,
                f"no heartbeat for {ages[at]:.0f} s; the limit is {limit:g} s",
            )
            for at in old
            if frame.workers[at] not in self._silent
        ]  # fmt: skip
        self._silent = names
        return found
