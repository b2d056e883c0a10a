"""Claims about the watch as a whole."""

from __future__ import annotations

import numpy as np

from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.watcher import Watch


def frame(time_s: float, *ages_s: float) -> Frame:
    workers = tuple(f"generator-{at}" for at in range(len(ages_s)))
    values = np.array(ages_s, dtype=np.float32)[:, None]
    return Frame(time_s, workers, ("generator",) * len(workers), ("heartbeat_age_s",), values)


def test_a_worker_without_a_heartbeat_is_named_once() -> None:
    watch = Watch()
    found = [watch.tick(frame(at, 1.0, 1.0, 1.0, max(1.0, at - 10.0))) for at in range(30)]
    assert [(one.worker, one.kind) for step in found for one in step] == [("generator-3", "silent")]


def test_no_worker_is_blamed_when_all_heartbeats_are_late() -> None:
    assert Watch().tick(frame(0.0, 9.0, 9.0, 9.0, 9.0)) == []
