"""Workers that ended by an error of their own, as they reported at their departure. Pure; times are
arguments.

Such a worker departs in order and is not fenced. So its successor's epoch shows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import FailureReport
from protocol.errors import StepDiffered
from protocol.ids import Incarnation

_KINDS: Final = {StepDiffered.__name__: "machine"}
"""Errors that have a kind of incident of their own."""
TOLD_S: Final = 60.0
"""An older failure, when an observer first reads it, was an earlier observer's to report."""


class Failures:
    """Remembers which failures it has reported. The registry's list bounds its memory."""

    def __init__(self) -> None:
        self._reported: frozenset[Incarnation] = frozenset()

    def look(self, at_s: float, failures: Sequence[FailureReport]) -> list[Suspicion]:
        """Return the failures that are new. ``at_s``: the wall-clock time of the reading."""
        new = [one for one in failures if one.who not in self._reported and one.ago_s < TOLD_S]
        self._reported = frozenset(one.who for one in failures)
        return [_failed(one, at_s) for one in new]


def _failed(one: FailureReport, at_s: float) -> Suspicion:
    sentence = f"incarnation {one.who.epoch} ended by an error of its own, {one.error}: {one.message}"
    kind = _KINDS.get(one.error, "failed")
    return Suspicion(one.who.worker, kind, at_s - one.ago_s, sentence, role=str(one.who.role), score=1.0)
