"""Claims about keeping standbys: how many are wanted, memory that does not fit, and orders that are
not obeyed. Processes are real; time is a number."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.fleet.state import Worker
from pipeline.process.records import StandbyReport, read_reports, write_report
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.supervisor import standbys as keeping
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.processes import Processes
from pipeline.supervisor.standbys import StandbyKeeper, StandbyKind, standby_bytes, standby_roles
from protocol.ids import Incarnation, Role
from tests.pipeline.op_config import op_config

WORKERS = {"learner": Role.LEARNER, "generator-0": Role.GENERATOR, "reward-0": Role.REWARD}
GENERIC_ROLES = ("generator", "reward")


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    (tmp_path / "logs").mkdir()
    sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
    monkeypatch.setattr(keeping, "standby_command", lambda *_: sleeping)
    monkeypatch.setattr(keeping, "_GPUS", "no-such-device*")
    made = Processes(tmp_path, lambda *_: sleeping)
    yield made
    made.close()


def keeper(tmp_path: Path, processes: Processes, *overrides: str, free: int = 1 << 40) -> StandbyKeeper:
    config = op_config(tmp_path, "reference.always=false", *overrides)
    return StandbyKeeper(config, tmp_path, processes, free=lambda: free)


def beats(pids: dict[str, int], *, version: int = 3) -> list[Worker]:
    return [
        Worker(
            who=Incarnation(role, name, 1), pid=pids.get(name, 0), host="here", at_s=0.0, started_s=0.0, progress=1,
            progress_at_s=0.0, waiting_for=WaitingFor.INPUT, policy_version=version,
        )
        for name, role in WORKERS.items()
    ]  # fmt: skip


def keep(made: StandbyKeeper, processes: Processes, now_s: float, *, is_over: bool = False) -> None:
    act(made, processes, now_s, made.reconcile(now_s, beats(processes.pids), WORKERS, is_over=is_over))


def act(made: StandbyKeeper, processes: Processes, now_s: float, wanted: list[Intervention]) -> None:
    for one in wanted:
        if one.verb is Verb.START:
            made.start(now_s, one.worker)
        else:
            assert not one.reason or "did not carry out its order" in one.reason
            processes.stop(one.worker, now=True)


def start_took(made: StandbyKeeper, processes: Processes, seconds: float) -> None:
    processes.start(Role.GENERATOR, "generator-0")
    made.started(0.0, "generator-0", Role.GENERATOR)
    keep(made, processes, seconds)


def report(
    tmp_path: Path,
    processes: Processes,
    name: str,
    version: int | None = 3,
    turn: int = 1,
    roles: tuple[str, ...] = GENERIC_ROLES,
    memory_bytes: int = 7 << 20,
) -> None:
    one = StandbyReport(processes.standbys[name].pid, turn, roles, version, memory_bytes, 1.0)
    write_report(tmp_path, name, one)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("seconds", "names"), [(9.0, []), (11.0, ["standby-1"])])
def test_automatic_standbys_are_kept_where_a_start_takes_ten_seconds(
    tmp_path: Path, processes: Processes, seconds: float, names: list[str]
) -> None:
    start_took(keeper(tmp_path, processes, "fleet.standby=auto"), processes, seconds)
    assert list(processes.standbys) == names


def test_a_fleet_keeps_standbys_only_if_its_run_file_has_them(tmp_path: Path, processes: Processes) -> None:
    start_took(keeper(tmp_path, processes), processes, 60.0)
    assert not processes.standbys


def test_no_standby_is_started_while_a_worker_starts_and_none_is_kept_at_the_end(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    made.reconcile(1.0, [], WORKERS, is_over=False)
    assert not processes.standbys
    keep(made, processes, 2.0)
    held = processes.standbys["standby-1"]
    with capture_logs() as told:
        keep(made, processes, 3.0, is_over=True)
        held.wait()
        keep(made, processes, 4.0, is_over=True)
    assert not processes.standbys
    assert [line["event"] for line in told] == ["standby_ended"], "its end was ordered, and is no loss"


def test_a_worker_that_never_comes_up_holds_refills_up_for_the_time_of_a_start_alone(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    start_took(made, processes, 30.0)
    processes.standbys["standby-1"].kill()
    processes.standbys["standby-1"].wait()
    for now_s in range(100, 180):
        without = [beat for beat in beats(processes.pids) if beat.who.worker != "generator-0"]
        act(made, processes, now_s, made.reconcile(float(now_s), without, WORKERS, is_over=False))
        # a start takes 30 s: twice that, and 10 s
        assert bool(processes.standbys) == (now_s > 170), now_s


def test_a_worker_that_was_back_holds_refills_up_anew(tmp_path: Path, processes: Processes) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1", "supervisor.start_timeout_s=20")
    for now_s in (0.0, 15.0):
        made.reconcile(now_s, [], WORKERS, is_over=False)
    keep(made, processes, 19.0)
    processes.standbys["standby-1"].kill()
    processes.standbys["standby-1"].wait()
    for now_s, is_there in ((21.0, False), (40.0, False), (42.0, True)):
        act(made, processes, now_s, made.reconcile(now_s, [], WORKERS, is_over=False))
        assert bool(processes.standbys) == is_there, now_s


def said(logs: list[Any]) -> list[str]:
    return [line["reason"] for line in logs if line["event"] == "fewer_standbys"]


def test_standbys_that_do_not_fit_into_memory_are_left_out_and_it_is_said_once(
    tmp_path: Path, processes: Processes
) -> None:
    free = [1 << 20]
    config = op_config(tmp_path, "reference.always=false", "fleet.standby=2")
    made = StandbyKeeper(config, tmp_path, processes, free=lambda: free[0])
    with capture_logs() as logs:
        for turn in range(3):
            keep(made, processes, float(turn))
    assert not processes.standbys and len(said(logs)) == 1
    assert said(logs)[0].startswith("0 of 2 standbys are kept: one more takes ")
    assert said(logs)[0].endswith("and 1 MiB are free")
    free[0] = 1 << 40
    keep(made, processes, 3.0)
    assert list(processes.standbys) == ["standby-1", "standby-2"]
    free[0] = 2 << 20
    for name in ("standby-1", "standby-2"):
        report(tmp_path, processes, name)
    keep(made, processes, 4.0)
    made.take_over(5.0, Role.REWARD, "reward-0")
    made.take_over(5.0, Role.GENERATOR, "generator-0")
    with capture_logs() as logs:
        for now_s in (5.0, 6.0):
            keep(made, processes, now_s)
        free[0] = 8 << 20
        keep(made, processes, 7.0)
    assert [words.split(":")[0] for words in said(logs)] == [f"{num} of 2 standbys are kept" for num in (0, 1)]


def test_memory_that_starting_standbys_will_take_is_not_given_twice(tmp_path: Path, processes: Processes) -> None:
    config = op_config(tmp_path, "reference.always=false", "fleet.standby=3")
    need = standby_bytes(config, (Role.GENERATOR, Role.REWARD))
    free = [2 * need + need // 2]
    made = StandbyKeeper(config, tmp_path, processes, free=lambda: free[0])
    for now_s in (1.0, 2.0):
        keep(made, processes, now_s)
        assert list(processes.standbys) == ["standby-1", "standby-2"], "neither has taken anything yet"
    # one has taken all, the other little
    report(tmp_path, processes, "standby-1", roles=(), memory_bytes=need)
    report(tmp_path, processes, "standby-2", roles=(), memory_bytes=1 << 20)
    free[0] -= need + (1 << 20)
    keep(made, processes, 3.0)
    assert len(processes.standbys) == 2
    free[0] += need // 2
    keep(made, processes, 4.0)
    assert len(processes.standbys) == 3


def test_where_memory_is_short_one_standby_of_each_kind_comes_first(tmp_path: Path, processes: Processes) -> None:
    config = op_config(tmp_path, "reference.always=false", "fleet.standby=3", "fleet.standby_learner=on")
    free = standby_bytes(config, (Role.GENERATOR, Role.REWARD)) + standby_bytes(config, (Role.LEARNER,))
    made = StandbyKeeper(config, tmp_path, processes, free=lambda: free)
    keep(made, processes, 1.0)
    assert list(processes.standbys) == ["standby-1", "learner-standby-2"]


def test_a_kind_that_is_given_up_is_said_to_be_and_takes_no_memory_from_the_other(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(run_dir: Path, name: str, roles: tuple[Role, ...]) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(300)" if Role.LEARNER in roles else ""]

    monkeypatch.setattr(keeping, "standby_command", command)
    config = op_config(tmp_path, "reference.always=false", "fleet.standby=1", "fleet.standby_learner=on")
    free = [1 << 40]
    made = StandbyKeeper(config, tmp_path, processes, free=lambda: free[0])
    with capture_logs() as logs:
        for now_s in range(1, 1000, 10):
            keep(made, processes, float(now_s))
            for name, process in processes.standbys.items():
                if name.startswith("learner"):
                    report(tmp_path, processes, name, turn=now_s, roles=("learner",), version=None)
                else:
                    process.wait()
    given_up = "no standby is started any more: 6 in a row failed, 5 are allowed"
    assert [words.split(";")[0] for words in said(logs)] == [given_up]
    (learners,) = processes.standbys
    free[0] = standby_bytes(config, (Role.LEARNER,))
    processes.standbys[learners].kill()
    processes.standbys[learners].wait()
    for now_s in (1001.0, 1010.0):
        keep(made, processes, now_s)
    assert [name.startswith("learner") for name in processes.standbys] == [True]


def test_the_automatic_number_grows_with_repairs_of_its_roles_and_with_the_refill(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=auto", "recovery.faults_per_day=1")
    start_took(made, processes, 60.0)
    for now_s in (600.0, 5900.0, 5950.0):
        report(tmp_path, processes, "standby-1", turn=int(now_s))
        keep(made, processes, now_s)
        assert list(processes.standbys) == ["standby-1"], "a generic standby becomes no learner"
        for _ in range(40):
            made.repaired(Role.LEARNER)
    for _ in range(3):
        made.repaired(Role.GENERATOR)
    # the refill took 540 s: in that time both workers fail with P = 0.016, in 60 s with 0.0002
    keep(made, processes, 5960.0)
    assert list(processes.standbys) == ["standby-1", "standby-2"]


def test_a_standby_is_taken_once_it_has_weights_and_is_then_a_worker_of_its_process(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    report(tmp_path, processes, "standby-1", version=None)
    keep(made, processes, 2.0)
    assert made.take_over(2.0, Role.GENERATOR, "generator-0") is None
    report(tmp_path, processes, "standby-1", turn=2)
    keep(made, processes, 3.0)
    pid = processes.standbys["standby-1"].pid
    assert made.take_over(3.0, Role.GENERATOR, "generator-0") == "standby-1"
    assert processes.pids == {"generator-0": pid} and not processes.standbys
    assert [found.worker for found in Processes(tmp_path).find()] == ["generator-0"], "a later supervisor adopts it"


def test_a_process_that_does_not_obey_its_order_is_ended_and_the_worker_starts_anew(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    report(tmp_path, processes, "standby-1")
    keep(made, processes, 2.0)
    made.take_over(2.0, Role.REWARD, "reward-0")
    keep(made, processes, 6.0)
    assert "reward-0" in processes.pids and not processes.reap()
    keep(made, processes, 7.5)
    until(lambda: [exit_.worker for exit_ in processes.reap()] == ["reward-0"])
    assert "standby-1" not in read_reports(tmp_path)


def test_a_dead_standby_is_replaced_by_another_one_and_never_taken(tmp_path: Path, processes: Processes) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    report(tmp_path, processes, "standby-1")
    keep(made, processes, 2.0)
    processes.standbys["standby-1"].kill()
    processes.standbys["standby-1"].wait()
    assert made.take_over(2.5, Role.GENERATOR, "generator-0") is None
    for now_s in (3.0, 9.0):
        keep(made, processes, now_s)
    assert list(processes.standbys) == ["standby-2"]


def test_a_standby_is_ready_once_it_reports_roles_and_then_its_memory_is_known(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    with capture_logs() as logs:
        report(tmp_path, processes, "standby-1", roles=(), version=None)
        keep(made, processes, 2.0)
        assert made.roles == frozenset() and not logs
        report(tmp_path, processes, "standby-1", turn=2)
        keep(made, processes, 3.0)
        report(tmp_path, processes, "standby-1", turn=3)
        keep(made, processes, 4.0)
    assert made.roles == {Role.GENERATOR, Role.REWARD}
    assert [line["memory_bytes"] for line in logs if line["event"] == "standby_ready"] == [7 << 20]


def test_a_standby_prepares_only_roles_of_this_host_with_one_rank(tmp_path: Path) -> None:
    config = op_config(tmp_path, "reference.always=true")
    assert standby_roles(config, StandbyKind.GENERIC) == (Role.GENERATOR, Role.REWARD, Role.REFERENCE)
    assert standby_roles(config, StandbyKind.LEARNER) == (Role.LEARNER,)
    config = op_config(tmp_path, "learner.backend=fsdp2", "learner.ranks=2", "reference.always=false")
    assert standby_roles(config, StandbyKind.GENERIC) == (Role.GENERATOR, Role.REWARD)
    assert standby_roles(config, StandbyKind.LEARNER) == ()
