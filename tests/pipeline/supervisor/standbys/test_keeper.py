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

from pipeline.process.standby_files import StandbyReport, read_reports, write_report
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.supervisor.processes import Processes
from pipeline.supervisor.standbys import keeper as keeping
from pipeline.supervisor.standbys.keeper import StandbyKeeper, standby_roles
from pipeline.supervisor.standbys.pool import StandbyKind
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


def beats(pids: dict[str, int], *, version: int = 3) -> list[Heartbeat]:
    return [
        Heartbeat(
            who=Incarnation(role, name, 1), pid=pids.get(name, 0), host="here", at_s=0.0, started_s=0.0, progress=1,
            progress_at_s=0.0, waiting_for=WaitingFor.INPUT, policy_version=version,
        )
        for name, role in WORKERS.items()
    ]  # fmt: skip


def keep(made: StandbyKeeper, processes: Processes, now_s: float, *, is_over: bool = False) -> None:
    made.keep(now_s, beats(processes.pids), WORKERS, is_over=is_over)


def start_took(made: StandbyKeeper, processes: Processes, seconds: float) -> None:
    processes.start(Role.GENERATOR, "generator-0")
    made.started(0.0, "generator-0", Role.GENERATOR)
    keep(made, processes, seconds)


def report(tmp_path: Path, processes: Processes, name: str, version: int | None = 3, turn: int = 1) -> None:
    one = StandbyReport(processes.standbys[name].pid, turn, GENERIC_ROLES, version, 7 << 20, 1.0)
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
    made.keep(1.0, [], WORKERS, is_over=False)
    assert not processes.standbys
    keep(made, processes, 2.0)
    held = processes.standbys["standby-1"]
    keep(made, processes, 3.0, is_over=True)
    held.wait()


def test_standbys_that_do_not_fit_into_memory_are_left_out_and_that_is_said_once(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=2", free=1 << 20)
    with capture_logs() as logs:
        for turn in range(3):
            keep(made, processes, float(turn))
    said = [line["reason"] for line in logs if line["event"] == "fewer_standbys"]
    assert not processes.standbys and len(said) == 1
    assert said[0].startswith("0 of 2 standbys are kept: one more takes ") and said[0].endswith("and 1 MiB are free")


def test_a_standby_is_taken_once_it_has_weights_and_is_then_a_worker_of_its_process(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    report(tmp_path, processes, "standby-1", version=None)
    keep(made, processes, 2.0)
    assert made.take(2.0, Role.GENERATOR, "generator-0") is None
    report(tmp_path, processes, "standby-1", turn=2)
    keep(made, processes, 3.0)
    pid = processes.standbys["standby-1"].pid
    assert made.take(3.0, Role.GENERATOR, "generator-0") == "standby-1"
    assert processes.pids == {"generator-0": pid} and not processes.standbys
    assert [found.worker for found in Processes(tmp_path).find()] == ["generator-0"], "a later supervisor adopts it"


def test_a_process_that_does_not_obey_its_order_is_ended_and_the_worker_starts_anew(
    tmp_path: Path, processes: Processes
) -> None:
    made = keeper(tmp_path, processes, "fleet.standby=1")
    keep(made, processes, 1.0)
    report(tmp_path, processes, "standby-1")
    keep(made, processes, 2.0)
    made.take(2.0, Role.REWARD, "reward-0")
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
    assert made.take(2.5, Role.GENERATOR, "generator-0") is None
    for now_s in (3.0, 9.0):
        keep(made, processes, now_s)
    assert list(processes.standbys) == ["standby-2"]


def test_a_standby_prepares_only_roles_of_this_host_with_one_rank(tmp_path: Path) -> None:
    config = op_config(tmp_path, "reference.always=true")
    assert standby_roles(config, StandbyKind.GENERIC) == (Role.GENERATOR, Role.REWARD, Role.REFERENCE)
    assert standby_roles(config, StandbyKind.LEARNER) == (Role.LEARNER,)
    config = op_config(tmp_path, "learner.backend=fsdp2", "learner.ranks=2", "reference.always=false")
    assert standby_roles(config, StandbyKind.GENERIC) == (Role.GENERATOR, Role.REWARD)
    assert standby_roles(config, StandbyKind.LEARNER) == ()
