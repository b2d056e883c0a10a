"""Flow records of a host as rows: whole, timed by the reader, each once, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet.flow import host_records
from pipeline.fleet.flow.host_records import HostRecordReader
from pipeline.runtime.flow_ring import MAX_NAMES, NUM_SLOTS, FlowRingWriter, LinkSide, LinkState
from pipeline.runtime.message_record import MessageOutcome, key_of
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.ring_records import Ended, chunk_id, write

WALL_S = 1e9
"""Ahead of the monotonic clock."""


class Host:
    """A folder of rings, and its reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "flow"
        self.rings: dict[str, FlowRingWriter] = {}
        self.reader = HostRecordReader(self.folder)

    def ring(self, worker: str, epoch: int = 1) -> FlowRingWriter:
        if worker in self.rings:
            self.rings[worker].close()
        self.rings[worker] = FlowRingWriter(self.folder, Incarnation(Role.REWARD, worker, epoch))
        return self.rings[worker]

    def waits(self, worker: str, wait: WaitingFor, *times_s: float) -> None:
        for at_s in times_s:
            counts = (0, 0, list(WaitingFor).index(wait))
            self.rings[worker].state(LinkState(at_s, "", LinkSide.WORKER, counts, 1, 0.0, 3))

    def read(self, now_s: float) -> dict[str, list[tuple[Any, ...]]]:
        tables = self.reader.read(now_s, now_s + WALL_S)
        return {name: rows.tolist() for name, rows in tables.items()}

    def close(self) -> None:
        self.reader.close()
        for ring in self.rings.values():
            ring.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with closing(Host(tmp_path)) as made:
        yield made


def test_a_message_is_a_row_once_by_the_wall_clock(host: Host) -> None:
    assert host.read(100.0) == {}
    write(host.ring("reward-0"), Ended(100.0))
    row = (100.0 + WALL_S, "reward-0", "generator-0>reward-0", "stored", key_of(chunk_id(7)), 12.0, 0.5, 0.25, 0.125, 3)
    assert host.read(101.0) == {"messages": [row]}
    assert host.read(102.0) == {}
    write(host.ring("reward-0", 2), Ended(103.0))
    write(host.ring("reward-1"), Ended(103.0))
    found = host.read(104.0)["messages"]
    assert [(row[0] - WALL_S, row[1]) for row in found] == [(103.0, "reward-0"), (103.0, "reward-1")]


def test_every_outcome_and_link_of_several_rings_is_in_its_row(host: Host) -> None:
    expected = list[tuple[Any, ...]]()
    for place, worker in enumerate(("reward-0", "reward-1")):
        ring = host.ring(worker)
        for number in range(300):
            link = f"generator-{(number + 7 * place) % 80}>{worker}"
            outcome = MessageOutcome(1 + number % 4)
            key = key_of(chunk_id(number))
            done = Ended(float(number), link, outcome, key, number, 0.5, 0.25 * number, 0.125, number - 1)
            write(ring, done, number)
            ring.state(LinkState(float(number), link, LinkSide.SENDER, (1, 2, 3), 4, 5.0, 6))
            named = link if number % 80 < MAX_NAMES else ""
            expected.append((done.at_s + WALL_S, worker, named, outcome.name.lower(), *done[3:]))
    rows = host.read(500.0)
    assert rows == {"messages": expected}


def test_a_worker_waits_in_stretches_which_end_where_the_next_begins(host: Host) -> None:
    host.ring("reward-0")
    host.waits("reward-0", WaitingFor.INPUT, 10.0, 10.1, 10.2)
    host.waits("reward-0", WaitingFor.COMPUTE, 10.3, 10.4)
    rows = host.read(10.4)["waits"]
    assert [(round(row[0] - WALL_S, 3), round(row[1] - WALL_S, 3), *row[2:]) for row in rows] == [
        (10.0, 10.3, "reward-0", "input")
    ]
    assert host.read(10.5) == {}, "the present stretch goes on"
    # nothing was open for seconds: nothing is known about them
    host.waits("reward-0", WaitingFor.INPUT, 20.0)
    (row,) = host.read(20.1)["waits"]
    assert (row[0] - WALL_S, row[3]) == (pytest.approx(10.3), "compute")
    assert 10.4 <= row[1] - WALL_S < 11.0
    (row,) = host.read(25.0)["waits"]
    assert (row[0] - WALL_S, row[1] - WALL_S, row[3]) == (20.0, 20.0, "input")
    assert host.read(26.0) == {}


def test_a_long_wait_becomes_several_rows_without_a_gap(host: Host) -> None:
    host.ring("reward-0")
    host.waits("reward-0", WaitingFor.ROOM, *(at / 10 for at in range(700)))
    rows = host.read(69.9)["waits"] + host.read(80.0)["waits"]
    assert [row[1] for row in rows[:-1]] == [row[0] for row in rows[1:]]
    assert rows[0][0] - WALL_S == 0.0
    assert rows[-1][1] - WALL_S == pytest.approx(69.9)
    assert len(rows) >= 3


def test_overwritten_records_and_those_beyond_a_reading_are_counted(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = host.ring("reward-0")
    write(ring, Ended(1.0))
    host.read(1.0)
    for number in range(NUM_SLOTS + 5):
        write(ring, Ended(2.0), number)
    assert len(host.read(2.0)["messages"]) == NUM_SLOTS
    assert host.reader.num_lost == 5
    monkeypatch.setattr(host_records, "MAX_ROWS", 10)
    for number in range(25):
        write(ring, Ended(3.0), number)
    newest = [key_of(chunk_id(number)) for number in range(15, 25)]
    assert [row[4] for row in host.read(3.0)["messages"]] == newest
    assert host.reader.num_lost == 5 + 15


def test_a_folder_of_another_account_is_not_read(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    write(host.ring("reward-0"), Ended(1.0))
    owner = host.folder.stat().st_uid
    monkeypatch.setattr(host_records.os, "getuid", lambda: owner + 1)
    assert host.read(1.0) == {}
    monkeypatch.undo()
    assert len(host.read(1.0)["messages"]) == 1
