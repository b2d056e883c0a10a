"""A run's recorded files become trace events that keep the format's rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pipeline.fleet.flow.host_records import MESSAGES, WAITS
from pipeline.fleet.incidents.records import IncidentRecord, IncidentStep, incident_records
from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.segments import SegmentWriter
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.observability.timeline import drawing
from pipeline.observability.timeline.drawing import MAX_LANES
from pipeline.observability.timeline.timeline import write_timeline
from protocol.errors import DataError
from tests.pipeline.observability.rows import update_row
from tests.pipeline.observability.timeline.event_rules import TraceFile

BEGAN_S = 1_700_000_000.0
NO_FRAME = Frame(0.0, (), (), (), np.zeros((0, 0), np.float32))
LINK = "generator-0>reward-0"


class Recorded:
    """A run's folder as the observer and the learner leave it: an update every ten seconds."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        self.segments = SegmentWriter(run_dir, keep_bytes=1 << 30)

    def record(self, begin: int, end: int, *, chunks_a_second: int = 2) -> None:
        """Record the seconds of a segment: chunks are judged at once, and trained on at the next
        ten seconds."""
        for at in range(begin, end):
            keys = [100 * at + number for number in range(chunks_a_second)]
            rows = [row(at, key) for key in keys]
            rows += [row(at + 0.5, key, "reward-0", "stored", 0.1, 0.2, 0.05) for key in keys]
            if at % 10 == 9:
                mine = [100 * second + number for second in range(at - 9, at) for number in range(chunks_a_second)]
                version = at // 10 + 1
                rows += [
                    row(at + 0.9, key, "learner", "stored", 0.1, 0.5, 0.2, link="", version=version) for key in mine
                ]
            waits = [(BEGAN_S + at, BEGAN_S + at + 0.4, "reward-0", "input")]
            waits += [(BEGAN_S + at + 0.4, BEGAN_S + at + 0.9, "reward-0", "compute")]
            states = [
                {"time_s": BEGAN_S + at + 0.01, "worker": name, "role": name[:-2], "waiting_for": "compute",
                 "policy_version": version}
                for name, version in (("generator-0", at // 10), ("generator-1", max(0, at - 3) // 10))
            ]  # fmt: skip
            tables: dict[str, Any] = {"messages": np.array(rows, MESSAGES), "waits": np.array(waits, WAITS)}
            self.segments.add(BEGAN_S + at, NO_FRAME, tables | {"states": states})
        self.segments.take()()

    def updates(self, number: int) -> None:
        history = run_history(self.run_dir / HISTORY_NAME)
        for update in range(1, number + 1):
            made = replace(
                update_row(update), update=update, policy_version=update, at_s=BEGAN_S + 10 * update, wait_s=9.0,
                logprob_s=0.2, step_s=0.5, publish_s=0.2, grad_norm=math.nan if update == 2 else 1.0,
            )  # fmt: skip
            history.append(made)

    def drawn(self, **options: Any) -> TraceFile:
        self.report = write_timeline(self.run_dir, self.run_dir / "out.json", **options)
        found = TraceFile(self.run_dir / "out.json")
        assert self.report.num_events == len(found.events)
        return found


def row(
    at: float, key: int, worker: str = "generator-0", outcome: str = "sent", waited: float = 0.3, service: float = 0.0,
    storing: float = 0.0, *, link: str = LINK, version: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    return (BEGAN_S + at, worker, link, outcome, key, 12.0, waited, service, storing, version)


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "run")


@pytest.fixture
def two_minutes(run: Recorded) -> Iterator[Recorded]:
    run.record(0, 60)
    run.record(60, 120)
    run.updates(12)
    yield run


def test_each_worker_has_a_track_of_its_words_and_messages_as_slices(two_minutes: Recorded) -> None:
    found = two_minutes.drawn()
    assert sorted(found.processes.values()) == ["generator-0", "generator-1", "learner", "reward-0"]
    assert two_minutes.report.num_skipped == two_minutes.report.num_not_drawn == 0
    assert {event["name"] for event in found.of("generator-1", "main loop")} == {"compute"}
    assert two_minutes.report.without_messages == ("generator-1",), "as on a joined host"
    words = found.of("reward-0", "main loop")
    assert [event["name"] for event in words] == ["input", "compute"] * 120
    assert words[1]["ts"] == pytest.approx((BEGAN_S + 0.4) * 1e6, abs=1) and words[1]["dur"] == 500_000
    messages = [event for event in found.of("reward-0") if event["name"] == f"message {LINK}"]
    assert len(messages) == 240
    assert messages[0]["args"]["tokens"] == 12.0
    assert messages[0]["ts"] == pytest.approx((BEGAN_S + 0.15) * 1e6, abs=2)
    assert messages[0]["dur"] == pytest.approx(350_000, abs=2)
    assert sum(event["name"] == "work" for event in found.of("reward-0")) == 240


def test_updates_have_their_parts_and_waits_and_no_number_that_is_none(two_minutes: Recorded) -> None:
    events = two_minutes.drawn().of("learner", "updates")
    assert [event["name"] for event in events[:5]] == ["wait for a batch", "update 1", "log-probs", "steps", "publish"]
    assert events[1]["dur"] == 900_000
    (second,) = [event for event in events if event["name"] == "update 2"]
    assert second["args"]["grad_norm"] is None and second["args"]["policy_version"] == 2
    assert two_minutes.report.num_updates == 12


def test_arrows_join_chunks_claims_and_weights_over_the_borders_of_files(two_minutes: Recorded) -> None:
    found = two_minutes.drawn()
    chunks = found.ends("chunk")
    assert len(chunks) == 240
    assert {(begin["name"], end["name"]) for begin, end in chunks} == {(f"send {LINK}", f"message {LINK}")}
    claims = found.ends("claim")
    assert len(claims) == 12 * 18
    for begin, end in claims:
        second = (begin["ts"] + begin["dur"]) / 1e6 - BEGAN_S
        assert begin["name"] == f"message {LINK}" and end["name"] == f"update {int(second // 10) + 1}"
    weights = found.ends("weights")
    assert {begin["name"] for begin, _ in weights} == {f"update {number}" for number in range(1, 12)}
    assert len(weights) == 2 * 11, "of each version to both generators; the last is served by none yet"
    assert [event["name"] for event in found.of("generator-1", "weights")] == [f"version {n}" for n in range(12)]


def test_no_arrow_goes_back_in_time_nor_to_an_update_that_dropped_the_chunk(run: Recorded) -> None:
    run.updates(1)
    rows = [row(5.0, key) for key in (1, 2)]
    rows += [row(3.0 + key, key, "reward-0", "stored", 0.0, 0.5, 0.1) for key in (1, 2)]
    rows += [
        row(10.0, 1, "learner", "unstored", link="", version=1),
        row(9.9, 2, "learner", "stored", link="", version=1),
    ]
    run.segments.add(BEGAN_S, NO_FRAME, {"messages": np.array(rows, MESSAGES)})
    run.segments.take()()
    found = run.drawn()
    assert [round(end["ts"] / 1e6 - BEGAN_S, 1) for _, end in found.ends("chunk")] == [4.4]
    assert [round(begin["ts"] / 1e6 - BEGAN_S, 1) for begin, _ in found.ends("claim")] == [4.4]


def test_a_version_that_a_clock_shows_before_its_publishing_has_no_arrow(run: Recorded) -> None:
    run.updates(1)
    states = [
        {"time_s": BEGAN_S + at, "worker": name, "role": "generator", "waiting_for": "compute", "policy_version": 1}
        for name, at in (("generator-0", 3.0), ("generator-1", 12.0))
    ]
    run.segments.add(BEGAN_S, NO_FRAME, {"states": states})
    run.segments.take()()
    found = run.drawn()
    assert [found.processes[end["pid"], 0] for _, end in found.ends("weights")] == ["generator-1"]


def test_a_batch_of_messages_lies_side_by_side_and_too_many_are_counted(run: Recorded) -> None:
    rows = [row(1.0, key, "reward-0", "stored", 0.1, 0.2, 0.1) for key in range(MAX_LANES + 3)]
    run.segments.add(BEGAN_S, NO_FRAME, {"messages": np.array(rows, MESSAGES)})
    run.segments.take()()
    found = run.drawn()
    assert len(set(found.tracks.values())) == MAX_LANES
    assert run.report.num_messages == MAX_LANES
    assert run.report.num_not_drawn == 3


def test_a_damaged_file_and_a_damaged_line_are_left_out_and_counted(two_minutes: Recorded) -> None:
    first, second = sorted((two_minutes.run_dir / "observed").glob("messages-*.parquet"))
    first.write_bytes(first.read_bytes()[:-40])
    sorted((two_minutes.run_dir / "observed").glob("waits-*.parquet"))[0].write_text("no table")
    with (two_minutes.run_dir / HISTORY_NAME).open("a") as file:
        file.write('{"kind": "update", "upd\n')
    found = two_minutes.drawn()
    assert two_minutes.report.num_skipped == 3
    assert len(found.ends("chunk")) == 120
    second.unlink()
    assert two_minutes.drawn().ends("chunk") == []


def test_incidents_are_slices_with_their_sentence(two_minutes: Recorded) -> None:
    file = incident_records(two_minutes.run_dir)
    opened = IncidentRecord(
        number=1, step=IncidentStep.OPENED, at_s=BEGAN_S + 20, since_s=BEGAN_S + 12, component="reward-0", kind="hung",
        sentence="it stands",
    )  # fmt: skip
    file.append(opened, IncidentRecord(number=1, step=IncidentStep.ENDED, at_s=BEGAN_S + 40, component="reward-0"))
    file.append(replace(opened, number=2, component="generator-1", kind="slow"))
    slow, hung = two_minutes.drawn().of("incidents")
    assert (hung["name"], hung["args"]["sentence"], hung["dur"]) == ("reward-0: hung", "it stands", 28_000_000)
    assert slow["ts"] + slow["dur"] == pytest.approx((BEGAN_S + 120) * 1e6), (
        "an open one goes on to the run's last moment"
    )


def test_the_last_seconds_alone_are_drawn_where_they_are_asked_for(two_minutes: Recorded) -> None:
    whole, last = two_minutes.drawn(), two_minutes.drawn(last_s=25.0)
    ends = [event["ts"] + event["dur"] for event in last.slices]
    assert min(ends) >= (BEGAN_S + 95) * 1e6
    assert len(last.of("reward-0")) < len(whole.of("reward-0")) / 4
    assert {event["name"] for event in last.of("learner") if event["name"].startswith("update")} == {
        "update 10", "update 11", "update 12",
    }  # fmt: skip


def test_what_is_remembered_for_arrows_is_bounded(two_minutes: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_MAX_CHUNKS", 5)
    found = two_minutes.drawn()
    assert len(found.ends("chunk")) == 240, "each is received before five others are sent"
    assert 0 < len(found.ends("claim")) <= 12 * 5


def test_a_run_that_has_recorded_nothing_is_told_so_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="recorded nothing yet"):
        write_timeline(tmp_path, tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_history_alone_is_drawn_too(run: Recorded) -> None:
    run.updates(3)
    assert {event["name"] for event in run.drawn().of("learner")} >= {"update 1", "update 2", "update 3"}
