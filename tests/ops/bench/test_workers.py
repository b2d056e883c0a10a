"""The bench of idle workers, in small."""

from __future__ import annotations

from pathlib import Path

from ops.bench.workers.emulated import role_of
from ops.bench.workers.fleet import ROOT, measure
from ops.bench.workers.limit import measure as measure_chunks
from protocol.ids import Role


def test_of_a_thousand_workers_one_is_the_learner_and_a_tenth_are_scorers() -> None:
    roles = [role_of(number) for number in range(1000)]
    assert [roles.count(role) for role in (Role.LEARNER, Role.REFERENCE, Role.REWARD)] == [1, 34, 67]


def test_each_worker_has_its_own_connections_and_status_shows_it(tmp_path: Path) -> None:
    workers = measure(8, ROOT, "now", tmp_path, seconds=1.5, settle_s=0.5)
    # calls, news and heartbeats of each; the supervisor's and the bench's own
    assert workers.connections >= 3 * 8 + 1
    assert workers.beats_per_s > 2
    # heartbeats, and the supervisor's look at those that are new
    assert {"evalsha", "hset", "hmget"} <= set(workers.by_command)
    assert len(workers.status_s) == 3


def test_a_chunk_costs_bytes_both_ways_and_in_the_file(tmp_path: Path) -> None:
    cost = measure_chunks(64, num_chunks=128, work=tmp_path)
    assert min(cost.received_bytes, cost.sent_bytes, cost.file_bytes) > 8 * 64
    assert cost.cpu_us > 0 and cost.commands > 3
