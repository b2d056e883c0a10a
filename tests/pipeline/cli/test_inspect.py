"""Commands that only read write nothing and start nothing of the run, in any state of the run, and
end by their deadline."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis
from click.testing import CliRunner, Result
from msgspec.structs import replace

from pipeline.cli import headrace
from pipeline.config import CHANGES_NAME
from pipeline.fleet.why.silence import silence, whereabouts
from pipeline.ledger.address import read_address, write_address
from pipeline.ledger.server import copy as server_copy
from pipeline.ledger.server.embedded import EmbeddedServer, server_runs
from pipeline.observability.start_record import StartRow, start_records
from pipeline.operator.attached import Attached, attach
from pipeline.process.records import identify
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.runtime.registry.settings_change import after
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import Field
from tests.mute import Manner, mute_server
from tests.pipeline.cli.probe import run_command
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.made_run import stopped_run
from tests.pipeline.observability.rows import update_row
from tests.pipeline.observability.test_device_time import write_history

pytestmark = pytest.mark.timeout(120)
LOOKS = (
    "status",
    "ledger queues",
    "ledger groups",
    "ledger versions",
    "ledger drops",
    "ledger trajectory t.1.0 --run",
    "why",
    "ledger audit",
    "ledger peek t.1.0.0 --run",
    "ledger dead-letters list",
    "ledger dead-letters show t.0.0.0 --run",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with a chunk and a dead letter in its ledger."""

    async def leave_work_behind(at: Attached) -> None:
        who = await at.registry.register(Role.GENERATOR, "generator-0")
        await at.ledger.lease(who, max_trajectories=8)
        for name in (TrajectoryId("t", 0, 0), TrajectoryId("t", 1, 0)):
            await at.ledger.write_chunk(who, make_chunk(name))
        scorer, dead = Incarnation(Role.REWARD, "reward-9", 1), make_chunk(TrajectoryId("t", 0, 0)).id
        while not await at.ledger.fail_score(scorer, dead, Field.REWARD, "no boxed answer"):
            pass

    return stopped_run(tmp_path_factory.mktemp("ended"), leave_work_behind)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where copies lie; nothing is left there."""
    short = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield short
    assert list(short.iterdir()) == []
    short.rmdir()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = {str(path): path for path in (folder, *folder.rglob("*"))}
    return {
        name: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for name, path in found.items()
    }


def invoke(words: str, run_dir: Path) -> Result:
    return CliRunner().invoke(headrace, [*words.split(), str(run_dir)], standalone_mode=False)


def test_a_look_at_a_run_without_a_server_leaves_its_folder_as_it_was(run_dir: Path, place: Path) -> None:
    before = contents(run_dir)
    for words in LOOKS:
        done = invoke(words, run_dir)
        assert done.exception is None, (words, done.exception, done.output)
        assert done.output.strip()
        assert contents(run_dir) == before, words
        assert not server_runs(run_dir)
        assert list(place.iterdir()) == [], words
    # which its copy does not outlive
    assert isinstance(invoke("ledger peek t.7.0.0 --run", run_dir).exception, ConfigError)
    assert contents(run_dir) == before
    assert "no boxed answer" in invoke("ledger dead-letters show t.0.0.0 --run", run_dir).output


def test_status_has_the_effective_time_of_a_run_with_updates(run_dir: Path, place: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run_dir, other)
    start_records(other).append(StartRow(at_s=0.0))
    write_history(other, *[replace(update_row(n), at_s=10.0 * n) for n in range(1, 11)])
    done = invoke("status", other)
    assert done.exception is None
    assert "effective time: 100.0 % by steps" in done.output
    figures = json.loads(invoke("status --json", other).output)["effective_time"]
    assert (figures["by_steps"], figures["usual_s"], figures["by_device"]) == (1.0, 10.0, None)


def test_status_has_the_newest_change_of_the_settings_with_its_effect(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(run_dir, other)
    write_history(other, *[replace(update_row(n), settings_change=int(n > 3)) for n in range(1, 7)])
    one = after(None, {"learner.learning_rate": "0.5"}, {"learner.learning_rate": "0.1"}, by="ann@a", at_s=3.0)
    (other / CHANGES_NAME).write_bytes(msgspec.json.encode([one]))
    words = json.loads(invoke("status --json", other).output)["settings_change"]
    assert words.startswith("change 1: learner.learning_rate 0.5, was 0.1, by ann@a; before: 3 updates")
    assert f"settings: {words}" in invoke("status", other).output.replace("\n", " ").replace("  ", " ")
    assert json.loads(invoke("status --json", run_dir).output)["settings_change"] == ""


def test_a_report_is_written_and_nothing_else(run_dir: Path, place: Path) -> None:
    before = contents(run_dir)
    assert invoke("run report", run_dir).exception is None
    changed = {name for name, what in contents(run_dir).items() if before.get(name) != what}
    assert {Path(name).name for name in changed} == {"report.html", "report.json", run_dir.name}
    assert not server_runs(run_dir)


def test_a_file_that_is_too_large_or_finds_no_room_says_what_to_run_instead(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_copy, "MAX_COPY_BYTES", 10)
    refused = invoke("status", run_dir).exception
    assert isinstance(refused, ConfigError)
    assert "headrace up --resume" in str(refused)
    monkeypatch.setattr(server_copy, "MAX_COPY_BYTES", 4 << 30)
    monkeypatch.setattr(server_copy, "_SPARE_BYTES", 1 << 60)
    refused = invoke("status", run_dir).exception
    assert isinstance(refused, ConfigError)
    assert "Set TMPDIR to a folder with room" in str(refused)


def test_a_copy_that_fails_or_has_nothing_to_copy_says_so(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "op"
    shutil.copytree(run_dir, other)
    shutil.rmtree(other / "ledger" / "appendonlydir", ignore_errors=True)
    (other / "ledger" / "appendonly.aof").unlink(missing_ok=True)
    refused = invoke("status", other).exception
    assert isinstance(refused, ConfigError)
    assert "expected appendonlydir or appendonly.aof" in str(refused)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    refused = invoke("status", run_dir).exception
    assert isinstance(refused, ConfigError)
    assert "No space left on device" in str(refused)


def test_a_last_record_that_was_cut_off_is_left_out_and_left_alone(run_dir: Path, place: Path, tmp_path: Path) -> None:
    other = tmp_path / "op"
    shutil.copytree(run_dir, other)
    file = max((other / "ledger").glob("appendonly*/*.aof"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes() + b"*3\r\n$3\r\nSET\r\n$1")
    before = contents(other)
    assert invoke("ledger audit", other).return_value == 0
    assert contents(other) == before


def test_the_server_of_a_copy_is_private_and_flushes_and_rewrites_nothing(run_dir: Path, place: Path) -> None:
    with server_copy.server_on_copy(run_dir, max_memory_mb=64) as url:
        assert url is not None
        [copy] = place.iterdir()
        assert {path.stat().st_mode & 0o777 for path in (copy, copy / "ledger")} == {0o700}
        own, the_runs = read_address(copy), read_address(run_dir)
        assert own is not None
        assert the_runs is not None
        assert urlsplit(own.url).password != urlsplit(the_runs.url).password
        with redis.Redis.from_url(url) as client:
            told: Any = client.config_get("a*")
            assert (told["appendfsync"], told["auto-aof-rewrite-percentage"]) == ("no", "0")


IN_THE_LOOK = (
    "async with look_at(Path(sys.argv[1])):\n        print('there', flush=True)\n        await asyncio.sleep(60)"
)
IN_THE_START = (
    "EmbeddedServer.start = lambda self: (start(self), print('there', flush=True), time.sleep(60))\n"
    "    async with look_at(Path(sys.argv[1])):\n        pass"
)


@pytest.mark.parametrize(
    ("block", "number"),
    [
        (IN_THE_LOOK, signal.SIGINT),
        (IN_THE_LOOK, signal.SIGTERM),
        (IN_THE_LOOK, signal.SIGHUP),
        (IN_THE_START, signal.SIGINT),
    ],
)
def test_a_look_that_is_ended_takes_its_server_and_its_copy_along(
    run_dir: Path, place: Path, block: str, number: int
) -> None:
    with looking_in(run_dir, place, block) as looking:
        [copy] = place.iterdir()
        assert server_runs(copy)
        looking.send_signal(number)
        # of an impatient person
        looking.send_signal(number)
        looking.wait(30)
    assert list(place.iterdir()) == []
    assert not server_runs(copy)


@pytest.mark.parametrize("words", ["status", "down"])
@pytest.mark.skipif(sys.platform != "linux", reason="only there a process can be made to die with another")
def test_a_killed_looks_server_dies_and_the_next_look_removes_its_copy(run_dir: Path, place: Path, words: str) -> None:
    of_others = place / "headrace-other"
    of_others.mkdir()
    with looking_in(run_dir, place, IN_THE_LOOK) as looking:
        [copy] = place.glob("headrace-look-*")
        assert server_runs(copy)
        assert invoke(words, run_dir).exception is None
        assert server_runs(copy), "a living one is left alone"
        looking.kill()
        looking.wait(30)
        deadline = time.monotonic() + 10.0
        while server_runs(copy):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert copy.is_dir()
    assert invoke(words, run_dir).exception is None
    assert list(place.iterdir()) == [of_others]
    of_others.rmdir()


def test_a_signal_waits_for_a_folder_change_and_only_the_first_counts() -> None:
    signals = server_copy._Signals()
    done = False

    def cleanup() -> None:
        nonlocal done
        with signals.shielded():
            signals.hear(signal.SIGTERM, None)
            signals.hear(signal.SIGINT, None)
            done = True

    with pytest.raises(SystemExit) as ended:
        cleanup()
    assert done
    assert ended.value.code == 128 + signal.SIGTERM
    with signals.shielded():
        signals.hear(signal.SIGINT, None)


@contextmanager
def looking_in(run_dir: Path, place: Path, block: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that looks at a run, and prints `there` in the middle of it."""
    script = (
        "import asyncio, sys, time; from pathlib import Path; from pipeline.operator.attached import look_at\n"
        "from pipeline.ledger.server.embedded import EmbeddedServer; start = EmbeddedServer.start\n"
        f"async def look():\n    {block}\nasyncio.run(look())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path.cwd(),
    ) as looking:
        assert looking.stdout is not None
        try:
            assert looking.stdout.readline() == b"there\n"
            yield looking
        finally:
            looking.kill()


def test_a_look_beside_the_runs_server_asks_that_changes_nothing_and_tells_the_same(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    of_the_copy = [without_ages(invoke(words, run_dir).output) for words in LOOKS]
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    try:
        pid, before = server.pid(), contents(run_dir)
        monkeypatch.setattr(server_copy, "_copy", None)
        assert [without_ages(invoke(words, run_dir).output) for words in LOOKS] == of_the_copy
        assert contents(run_dir) == before
        assert server.pid() == pid
    finally:
        server.stop()


def without_ages(text: str) -> str:
    """Return a command's output without the ages that the server counts, and without widths."""
    return re.sub(r"[ ─━]+", " ", re.sub(r"\b\d+(\.\d+)? ?s\b", "AGE", text))


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_server_that_comes_up_while_a_look_copies_is_asked_itself(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch, has_lock: bool
) -> None:
    # as it was a moment ago
    monkeypatch.setattr("pipeline.ledger.server.embedded.server_runs", lambda _: False)
    # a server of an earlier release
    if not has_lock:
        monkeypatch.setattr(server_copy, "no_server", lambda _: nullcontext(True))
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    try:
        pid = server.pid()
        with server_copy.server_on_copy(run_dir, max_memory_mb=64) as url:
            assert url is None
        done = invoke("status", run_dir)
        assert done.exception is None
        assert "stopping" in done.output
        assert server.pid() == pid
    finally:
        server.stop()


@pytest.mark.parametrize("manner", [Manner.MUTE, Manner.TRICKLES])
def test_a_look_at_a_mute_server_ends_by_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, manner: Manner
) -> None:
    monkeypatch.setattr("pipeline.operator.attached._ANSWER_S", 0.5)
    before = read_address(run_dir)
    assert before is not None
    with mute_server(manner) as server:
        try:
            write_address(run_dir, msgspec.structs.replace(before, url=server.url, is_embedded=False))
            for words in ("status", "ledger queues", "ledger audit"):
                began = time.monotonic()
                assert isinstance(invoke(words, run_dir).exception, LedgerUnavailable)
                assert time.monotonic() - began < 4.5
            began = time.monotonic()
            answer = _why(run_dir, code=3)
            assert time.monotonic() - began < 4.0
            assert answer["chains"][0]["cause"] == "ledger"
        finally:
            write_address(run_dir, before)


def test_why_tells_of_a_frozen_server_by_its_process_and_asks_the_ledger_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the ledger was asked")

    monkeypatch.setattr("pipeline.cli.why._look", asked)
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    pid = server.pid()
    assert pid is not None
    try:
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        chain = _why(run_dir, code=3)["chains"][0]
        assert time.monotonic() - began < 10.0
        assert chain["cause"] == "ledger"
        assert (
            f"its server (process {pid}) is running but gave no answer within 1 s: it is stopped" in chain["links"][0]
        )
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()


def test_why_tells_of_a_mute_server_that_it_is_there_and_says_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.fleet.why.silence.FIRST_S", 0.2)
    monkeypatch.setattr("pipeline.fleet.why.silence.SECOND_S", 0.3)
    before, me = read_address(run_dir), identify(os.getpid())
    assert before is not None
    with mute_server(Manner.MUTE) as server:
        here = msgspec.structs.replace(before, url=server.url, socket=str(server.path), pid=os.getpid(), process=me)
        try:
            write_address(run_dir, here)
            words = _why(run_dir, code=3)["chains"][0]["links"][0]
        finally:
            write_address(run_dir, before)
        assert f"(process {os.getpid()}) is running but gave no answer within 0.5 s: it hangs, or is slow" in words
        assert server.num_connections == 2


HEAVY = {"torch", "transformers", "pyarrow", "pydantic"}


def _imported(command: str, run_dir: Path) -> tuple[Any, set[str]]:
    """Return a command's answer from a process of its own, and the packages that it imported."""
    name, *words = command.split()
    printed, _, modules = run_command([name, str(run_dir), *words, "--json"])
    return json.loads(printed), {module.partition(".")[0] for module in modules}


def test_why_answers_without_what_takes_long_to_import(run_dir: Path) -> None:
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    pid = server.pid()
    assert pid is not None
    try:
        answer, modules = _imported("why", run_dir)
        assert answer["chains"][0]["cause"] == "nobody"
        assert not HEAVY & modules
        os.kill(pid, signal.SIGSTOP)
        answer, modules = _imported("why", run_dir)
        assert answer["chains"][0]["cause"] == "ledger"
        assert (HEAVY | {"numpy", "redis", "asyncio", "structlog", "rich"}) & modules == set(), (
            "it asks the ledger nothing"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()


async def _set_running(run_dir: Path) -> None:
    async with attach(run_dir) as at:
        await at.registry.set_run_status(RunStatus(RunState.RUNNING))


def test_light_commands_import_no_more_than_they_need(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    server = EmbeddedServer(run, max_memory_mb=64)
    server.start()
    try:
        with run_lock(run):
            asyncio.run(_set_running(run))
            for command in (["status"], ["ledger", "queues"]):
                printed, code, modules = run_command([*command, str(run)])
                assert (code, len(printed.splitlines()) > 1) == (0, True)
                assert not HEAVY & {module.partition(".")[0] for module in modules}, command
            # the one that checks a value needs the schema, and no ledger
            done = run_command(["update", str(run), "--set", "learner.learning_rate=0.5", "--timeout", "0"])
        assert done[1] == 1
        assert "change 1: learner.learning_rate 0.5" in done[0]
        modules = {module.partition(".")[0] for module in done[2]}
        assert not (HEAVY - {"pydantic"} | {"rich", "opentelemetry"}) & modules
        assert "pipeline.ledger.redis.ledger" not in done[2]
    finally:
        server.stop()


def test_an_ended_server_is_reported_with_a_supervisor_and_copied_without_one(
    run_dir: Path,
) -> None:
    assert "its server has ended" in str(silence(run_dir, is_supervised=True))
    assert silence(run_dir, is_supervised=False) is None
    assert whereabouts(run_dir) == ""


def test_why_gives_a_ledger_less_time_than_a_call_has(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cli.why._LOOK_S", 0.3)
    before = read_address(run_dir)
    assert before is not None
    with mute_server(Manner.MUTE) as server:
        try:
            write_address(run_dir, msgspec.structs.replace(before, url=server.url, is_embedded=False))
            began = time.monotonic()
            assert _why(run_dir, code=3)["chains"][0]["cause"] == "ledger"
            assert time.monotonic() - began < 3.0
        finally:
            write_address(run_dir, before)


def _why(run_dir: Path, *, code: int) -> Any:
    done = CliRunner().invoke(headrace, ["why", str(run_dir), "--json"], standalone_mode=False)
    assert done.exception is None, done.output
    assert done.return_value == code
    return json.loads(done.stdout)
