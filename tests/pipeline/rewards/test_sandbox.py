from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from pipeline.rewards.sandbox import HEADER, Call, Reply
from pipeline.rewards.verifier import Response, Verdict
from protocol import headrace

USER = "tests.pipeline.rewards.user_verifiers"

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    command = headrace.command("pipeline.rewards.sandbox", str(1 << 30))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def send(child: Child, function: str, text: str, timeout_s: float) -> None:
    assert child.stdin is not None
    asked = Response(response_text=text, answer=text, verifier="")
    body = msgspec.msgpack.encode(Call(path=f"{USER}:{function}", responses=(asked,), timeout_s=timeout_s))
    child.stdin.write(HEADER.pack(len(body)) + body)
    child.stdin.flush()


def receive(child: Child) -> Reply:
    assert child.stdout is not None
    (length,) = HEADER.unpack(child.stdout.read(HEADER.size))
    return msgspec.msgpack.decode(child.stdout.read(length), type=Reply)


def test_an_idle_process_ends_when_its_parent_is_gone(child: Child) -> None:
    send(child, "equals", "1", timeout_s=5.0)
    assert receive(child) == Reply(outcomes=(Verdict(accuracy=1.0),))
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=10.0) == 0


def test_a_busy_process_is_ended_by_the_kernel_even_when_nobody_kills_it(child: Child) -> None:
    send(child, "spins_without_the_interpreter", "", timeout_s=0.01)
    assert child.wait(timeout=20.0) == -signal.SIGPROF


def test_a_process_that_stood_still_for_longer_than_its_limit_goes_on_with_its_call(child: Child) -> None:
    send(child, "equals", "1", timeout_s=5.0)
    assert receive(child) == Reply(outcomes=(Verdict(accuracy=1.0),))
    child.send_signal(signal.SIGSTOP)
    send(child, "naps", "1", timeout_s=0.01)
    child.send_signal(signal.SIGCONT)
    assert receive(child) == Reply(outcomes=(Verdict(accuracy=1.0),))


def test_the_time_of_one_call_is_not_counted_towards_the_next(child: Child) -> None:
    for _ in range(3):
        send(child, "equals", "1", timeout_s=0.01)
        assert receive(child).outcomes == (Verdict(accuracy=1.0),)
    assert child.poll() is None
