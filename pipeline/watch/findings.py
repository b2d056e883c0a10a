"""A finding: one worker that is odd, since when, and the evidence in a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One odd worker. Its fields are those of the JSON of ``headrace fleet watch``."""

    worker: str
    role: str
    since_s: float
    """Estimated onset, by the clock of the frames."""
    alarm_s: float
    """Time of the frame that completed the evidence."""
    kind: str
    """silent, hung, slow, leak, stale, errors, refused, disk, clock, numeric, reward or odd."""
    metric: str
    """The metric with the strongest evidence."""
    score: float
    """Evidence over its limit: above 1."""
    sentence: str
    """Observation and limit in plain words."""
