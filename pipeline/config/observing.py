"""The table of a run file for the observer."""

from __future__ import annotations

from pipeline.config.base import Positive, Section, setting


class ObserverSection(Section):
    """The worker that finds odd workers and stalls, and writes incidents. The run goes on without
    it."""

    enabled: bool = setting(True, "Start an observer with the fleet.")
    thresholds: str = setting("", "File of thresholds from `headrace fleet watch calibrate`. Empty: the built-in ones.")
    keep_mb: Positive = setting(
        256, "Size of the metrics that are kept in the run's folder `observed`. The oldest are deleted."
    )
