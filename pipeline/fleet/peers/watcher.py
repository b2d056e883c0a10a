"""The watch: explicit rules, then similarity with peers, over the frames of one fleet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import Finding, Frame, metric
from pipeline.fleet.peers.groups import Groups
from pipeline.fleet.peers.rules import Rules
from pipeline.fleet.peers.similarity import Similarity
from pipeline.fleet.peers.thresholds import Thresholds, Tuning, shipped


class Watch:
    """Watches one fleet. Its state is bounded by the workers and metrics of the last frame."""

    def __init__(self, tuning: Tuning | None = None, thresholds: Thresholds | None = None) -> None:
        """Without ``thresholds`` those of the package apply."""
        self._tuning = tuning or Tuning()
        self._rules = Rules(self._tuning)
        self._similarity = Similarity(self._tuning, thresholds or shipped())
        self._named: dict[str, float] = {}
        self._groups: Groups | None = None
        self._of: tuple[object, object, object] = (None, None, None)

    def tick(self, frame: Frame) -> list[Finding]:
        """Return the findings that are new with this frame. Workers may come and go."""
        if not frame.workers:
            return []
        if self._groups is None or self._of != (frame.workers, frame.roles, frame.phases):
            self._groups = Groups.by(frame.roles, frame.phases)
            self._of = (frame.workers, frame.roles, frame.phases)
        found = self._rules.tick(frame, self._groups)
        compared = [at for at, name in enumerate(frame.metrics) if metric(name).is_compared]
        names = tuple(frame.metrics[at] for at in compared)
        values = np.ascontiguousarray(frame.values[:, compared].T)
        for one in found:
            self._named[one.worker] = frame.time_s
        is_named = np.array([name in self._named for name in frame.workers])
        suspects = self._similarity.tick(frame.time_s, names, frame.workers, self._groups, values, is_named)
        for one in suspects:
            worker = frame.workers[one.worker]
            if worker in self._named:
                continue
            self._named[worker] = frame.time_s
            known = metric(names[one.metric])
            found.append(
                Finding(
                    worker, frame.roles[one.worker], one.since_s, frame.time_s, known.kind, known.name, one.strength,
                    f"{known.name}: {one.deviations:.1f} robust deviations for {frame.time_s - one.since_s:.0f} s",
                )
            )  # fmt: skip
        return found

    def strengths(self) -> NDArray[np.float32]:
        """Return each worker's evidence at the last frame, divided by what an alarm needs,
        [workers]."""
        assert self._groups is not None, "no frame yet"
        return self._similarity.strengths(self._groups)

    def lasts(self, finding: Finding) -> bool:
        """Return whether the rule behind a finding still holds. Similarity has no such state."""
        return self._rules.is_on(finding.kind, finding.worker)

    def forget(self, worker: str) -> None:
        """Let similarity name a worker again, so that a lasting anomaly is found anew."""
        self._named.pop(worker, None)
