"""Claims about worker processes: their inheritance, and the remains when they have ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.environment import SINK_CREDENTIALS
from pipeline.process.records import process_runs
from pipeline.supervisor.processes import Processes
from protocol.ids import Role

WORKER = """
import json, os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
children = [subprocess.Popen(["sleep", "300"], start_new_session=new).pid for new in (False, True)]
(here / "told.partial").write_text(json.dumps([children, dict(os.environ)]))
(here / "told.partial").rename(here / "told")
time.sleep(300)
"""


def started(run_dir: Path) -> Processes:
    (run_dir / "logs").mkdir()
    return Processes(run_dir, lambda role, folder, name: [sys.executable, "-c", WORKER, str(folder)])


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60.0
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def told(run_dir: Path) -> tuple[list[int], dict[str, str]]:
    until((run_dir / "told").exists)
    return msgspec.json.decode((run_dir / "told").read_bytes(), type=tuple[list[int], dict[str, str]])


@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_what_a_killed_worker_started_is_ended_with_it(tmp_path: Path) -> None:
    processes = started(tmp_path)
    processes.start(Role.REWARD, "reward-1")
    children, _ = told(tmp_path)
    assert set(marked(WORKER_MARK, worker_mark(tmp_path, "reward-1"))) == {*children, processes.pids["reward-1"]}
    assert marked(WORKER_MARK, worker_mark(tmp_path, "reward-10")) == []
    assert marked(WORKER_MARK, worker_mark(tmp_path, "reward")) == []
    os.kill(processes.pids["reward-1"], signal.SIGKILL)
    (ended,) = until(processes.reap)
    assert (ended.worker, ended.code) == ("reward-1", -signal.SIGKILL)
    until(lambda: not any(process_runs(pid) for pid in children))


@pytest.mark.parametrize(("seen", "wanted"), [(None, "1,3"), ("4,5,6,7", "5,7")])
def test_a_worker_sees_its_own_gpus_of_those_that_its_supervisor_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str | None, wanted: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    processes = started(tmp_path)
    processes.gpus = lambda role, name: (1, 3) if (role, name) == (Role.GENERATOR, "generator-1") else ()
    processes.start(Role.GENERATOR, "generator-1")
    assert told(tmp_path)[1]["CUDA_VISIBLE_DEVICES"] == wanted
    processes.kill_all()
    assert until(processes.reap)


def test_a_worker_whose_gpu_its_supervisor_does_not_see_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    processes = started(tmp_path)
    processes.gpus = lambda role, name: (2,)
    processes.start(Role.GENERATOR, "generator-0")
    assert [one.code for one in processes.reap()] == [1] and not processes.pids


def begun_standby(processes: Processes, run_dir: Path) -> list[int]:
    processes.begin_standby("standby-1", [sys.executable, "-c", WORKER, str(run_dir)], [Role.REWARD])
    return told(run_dir)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_what_a_killed_standby_started_is_ended_with_it(tmp_path: Path) -> None:
    processes = started(tmp_path)
    children = begun_standby(processes, tmp_path)
    assert processes.reap_standbys() == {} and all(map(process_runs, children))
    processes.standbys["standby-1"].kill()
    assert until(processes.reap_standbys) == {"standby-1": -signal.SIGKILL}
    until(lambda: not any(process_runs(pid) for pid in children))
    assert not processes.standbys and processes.reap_standbys() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_what_a_standby_started_is_ended_when_its_supervisor_closes(tmp_path: Path) -> None:
    processes = started(tmp_path)
    children = begun_standby(processes, tmp_path)
    processes.close()
    until(lambda: not any(process_runs(pid) for pid in children))


@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_what_a_worker_started_as_a_standby_ends_with_it_and_not_with_its_namesake(tmp_path: Path) -> None:
    former = started(tmp_path)
    children = begun_standby(former, tmp_path)
    former.hand_over("standby-1", Role.REWARD, "reward-0")
    later = Processes(tmp_path)
    (found,) = later.find()
    assert later.adopt(found)
    sleeping = [sys.executable, "-c", "import time; time.sleep(300)"]
    later.begin_standby("standby-1", sleeping, [Role.REWARD]).kill()
    until(later.reap_standbys)
    assert all(map(process_runs, children)), "the worker needs them"
    later.stop("reward-0", now=True)
    assert [ended.worker for ended in until(later.reap)] == ["reward-0"]
    until(lambda: not any(process_runs(pid) for pid in children))
    former.close()


@pytest.mark.skipif(sys.platform != "linux", reason="found by /proc")
def test_what_is_left_of_a_run_is_found_without_any_record(tmp_path: Path) -> None:
    processes = started(tmp_path)
    processes.start(Role.REWARD, "reward-0")
    children, _ = told(tmp_path)
    assert Processes(tmp_path).end_strays() == 3
    until(lambda: not any(process_runs(pid) for pid in children))
    until(processes.reap)


def test_a_worker_inherits_no_password_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:hidden-words@127.0.0.1:1/0")
    monkeypatch.setenv("COPY", "redis://:hidden-words@127.0.0.1:1/0")
    monkeypatch.setenv("KEPT", "as it is")
    processes = started(tmp_path)
    processes.start(Role.GENERATOR, "generator-0")
    _, environment = told(tmp_path)
    processes.close()
    assert environment["KEPT"] == "as it is"
    assert "hidden-words" not in str(environment)


def test_a_worker_inherits_no_key_of_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SINK_CREDENTIALS:
        monkeypatch.setenv(name, "secret-of-a-test")
    processes = started(tmp_path)
    processes.start(Role.GENERATOR, "generator-0")
    _, environment = told(tmp_path)
    processes.close()
    having = {name for name, value in environment.items() if "of-a-test" in value}
    assert having == {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}, "it sends spans itself"


def test_a_worker_inherits_no_credentials_of_object_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-a-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    monkeypatch.setenv("COPY", "secret-of-a-test")
    processes = started(tmp_path)
    processes.start(Role.GENERATOR, "generator-0")
    _, environment = told(tmp_path)
    processes.close()
    assert "of-a-test" not in str(environment)
