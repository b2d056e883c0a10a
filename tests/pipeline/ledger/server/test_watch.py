"""When a server is dead, by hand-driven clocks; and probes of servers that misbehave."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.ledger.server import probe as probing
from pipeline.ledger.server.probe import (
    NUM_PROBES,
    REST_S,
    ProbeResult,
    ServerAction,
    ServerState,
    ServerWatch,
    listens,
    probe,
)
from pipeline.process.descendants import Activity

SERVES, SILENT, GONE = (
    ProbeResult(ServerState.SERVES, 1),
    ProbeResult(ServerState.SILENT),
    ProbeResult(ServerState.GONE),
)
STRANGE = ProbeResult(ServerState.STRANGE)


def loading(done: int) -> ProbeResult:
    return ProbeResult(ServerState.LOADING, 1, done)


def test_a_death_takes_several_looks_that_agree() -> None:
    watch = ServerWatch(patience_s=60.0)
    assert [watch.evaluate(GONE, 0.1 * look) for look in range(NUM_PROBES)] == [ServerAction.LEAVE] * (
        NUM_PROBES - 1
    ) + [ServerAction.START]
    watch.begin_again(1.0)
    for _ in range(10):
        assert watch.evaluate(GONE, 2.0) is ServerAction.LEAVE
        assert watch.is_suspicious
        assert watch.evaluate(SERVES, 2.0) is ServerAction.LEAVE


def test_a_mute_server_is_replaced_when_the_patience_with_it_ends_and_no_sooner() -> None:
    for mute in (SILENT, STRANGE):
        watch = ServerWatch(patience_s=60.0)
        assert watch.evaluate(SERVES, 0.0) is ServerAction.LEAVE
        assert [watch.evaluate(mute, now) for now in (1.0, 30.0, 59.9)] == [ServerAction.LEAVE] * 3
        assert watch.evaluate(mute, 60.0) is ServerAction.REPLACE


AT_REST = ProbeResult(ServerState.SILENT, is_at_rest=True)


def test_a_silent_server_whose_process_is_at_rest_is_replaced_within_seconds() -> None:
    watch = ServerWatch(patience_s=60.0)
    assert watch.evaluate(SERVES, 0.0) is ServerAction.LEAVE
    assert watch.evaluate(AT_REST, 1.0) is ServerAction.LEAVE
    assert watch.is_suspicious
    assert watch.evaluate(AT_REST, 1.0 + REST_S - 0.01) is ServerAction.LEAVE
    assert watch.evaluate(AT_REST, 1.0 + REST_S) is ServerAction.REPLACE


@pytest.mark.parametrize("between", [SILENT, SERVES, loading(1)])
def test_a_server_that_worked_between_two_looks_has_all_the_patience(between: ProbeResult) -> None:
    watch = ServerWatch(patience_s=60.0)
    assert watch.evaluate(SERVES, 0.0) is ServerAction.LEAVE
    for now in range(1, 50, 2):
        assert watch.evaluate(AT_REST, now) is ServerAction.LEAVE
        assert watch.evaluate(between, now + 1.0) is ServerAction.LEAVE


def test_a_server_that_was_started_again_is_not_judged_by_the_one_before() -> None:
    watch = ServerWatch(patience_s=60.0)
    watch.evaluate(AT_REST, 0.0)
    watch.begin_again(10.0)
    assert not watch.is_suspicious
    assert watch.evaluate(AT_REST, 10.0) is ServerAction.LEAVE


def test_one_answer_renews_the_patience() -> None:
    watch = ServerWatch(patience_s=60.0)
    for now in range(0, 600, 50):
        assert watch.evaluate(SILENT, now) is ServerAction.LEAVE
        assert watch.evaluate(SERVES, now + 1.0) is ServerAction.LEAVE


def test_a_server_that_reads_its_file_lives_for_as_long_as_it_gets_further() -> None:
    watch = ServerWatch(patience_s=60.0)
    assert {watch.evaluate(loading(now), now) for now in range(0, 6000, 50)} == {ServerAction.LEAVE}
    assert watch.evaluate(loading(5950), 6009.0) is ServerAction.LEAVE
    assert watch.evaluate(loading(5950), 6011.0) is ServerAction.REPLACE


# -- the probe -----------------------------------------------------------------------------------


@contextmanager
def puppet(behave: Callable[[socket.socket], object]) -> Iterator[Path]:
    """A listener that treats each connection as scripted."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "s"
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def hang(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def trickle(connection: socket.socket) -> None:
    connection.sendall(b"+OK\r\n$1000\r\n")
    with suppress(OSError):
        for _ in range(1000):
            connection.sendall(b"x")
            time.sleep(0.02)


@pytest.mark.parametrize("behave", [hang, trickle])
def test_a_probe_ends_by_its_deadline_however_little_comes(behave: Callable[[socket.socket], None]) -> None:
    with puppet(behave) as path:
        began = time.monotonic()
        assert probe(path, "secret", timeout_s=0.3).state is ServerState.SILENT
        # it trickles for 20 s
        assert time.monotonic() - began < 10.0
        assert listens(path)


@pytest.mark.parametrize(
    ("after", "is_at_rest"),
    [
        (Activity(1_000, 7), True),
        (Activity(1_000_000, 9), True),
        (Activity(200_000_000, 9), False),
        (None, False),
    ],
)
def test_a_mute_server_is_at_rest_when_its_threads_hardly_wanted_to_run(
    monkeypatch: pytest.MonkeyPatch, after: Activity | None, is_at_rest: bool
) -> None:
    seen = iter([Activity(1_000, 7), after, after])
    monkeypatch.setattr(probing, "activity_of", lambda _: next(seen))
    with puppet(hang) as path:
        sight = probe(path, "secret", timeout_s=0.3, pid=7)
    assert (sight.state, sight.is_at_rest) == (ServerState.SILENT, is_at_rest)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ServerState.STRANGE),
        (b"-WRONGPASS invalid\r\n-NOAUTH\r\n", ServerState.STRANGE),
        (b"+OK\r\n$6\r\nhello:\r\n", ServerState.STRANGE),
        (b"+OK\r\n$23\r\nprocess_id:7\r\nloading:0\r\n", ServerState.SERVES),
        (b"", ServerState.SILENT),
    ],
)
def test_what_answers_is_told_apart(answer: bytes, state: ServerState) -> None:
    with puppet(lambda connection: [connection.recv(1 << 16), connection.sendall(answer)]) as path:
        assert probe(path, "secret", timeout_s=2.0).state is state
    assert probe(path, "secret", timeout_s=2.0).state is ServerState.SILENT
    assert not listens(path)
