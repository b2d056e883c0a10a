"""Repairs of workers, from the last progress to the next."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pipeline.fleet.repair.records import (
    REPAIRS_NAME,
    RepairRow,
    StepRow,
    read_repair_sums,
    read_repairs,
    read_steps,
    repair_records,
    role_repairs,
)
from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.supervisor.repair_watch import RepairWatch
from protocol.ids import Incarnation, Role


def beat(
    worker: str, pid: int, waiting_for: WaitingFor, progress: int, *, version: int = -1, role: Role = Role.GENERATOR
) -> Worker:
    return Worker(
        who=Incarnation(role, worker, pid), pid=pid, host="here", at_s=0.0, started_s=0.0, progress=progress,
        progress_at_s=0.0, waiting_for=waiting_for, policy_version=version,
    )  # fmt: skip


def see(watch: RepairWatch, now_s: float, *beats: Worker) -> list[RepairRow]:
    return watch.observe(beats, {one.who.worker: one.pid for one in beats}, now_s, 1000.0 + now_s)


def test_the_parts_of_a_repair_are_told_apart_and_add_up():
    watch = RepairWatch()
    watch.lost("generator-0", Role.GENERATOR, "no heartbeat for 20 s", 30.0, stood_s=21.0)
    watch.started("generator-0", 32.0)
    assert see(watch, 33.0, beat("generator-0", 7, WaitingFor.STARTING, 0)) == []
    assert see(watch, 40.0, beat("generator-0", 7, WaitingFor.WEIGHTS, 0)) == []
    (row,) = see(watch, 45.0, beat("generator-0", 7, WaitingFor.COMPUTE, 1))
    assert row == RepairRow(1045.0, "generator-0", "generator", "no heartbeat for 20 s", 21.0, 2.0, 8.0, 5.0)
    assert row.whole_s == 36.0
    assert see(watch, 46.0, beat("generator-0", 7, WaitingFor.COMPUTE, 2)) == []


def test_a_worker_that_is_ended_for_an_incident_has_the_time_to_localise_apart():
    watch = RepairWatch()
    watch.lost("generator-0", Role.GENERATOR, "incident 3", 30.0, stood_s=21.0, localise_s=10.0)
    # the end of its process is no loss of its own
    watch.lost("generator-0", Role.GENERATOR, "killed by SIGKILL", 30.5)
    watch.started("generator-0", 32.0)
    see(watch, 40.0, beat("generator-0", 7, WaitingFor.WEIGHTS, 0))
    (row,) = see(watch, 45.0, beat("generator-0", 7, WaitingFor.COMPUTE, 1))
    assert (row.detect_s, row.localise_s, row.replace_s, row.cause) == (11.0, 10.0, 2.0, "incident 3")
    assert (row.whole_s, row.num_losses) == (36.0, 1)


def test_a_learner_works_again_with_the_first_version_that_was_not_there():
    watch = RepairWatch()
    see(watch, 1.0, beat("learner", 1, WaitingFor.COMPUTE, 9, version=12, role=Role.LEARNER))
    watch.lost("learner", Role.LEARNER, "killed by SIGKILL", 2.0)
    watch.started("learner", 3.0)
    for now_s, version in ((6.0, 10), (7.0, 11), (8.0, 12)):
        assert see(watch, now_s, beat("learner", 2, WaitingFor.COMPUTE, 3, version=version, role=Role.LEARNER)) == []
    (row,) = see(watch, 9.0, beat("learner", 2, WaitingFor.COMPUTE, 4, version=13, role=Role.LEARNER))
    assert (row.detect_s, row.replace_s, row.reload_s, row.repeat_s) == (0.0, 1.0, 3.0, 3.0)


def test_a_successor_that_dies_at_its_start_belongs_to_the_same_repair():
    watch = RepairWatch()
    watch.lost("reward-0", Role.REWARD, "killed by SIGKILL", 10.0)
    watch.started("reward-0", 11.0)
    watch.lost("reward-0", Role.REWARD, "failure", 12.0)
    # the end of a process that was killed as stuck is no loss of its own
    watch.lost("reward-0", Role.REWARD, "killed by SIGKILL", 12.1)
    watch.started("reward-0", 15.0)
    (row,) = see(watch, 16.0, beat("reward-0", 3, WaitingFor.INPUT, 1))
    assert (row.cause, row.num_losses, row.whole_s, row.replace_s) == ("killed by SIGKILL", 2, 6.0, 5.0)


def test_heartbeats_of_the_lost_process_end_no_repair():
    watch = RepairWatch()
    watch.lost("reward-0", Role.REWARD, "stuck", 10.0, stood_s=5.0)
    old = beat("reward-0", 1, WaitingFor.COMPUTE, 50)
    assert see(watch, 10.5, old) == []
    watch.started("reward-0", 11.0)
    assert watch.observe([old], {"reward-0": 2}, 11.5, 0.0) == []


def test_a_worker_that_is_not_wanted_any_more_has_no_repair():
    watch = RepairWatch()
    watch.lost("reward-0", Role.REWARD, "stuck", 10.0)
    watch.left("reward-0")
    watch.started("reward-0", 90.0)
    assert see(watch, 91.0, beat("reward-0", 3, WaitingFor.INPUT, 1)) == []


def row(number: int, *, role: str = "reward", **parts: float) -> RepairRow:
    times = {"detect_s": 1.0, "replace_s": 2.0, "reload_s": 3.0, "repeat_s": 4.0} | parts
    return RepairRow(float(number), f"{role}-{number}", role, "killed", **times)  # pyright: ignore[reportArgumentType]


def test_the_file_keeps_the_newest_and_skips_what_is_damaged(tmp_path: Path):
    assert (read_repairs(tmp_path), read_repair_sums(tmp_path)) == (([], 0), {})
    for number in range(100):
        repair_records(tmp_path, max_bytes=2_000).append(row(number))
        assert (tmp_path / REPAIRS_NAME).stat().st_size <= 2_000
    rows, num_skipped = read_repairs(tmp_path)
    assert num_skipped == 0
    assert [one.at_s for one in rows] == [float(number) for number in range(100 - len(rows), 100)]
    parts = {"detect_s": 100.0, "localise_s": 0.0, "replace_s": 200.0, "reload_s": 300.0, "repeat_s": 400.0}
    assert len(rows) < 20 and read_repair_sums(tmp_path) == parts, "of all repairs, those that are not kept too"
    with (tmp_path / REPAIRS_NAME).open("ab") as file:
        file.write(b'{"at_s": NaN, "worker": "w"}\n[1]\nnonsense\n')
    assert read_repairs(tmp_path) == (rows, 3)
    assert read_repair_sums(tmp_path) == parts


def test_steps_and_repairs_share_a_file_and_each_reader_takes_its_own(tmp_path: Path):
    step = StepRow(5.0, 3, "generator-1", "generator", "evict", "begun", "4 losses in a row", None)
    repair_records(tmp_path).append(row(1))
    repair_records(tmp_path).append(step, replace(step, rung="replay", limit_s=60.0))
    repair_records(tmp_path).append(row(2))
    with (tmp_path / REPAIRS_NAME).open("ab") as file:
        file.write(b'{"kind": "step", "case": "x"}\n{"kind": "step", "at_s": 1}\n{"at_s": "x"}\nnonsense\n')
    assert read_repairs(tmp_path) == ([row(1), row(2)], 4)
    assert read_steps(tmp_path) == [step, replace(step, rung="replay", limit_s=60.0)]
    inode = (tmp_path / REPAIRS_NAME).stat().st_ino
    repair_records(tmp_path).append(step)
    assert (tmp_path / REPAIRS_NAME).stat().st_ino == inode, "it is appended to, not written anew"


def test_repairs_are_summed_up_by_role():
    generators = [row(1, role="generator"), row(2, role="generator", detect_s=11.0)]
    of_generators, of_rewards = role_repairs([row(0), *generators])
    assert (of_generators.number, of_generators.median_s, of_generators.longest_s) == (2, 15.0, 20.0)
    assert of_generators.in_words() == "detect 40 %, replace 13 %, reload 20 %, repeat 27 %"
    parts = {"detect_s": 1.0, "localise_s": 0.0, "replace_s": 2.0, "reload_s": 3.0, "repeat_s": 4.0}
    assert of_rewards.sums == parts


def test_a_repair_names_the_standby_that_took_over_and_no_former_one():
    watch = RepairWatch()
    watch.lost("generator-0", Role.GENERATOR, "killed by SIGKILL", 1.0)
    assert watch.is_open("generator-0") and not watch.is_open("generator-1")
    watch.started("generator-0", 1.1, "standby-4")
    (row,) = see(watch, 2.0, beat("generator-0", 7, WaitingFor.COMPUTE, 1))
    assert row.standby == "standby-4" and not watch.is_open("generator-0")
    watch.lost("generator-0", Role.GENERATOR, "killed by SIGKILL", 3.0)
    watch.started("generator-0", 3.1, "standby-5")
    watch.lost("generator-0", Role.GENERATOR, "killed by SIGKILL", 3.2)
    watch.started("generator-0", 4.0)
    (row,) = see(watch, 5.0, beat("generator-0", 8, WaitingFor.COMPUTE, 1))
    assert (row.standby, row.num_losses) == ("", 2)
