"""Every file of records of a run keeps the same promises."""

from __future__ import annotations

import json
import math
import os
import resource
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.files.records import RecordFile, Schema, skipped_words
from pipeline.fleet.incidents.records import IncidentRecord, IncidentStep, RunIncidents, incident_records
from pipeline.fleet.repair.records import RepairRow, RepairSums, StepRow, repair_records
from pipeline.observability.fleet_history import FleetRow, RoleTime, fleet_history
from pipeline.observability.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    RefusedRow,
    UpdateRow,
    resume_history,
    run_history,
)
from pipeline.observability.prompt_accuracies import PromptAccuracies, prompt_accuracies
from pipeline.observability.samples import ResponseSample, TokenDetail, response_samples
from pipeline.observability.start_record import EndRow, StartRow, read_starts, start_records
from protocol.errors import DataError
from tests.pipeline.observability.rows import evaluation_row, update_row, value_row

EARLIER = Path(__file__).with_name("run_folder")
"""The records of a run of a release from before all files had one format."""


@dataclass(frozen=True)
class Store:
    """One of a run's files, with records for it."""

    file: Callable[[Path], RecordFile[Any]]
    records: tuple[Any, ...]
    not_finite: Any
    """A record with NaN and infinity."""
    bounded: Callable[[Path], RecordFile[Any]] | None = None
    """The file with a limit of 4,000 bytes."""
    is_tagged: bool = True


def _sample(update: int, **fields: Any) -> ResponseSample:
    tokens = TokenDetail((1, 2), (-0.5, -0.25), ((3, 1), (4, 1)), (1.0,), ((0, 7),))
    given: dict[str, Any] = {"reward": 1.0, "accuracy": 1.0, "parts": {"correct": 1.0}, "tokens": tokens} | fields
    texts = {
        "prompt": "2+2=",
        "answer": "4",
        "verifier": "math",
        "response": "4 \x1b 四 \ud800",
        "finish_reason": "stop",
    }
    return ResponseSample(update, update, f"t.{update}.0", **texts, num_tokens=2, versions=(3, 4), **given)


def _fleet_row(number: int, compute: float = 0.5) -> FleetRow:
    span = RoleTime(1.0, {"compute": compute, "input": 0.5}, tokens=100)
    return FleetRow(5.0 * number, 5.0, {"learner": span}, num_groups_dropped={"no_signal": 6})


def _incident(number: int, step: IncidentStep = IncidentStep.OPENED, **fields: Any) -> IncidentRecord:
    return IncidentRecord(number=number, step=step, at_s=10.0 * number, component="learner", **fields)


def _repair(number: int, **fields: Any) -> RepairRow:
    return replace(RepairRow(float(number), "learner", "learner", "killed", 0.5, 1.0, 2.0, 3.0), **fields)


STORES = {
    "history": Store(
        lambda folder: run_history(folder / HISTORY_NAME),
        (evaluation_row(0, 0, 0.2), update_row(1), RefusedRow(2, 1, 1002.0, 64, 1, 0.5, 9.0), update_row(2)),
        replace(update_row(1), loss=math.nan, metrics={"entropy": -math.inf}, reward_parts={"length": math.inf}),
    ),
    "value history": Store(
        lambda folder: run_history(folder / VALUE_HISTORY_NAME),
        (value_row(1), value_row(2), value_row(3)),
        replace(value_row(1), loss=math.inf, grad_norm=math.nan),
    ),
    "fleet history": Store(
        fleet_history,
        (_fleet_row(1), _fleet_row(2), _fleet_row(3)),
        _fleet_row(1, compute=math.nan),
        bounded=lambda folder: fleet_history(folder, max_bytes=4_000),
        is_tagged=False,
    ),
    "samples": Store(
        response_samples,
        (_sample(1), _sample(2, tokens=None, kind="no_signal"), _sample(3, masked=True)),
        _sample(1, reward=math.nan, parts={"correct": -math.inf}),
        is_tagged=False,
    ),
    "starts": Store(
        start_records,
        (StartRow(1.0, seed=3, gpus=["H100"], packages={"torch": "2.13"}), EndRow(2.0, "finished"), StartRow(3.0)),
        EndRow(math.inf, "failed"),
        bounded=lambda folder: start_records(folder, max_bytes=4_000),
    ),
    "incidents": Store(
        incident_records,
        (_incident(1), _incident(1, IncidentStep.ENDED), _incident(2, evidence=("a", "b"))),
        _incident(1, score=math.inf),
        bounded=lambda folder: incident_records(folder, max_bytes=4_000),
        is_tagged=False,
    ),
    "repairs": Store(
        repair_records,
        (_repair(1), StepRow(2.0, 1, "learner", "learner", "restart", "begun", "killed", 30.0), _repair(3)),
        _repair(1, detect_s=math.nan),
        bounded=lambda folder: repair_records(folder, max_bytes=4_000),
    ),
    "evaluations": Store(
        prompt_accuracies,
        tuple(PromptAccuracies(number, number, "", "digest", [1.0, None, 0.25]) for number in range(3)),
        PromptAccuracies(1, 1, "", "digest", [math.nan, None]),
        bounded=lambda folder: prompt_accuracies(folder, max_bytes=4_000),
        is_tagged=False,
    ),
}
DAMAGE = (
    b"\x00\xff not a record\n",
    b"[1, 2]\n",
    b"{}\n",
    b'{"kind": 7}\n',
    b'{"at_s": "x"}\n',
    b"[" * 100_000 + b"\n",
)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Store:
    return STORES[request.param]


@pytest.fixture
def file(store: Store, tmp_path: Path) -> RecordFile[Any]:
    """The store's file, with its records."""
    found = store.file(tmp_path)
    found.append(*store.records)
    return found


def _write(file: RecordFile[Any], data: bytes) -> None:
    with file.path.open("ab") as raw:
        raw.write(data)


def test_records_come_back_as_they_were_appended_and_only_their_owner_reads_them(
    store: Store, file: RecordFile[Any]
) -> None:
    assert file.read() == (list(store.records), 0)
    assert list(file.read_strictly()) == list(store.records)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.path.read_bytes().isascii() and len(file.path.read_bytes().splitlines()) == len(store.records)


def test_a_file_that_is_missing_has_no_records(store: Store, tmp_path: Path) -> None:
    missing = store.file(tmp_path)
    missing.append()
    missing.sync()
    assert not missing.path.exists()
    for _ in range(2):
        assert (missing.read(), list(missing.read_strictly()), list(missing.tail())) == (([], 0), [], [])
        missing.resume(lambda _: False)
        assert (missing.path.stat().st_size, stat.S_IMODE(missing.path.stat().st_mode)) == (0, 0o600)


def test_numbers_that_are_not_finite_are_strings_that_every_json_reader_accepts(store: Store, tmp_path: Path) -> None:
    file = store.file(tmp_path)
    file.append(store.not_finite)
    line = file.path.read_text()
    json.loads(line, parse_constant=pytest.fail)
    assert repr(file.read()) == repr(([store.not_finite], 0)), "NaN does not equal itself"
    for word in ("NaN", "-Infinity", "Infinity"):
        line = line.replace(f'"{word}"', word)
    file.path.write_text(line)
    assert repr(file.read()) == repr(([store.not_finite], 0)), "bare words, as earlier releases wrote some of them"


def test_resuming_drops_what_is_refused_and_an_unfinished_line_and_keeps_every_other_byte(
    store: Store, file: RecordFile[Any]
) -> None:
    lines = file.path.read_bytes().splitlines(keepends=True)
    later = lines[0][:-2] + b', "later_field": [1]}\n', b'{"kind": "of a newer release"}\n' if store.is_tagged else b""
    file.path.write_bytes(b"".join([*later, *lines]) + lines[0][:-1])
    file.resume(lambda record: record != store.records[1])
    assert file.path.read_bytes() == b"".join([*later, *(line for at, line in enumerate(lines) if at != 1)])
    inode = file.path.stat().st_ino
    file.resume(lambda record: True)
    assert file.path.stat().st_ino == inode, "nothing to drop, so readers need not start over"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_in_the_middle_is_counted_in_views_and_refused_by_a_writer_that_resumes(
    store: Store, file: RecordFile[Any], damage: bytes
) -> None:
    _write(file, damage)
    assert list(file.read_strictly()) == list(store.records), "the last line may have been cut short by a crash"
    file.append(*store.records)
    assert file.read() == (list(store.records) * 2, 1)
    place = rf"{file.path.name}:{len(store.records) + 1}: not a record of this file: .*; remove the line"
    before = file.path.read_bytes()
    for refuse in (lambda: list(file.read_strictly()), lambda: file.resume(lambda _: True)):
        with pytest.raises(DataError, match=place):
            refuse()
    assert file.path.read_bytes() == before


def test_fields_and_kinds_of_a_newer_release_are_passed_over_and_kinds_are_counted(
    store: Store, file: RecordFile[Any]
) -> None:
    newer = {**json.loads(file.path.read_bytes().splitlines()[0]), "later_field": {"a": [1]}}
    _write(file, json.dumps(newer).encode() + b"\n")
    assert file.read() == ([*store.records, store.records[0]], 0)
    if store.is_tagged:
        _write(file, b'{"kind": "tide", "at_s": 1.0}\n')
        file.append(store.records[0])
        assert file.read() == ([*store.records, *store.records[:1] * 2], 1)
        assert list(file.read_strictly()) == [*store.records, *store.records[:1] * 2]


def test_a_tail_reads_each_record_once_and_starts_over_when_the_file_is_replaced_cut_or_removed(
    store: Store, tmp_path: Path
) -> None:
    first, second, third = store.records[:3]
    file, restarts = store.file(tmp_path), list[int]()
    tail = file.tail(lambda: restarts.append(1))
    assert list(tail) == []
    file.append(first, second)
    assert next(iter(tail)) == first
    assert list(tail) == [second], "an iteration that stopped early continues there"
    _write(file, b"\x0c half a \x0b line\n" + b'{"being": "wri')
    assert (list(tail), tail.num_skipped) == ([], 1)
    _write(file, b'tten"\n')
    file.append(third)
    assert (list(tail), tail.num_skipped, restarts) == ([third], 2, [])
    file.rewrite([second])
    assert (list(tail), tail.num_skipped, restarts) == ([second], 0, [1])
    file.path.write_bytes(b"")
    file.append(first)
    os.truncate(file.path, 0)
    assert (list(tail), restarts) == ([], [1, 1])
    file.path.unlink()
    assert (list(tail), restarts) == ([], [1, 1, 1])
    file.append(third)
    assert (list(tail), restarts) == ([third], [1, 1, 1])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0.0, 1.0))
@example(cut=0.0)
@example(cut=1.0)
def test_wherever_a_crash_cuts_the_file_whole_records_stay_and_the_next_is_not_lost(
    store: Store, tmp_path: Path, cut: float
) -> None:
    file = store.file(tmp_path)
    file.rewrite(store.records)
    lines = file.path.read_bytes().splitlines(keepends=True)
    at = round(cut * file.path.stat().st_size)
    num_whole = sum(sum(map(len, lines[: number + 1])) <= at for number in range(len(lines)))
    # all but the line's end was written, so the next append completes it
    num_completed = sum(sum(map(len, lines[: number + 1])) - 1 <= at for number in range(len(lines)))
    os.truncate(file.path, at)
    torn = file.path.read_bytes()
    assert file.read() == (list(store.records[:num_whole]), 0)
    assert list(file.read_strictly()) == list(store.records[:num_whole])
    file.append(store.records[0])
    found, num_skipped = file.read()
    assert found == [*store.records[:num_completed], store.records[0]]
    assert num_skipped == (not torn.endswith(b"\n") and at > 0 and num_whole == num_completed)
    file.path.write_bytes(torn)
    file.resume(lambda _: True)
    assert file.path.read_bytes() == b"".join(lines[:num_whole])


def test_a_disk_that_gets_full_leaves_no_part_of_a_record(store: Store, file: RecordFile[Any]) -> None:
    before = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append(store.records[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.path.read_bytes() == before


def test_a_reader_beside_the_writer_sees_whole_records_in_order(store: Store, tmp_path: Path) -> None:
    file = store.file(tmp_path)
    tail, found, deadline_s = file.tail(), list[Any](), time.monotonic() + 30.0
    wanted = list(store.records) * 100
    writer = Thread(target=lambda: [file.append(record) for record in wanted])
    writer.start()
    while len(found) < len(wanted) and time.monotonic() < deadline_s:
        found += tail
    writer.join()
    assert found == wanted
    assert tail.num_skipped == 0


BOUNDED = [name for name, store in STORES.items() if store.bounded is not None]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bounded_file_keeps_its_limit_and_its_newest_record_however_long_the_run(name: str, tmp_path: Path) -> None:
    bounded = STORES[name].bounded
    assert bounded is not None
    file = bounded(tmp_path)
    newest = STORES[name].records[-1]
    for number in range(400):
        if isinstance(newest, IncidentRecord):
            # incidents that have ended, because open ones are kept
            file.append(_incident(number + 1), _incident(number + 1, IncidentStep.ENDED))
            newest = _incident(number + 1, IncidentStep.ENDED)
        elif isinstance(newest, FleetRow):
            newest = _fleet_row(number)
            file.append(newest)
        else:
            newest = replace(newest, **{"number" if isinstance(newest, PromptAccuracies) else "at_s": number})
            file.append(newest)
        assert file.path.stat().st_size <= 4_000
    found, num_skipped = file.read()
    assert (num_skipped, found[-1].__class__) == (0, newest.__class__)
    assert found[-1] == newest or isinstance(newest, FleetRow)


# -- the files of earlier releases -----------------------------------------------------------------


def test_a_run_folder_of_an_earlier_release_is_read_without_a_loss() -> None:
    for name in (
        "history",
        "value history",
        "fleet history",
        "samples",
        "starts",
        "incidents",
        "repairs",
        "evaluations",
    ):
        file = STORES[name].file(EARLIER)
        found, num_skipped = file.read()
        assert (len(found), num_skipped) == (len(file.path.read_bytes().splitlines()), 0), name
        assert repr(list(file.read_strictly())) == repr(found)


def test_every_kind_of_an_earlier_release_has_its_values() -> None:
    first, _, bad, refused, last = run_history(EARLIER / HISTORY_NAME).read()[0]
    assert isinstance(first, EvaluationRow) and isinstance(last, EvaluationRow)
    assert (first.accuracy, first.low, first.pass_at_k, last.pass_at_k) == (0.34375, 0.20410437836619277, None, 0.75)
    assert isinstance(bad, UpdateRow) and isinstance(refused, RefusedRow)
    assert bad.loss == math.inf and math.isnan(bad.grad_norm) and math.isnan(bad.metrics["nll"])
    assert bad.reward_parts == {"correct": -math.inf}
    assert bad.histograms["length"].counts == (17, 4, *[0] * 10, 3, 0, 8)
    assert math.isnan(refused.loss) and refused.grad_norm == -math.inf
    *_, sample = response_samples(EARLIER).read()[0]
    assert (sample.response, sample.versions) == ("café 四 😀 \ud800 \x1b[2J", (0, 0))
    assert math.isnan(sample.reward) and sample.tokens is not None and math.isnan(sample.tokens.logprobs[0])
    assert sample.tokens.segments == ((0, 11),)
    (ended, running), _ = read_starts(EARLIER)
    assert ended.end == EndRow(1795947460.06295, "finished", "4 updates done") and running.end is None
    assert ended.start.gpus == ["NVIDIA H100 80GB HBM3"] and ended.start.packages["numpy"] == "2.4.6"
    sums, step, repair = repair_records(EARLIER).read()[0]
    assert sums == RepairSums(0.5, 0.25, 2.0, 4.0, 6.0)
    assert isinstance(step, StepRow) and (step.rung, step.limit_s) == ("restart", 30.0)
    assert repair == RepairRow(20.0, "reward-0", "reward", "killed", 0.25, 1.0, 2.0, 3.0), "it had no kind"
    assert prompt_accuracies(EARLIER).read()[0][1].accuracies == [1.0, 0.0, 1.0, 1.0, 0.0, None]
    of_learner, of_reward = RunIncidents(EARLIER).read()
    assert (of_learner.kinds, of_learner.is_open, of_learner.stacks) == (
        ("slow", "hung"),
        True,
        ("forward, at model.py:10",),
    )
    assert (of_reward.kinds, of_reward.is_open, of_reward.ended_s) == (("slow",), False, 10.0), (
        "it began in the older file"
    )


def test_an_earlier_run_resumes_and_its_lines_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_NAME
    before = (EARLIER / HISTORY_NAME).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before))
    resume_history(path, last_version=1).append(update_row(2))
    kept = path.read_bytes().splitlines(keepends=True)
    assert kept[:-1] == before[:2]
    assert run_history(path).read()[0][-1] == update_row(2)


def test_what_was_skipped_is_said_in_one_sentence() -> None:
    assert skipped_words(0, "h.jsonl") == ""
    assert skipped_words(1, "h.jsonl").startswith("1 line of h.jsonl skipped, damaged or of a newer release")


def test_the_line_of_a_record_does_not_depend_on_the_order_of_its_fields() -> None:
    schema: Schema[StartRow | EndRow] = Schema(StartRow | EndRow)
    assert schema.decode(b'{"state": "failed", "at_s": 1, "kind": "end"}') == EndRow(1.0, "failed")
