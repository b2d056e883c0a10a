"""One server on one file, even when processes are slow, frozen, killed or started twice. On the
real program."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import redis

from pipeline.ledger.address import read_address, write_address
from pipeline.ledger.server import embedded as module
from pipeline.ledger.server.embedded import EmbeddedServer, end_server, server_runs
from pipeline.ledger.server.lock import holders, is_locked, no_server, take_lock
from pipeline.ledger.server.probe import ProbeResult, ServerState, ServerWatch
from pipeline.process.descendants import activity_of
from pipeline.process.exit_codes import Interrupted
from pipeline.process.records import identify, process_runs
from protocol.errors import LedgerUnavailable
from tests.mute import keep_busy

pytestmark = pytest.mark.timeout(60)


made: list[EmbeddedServer] = []


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_server(tmp_path, timeout_s=1.0)
    for server in made:
        # Its lock is free a moment before the kernel lets the last of its threads go.
        wait_until(lambda server=server: not server.is_there())
    made.clear()


@pytest.fixture
def server(tmp_path: Path) -> EmbeddedServer:
    return make(tmp_path)


def make(folder: Path, *, answer_s: float = 0.2) -> EmbeddedServer:
    made.append(EmbeddedServer(folder, max_memory_mb=64, answer_s=answer_s))
    return made[-1]


def started(server: EmbeddedServer) -> int:
    assert server.start() is False
    return pid_of(server)


def pid_of(server: EmbeddedServer) -> int:
    """Wait until the server answers: on a busy machine that may take more than one look."""
    wait_until(lambda: server.pid() is not None)
    pid = server.pid()
    return pid_of(server) if pid is None else pid


def appending(folder: Path) -> list[int]:
    """The processes that have a file of the ledger's append-only folder open."""
    found: set[int] = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith(f"{folder}/ledger/appendonly"):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return sorted(found)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- slow, frozen --------------------------------------------------------------------------------


def test_a_slow_answer_between_two_quick_ones_starts_no_second_server(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, inode = started(server), server.socket.stat().st_ino
    really, slow = module.probe, iter([False, True, False, True, True, True])

    def moody(path: Path, password: str, *, timeout_s: float, pid: int | None) -> ProbeResult:
        return (
            ProbeResult(ServerState.SILENT)
            if next(slow, False)
            else really(path, password, timeout_s=timeout_s, pid=pid)
        )

    monkeypatch.setattr(module, "probe", moody)
    for _ in range(4):
        assert make(tmp_path).start() is True
    assert (pid_of(server), server.socket.stat().st_ino) == (pid, inode)
    assert appending(tmp_path) == [pid]


def test_a_frozen_server_that_goes_on_is_adopted(server: EmbeddedServer, tmp_path: Path) -> None:
    pid = started(server)
    os.kill(pid, signal.SIGSTOP)
    thaw = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
    thaw.start()
    assert make(tmp_path).start(timeout_s=20.0) is True
    thaw.join()
    assert pid_of(server) == pid


def test_a_server_that_stays_frozen_is_ended_for_certain_before_another_is_started(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(server)
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "1")
    # the server's own second until its file is flushed
    time.sleep(1.1)
    os.kill(pid, signal.SIGSTOP)
    at_launch: list[bool] = []
    popen = subprocess.Popen

    def launch(*arguments: object, **settings: object) -> object:
        if "pass_fds" in settings:
            at_launch.append(process_runs(pid))
        return popen(*arguments, **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(module.subprocess, "Popen", launch)
    later = make(tmp_path)
    assert later.start(timeout_s=0.5) is False
    assert at_launch == [False]
    assert pid_of(later) != pid
    assert appending(tmp_path) == [pid_of(later)]
    with redis.Redis.from_url(later.url) as client:
        assert client.get("kept") == b"1"


def stop(pid: int) -> None:
    """Stop every thread of a process; a signal returns before that."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: activity_of(pid) is not None)


def pause(server: EmbeddedServer, _: int) -> None:
    """Let the server take connections and commands, and answer none."""
    with redis.Redis.from_url(server.url) as client:
        client.client_pause(60_000)


@pytest.fixture
def given_s(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that the server's process is given to end."""
    given = list[float]()
    process, wait = server._server, server._server.wait_until_gone  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(process, "wait_until_gone", lambda timeout_s: given.append(timeout_s) or wait(timeout_s))
    return given


@pytest.mark.parametrize(("silence", "how"), [(lambda _, pid: stop(pid), "does not run"), (pause, "sleeps")])
def test_the_supervisor_replaces_a_silent_server_at_rest_within_seconds(
    server: EmbeddedServer, given_s: list[float], silence: Callable[[EmbeddedServer, int], None], how: str
) -> None:
    pid = started(server)
    watch, words = ServerWatch(patience_s=1e6), list[str]()
    assert server.supervise(watch, 0.0).state is ServerState.SERVES
    silence(server, pid)
    for now_s in range(1, 100):
        assert process_runs(pid), "ended before another is started"
        # as the supervisor does, so that the server has taken notice of the last look's end
        time.sleep(0.1)
        sight = server.supervise(watch, float(now_s))
        words += [sight.words] if sight.is_at_rest else []
        if sight.state is ServerState.SERVES:
            break
    assert not process_runs(pid)
    assert words and all(how in one for one in words)
    assert given_s[0] == 0.0, "a process at rest does not end by itself"


def test_a_silent_server_at_work_is_replaced_when_its_patience_ends(
    server: EmbeddedServer, given_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(server)
    watch = ServerWatch(patience_s=30.0)
    assert server.supervise(watch, 0.0).state is ServerState.SERVES
    script = threading.Thread(target=keep_busy, args=(server.url, 60.0), daemon=True)
    script.start()
    # one silent look may be the machine's load, before the script has begun
    wait_until(lambda: all(server.read_state().state is ServerState.SILENT for _ in range(3)))
    for now_s in (1.0, 15.0, 29.0):
        assert server.supervise(watch, now_s).state is ServerState.SILENT
        assert process_runs(pid), f"ended after {now_s:g} s of 30"
    assert server.supervise(watch, 31.0).state is ServerState.SERVES
    assert not process_runs(pid)
    assert given_s[0] == 2.0, "it has been silent for long, and all workers wait"
    script.join()


def test_a_server_that_answers_now_and_then_has_all_the_patience(server: EmbeddedServer) -> None:
    pid = started(server)
    watch = ServerWatch(patience_s=30.0)
    assert server.supervise(watch, 0.0).state is ServerState.SERVES
    for now_s in range(1, 25, 3):
        stop(pid)
        assert server.supervise(watch, float(now_s)).state is ServerState.SILENT
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: server.read_state().state is ServerState.SERVES)
        server.supervise(watch, now_s + 1.0)
    assert process_runs(pid)


def test_the_supervisor_starts_a_killed_server_once_enough_looks_agree(server: EmbeddedServer, tmp_path: Path) -> None:
    pid = started(server)
    watch = ServerWatch(patience_s=30.0)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.read_state().state is ServerState.GONE)
    seen = [server.supervise(watch, 0.1 * look).state for look in range(3)]
    assert seen == [ServerState.GONE, ServerState.GONE, ServerState.SERVES]
    assert appending(tmp_path) == [pid_of(server)]


# -- two starters --------------------------------------------------------------------------------


def test_of_many_starters_at_once_one_starts_and_the_others_adopt(server: EmbeddedServer, tmp_path: Path) -> None:
    began, told = threading.Barrier(6), list[bool]()

    def start() -> None:
        began.wait()
        told.append(make(tmp_path).start())

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False, *[True] * 5]
    assert len(appending(tmp_path)) == 1


def test_two_servers_never_append_to_one_file_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, over = random.Random(7), threading.Event()
    most, launches, really = [0], [0], module.probe
    popen = subprocess.Popen

    def moody(path: Path, password: str, *, timeout_s: float, pid: int | None) -> ProbeResult:
        return (
            ProbeResult(ServerState.SILENT)
            if rng.random() < 0.4
            else really(path, password, timeout_s=timeout_s, pid=pid)
        )

    def launch(*arguments: object, **settings: object) -> object:
        if "pass_fds" in settings:
            launches[0] += 1
            most[0] = max(most[0], 1 + len(appending(tmp_path)))
        return popen(*arguments, **settings)  # type: ignore[call-overload]

    def keep_starting() -> None:
        while not over.is_set():
            try:
                make(tmp_path, answer_s=0.05).start(timeout_s=0.3)
            except LedgerUnavailable:
                # ended by another starter that found it frozen, at its start
                continue

    monkeypatch.setattr(module, "probe", moody)
    monkeypatch.setattr(module.subprocess, "Popen", launch)
    starters = [threading.Thread(target=keep_starting) for _ in range(3)]
    for starter in starters:
        starter.start()
    wait_until(lambda: server_runs(tmp_path))
    try:
        for _ in range(12):
            for pid in appending(tmp_path):
                # a starter may have ended it since
                with suppress(ProcessLookupError):
                    os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]))
            time.sleep(0.15)
            most[0] = max(most[0], len(appending(tmp_path)))
    finally:
        over.set()
        for starter in starters:
            starter.join()
        monkeypatch.undo()
        end_server(tmp_path)
    assert launches[0] >= 3
    assert most[0] == 1
    assert appending(tmp_path) == []


# -- who holds the lock --------------------------------------------------------------------------


def test_the_server_alone_holds_its_lock_and_the_kernel_frees_it(server: EmbeddedServer, tmp_path: Path) -> None:
    pid = started(server)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert holders(tmp_path / "ledger") == [pid]
        assert take_lock(tmp_path / "ledger") is None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_locked(tmp_path / "ledger"))
        child.kill()


def test_a_supervisor_killed_while_it_starts_its_server_leaves_one_that_is_adopted(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from pipeline.ledger.server import embedded as server
        server.identify = lambda pid: os.kill(os.getpid(), signal.SIGKILL)  # the server is there, its number not yet written
        server.EmbeddedServer(Path({str(tmp_path)!r}), max_memory_mb=64).start()
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=Path.cwd(), timeout=30)
    assert killed.returncode == -signal.SIGKILL
    address = read_address(tmp_path)
    assert address is not None
    assert address.pid == 0
    try:
        successor = make(tmp_path)
        assert successor.start() is True
        assert appending(tmp_path) == [pid_of(successor)]
    finally:
        assert end_server(tmp_path)


def test_a_process_that_has_the_servers_old_number_is_neither_waited_for_nor_ended(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    started(server)
    server.stop()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        address = read_address(tmp_path)
        assert address is not None
        assert address.process is not None
        # as an earlier release wrote it
        for record in (address.process, None):
            write_address(tmp_path, msgspec.structs.replace(address, pid=stranger.pid, process=record))
            assert not server_runs(tmp_path)
            assert server.start(timeout_s=5.0) is False
            server.stop()
            assert stranger.poll() is None
        stranger.kill()


def test_a_server_of_a_release_without_locks_is_adopted_while_its_process_lives(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    pid = started(server)
    lock = tmp_path / "ledger" / "server.lock"
    # as if it had never taken one
    lock.unlink()
    assert make(tmp_path).start() is True
    os.kill(pid, signal.SIGSTOP)
    later = make(tmp_path)
    assert later.start(timeout_s=0.3) is False
    assert not process_runs(pid)
    assert appending(tmp_path) == [pid_of(later)]


def test_a_lock_file_without_its_lock_means_nothing(server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir(mode=0o700)
    (tmp_path / "ledger" / "server.lock").write_text("4711")
    assert not server_runs(tmp_path)
    started(server)


def test_a_folder_locked_by_no_server_of_ours_is_left_alone_with_a_sentence(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    pid = started(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.read_state().state is ServerState.GONE)
    with no_server(tmp_path / "ledger") as is_free:
        assert is_free
        with pytest.raises(LedgerUnavailable, match=r"other commands have locked .* for 0\.2 s"):
            make(tmp_path).start(timeout_s=0.2)
    lock = take_lock(tmp_path / "ledger")
    assert lock is not None
    with pytest.raises(LedgerUnavailable, match=r"Nothing was started: none of our visible processes .* `fuser"):
        make(tmp_path).start(timeout_s=0.2)
    os.close(lock)
    assert appending(tmp_path) == []


def test_a_server_of_another_user_is_never_doubled(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(server)
    os.kill(pid, signal.SIGSTOP)
    kill = os.kill

    def refused(target: int, number: int) -> None:
        if number:
            raise PermissionError(1, "Operation not permitted")
        kill(target, number)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "kill", refused)
        with pytest.raises(LedgerUnavailable, match=rf"process {pid} serves .* belongs to another user"):
            make(tmp_path).start(timeout_s=0.2)
    assert appending(tmp_path) == [pid]


# -- what is in the way, and the end -------------------------------------------------------------


def test_a_start_removes_nothing_that_it_does_not_own(server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir(mode=0o700)
    place = tmp_path / "ledger" / "server.sock"
    place.write_text("mine")
    with pytest.raises(LedgerUnavailable, match="in the way: expected a socket of this user"):
        server.start()
    assert place.read_text() == "mine"
    place.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        with pytest.raises(LedgerUnavailable, match="recorded server listens on"):
            server.start()
    assert server.start() is False, "the other is gone, and what it left is a dead socket of ours"


@pytest.mark.parametrize("state", ["running", "frozen", "never started"])
def test_the_end_of_a_runs_server_is_certain_whoever_started_it(tmp_path: Path, state: str) -> None:
    if state == "never started":
        assert end_server(tmp_path) is False
        return
    server = make(tmp_path)
    pid = started(server)
    if state == "frozen":
        os.kill(pid, signal.SIGSTOP)
    assert end_server(tmp_path, timeout_s=0.5 if state == "frozen" else 10.0) is True
    assert identify(pid) is None
    assert not server_runs(tmp_path)
    assert not server.socket.exists()
    assert end_server(tmp_path) is False


def test_an_end_does_not_wait_for_a_start_that_waits(server: EmbeddedServer, tmp_path: Path) -> None:
    pid = started(server)
    os.kill(pid, signal.SIGSTOP)
    told: list[str] = []

    def start() -> None:
        try:
            server.start(timeout_s=50.0)
        except LedgerUnavailable as error:
            told.append(str(error))

    waiting = threading.Thread(target=start)
    waiting.start()
    time.sleep(0.3)
    server.stop(timeout_s=0.2)
    waiting.join(5.0)
    assert not waiting.is_alive()
    assert "is being ended" in told[0]
    assert not process_runs(pid)


def test_a_start_that_is_given_up_ends_what_it_started(tmp_path: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    server = make(tmp_path)
    with pytest.raises(Interrupted, match="nothing was started"):
        server.start(given_up=given_up)
    assert not server.is_there()
    assert not server.start(), "another may follow"
    server.stop()
