"""Stacks of a real process: on a signal, also while its loop or the interpreter is held up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.process import records
from pipeline.process.records import ProcessIdentity, Started
from pipeline.process.stacks import request
from pipeline.process.stacks.dump import END, StackDump, request_pipe, stack_file
from pipeline.process.stacks.parse import parse_dump
from pipeline.process.stacks.request import request_stacks, stands_of

PATIENT_S = 20.0
"""For an answer that comes; on a busy machine it may take long."""
_PROGRAM = """
import asyncio, faulthandler, re, signal, sys, threading, time
from pathlib import Path
from pipeline.process.stacks.dump import StackDump

folder, worker, kind = sys.argv[1:]
dump = StackDump(Path(folder), worker)

async def deep_wait():
    await asyncio.Event().wait()

async def life():
    await deep_wait()

def spin_for_ever():
    print("ready", flush=True)
    while True:
        pass

def hold_the_lock():
    # one call in C that gives the interpreter's lock to no other thread
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 40 + "b")

async def main():
    loop = asyncio.get_running_loop()
    def poll():
        while True:
            dump.poll(loop)
            time.sleep(0.01)
    threading.Thread(target=poll, daemon=True, name="heartbeat").start()
    if kind in ("deaf", "sleeps"):
        # a signal would end it
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    task = asyncio.create_task(life(), name="life")
    await asyncio.sleep(0)
    if kind == "sleeps":
        print("ready", flush=True)
        time.sleep(1000.0)
    if kind == "deaf":
        spin_for_ever()
    if kind == "spins":
        spin_for_ever()
    if kind == "holds":
        hold_the_lock()
    print("ready", flush=True)
    await task

asyncio.run(main())
"""


def _state(task: Path) -> str:
    """The kernel's letter for what a thread does."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class Workers:
    """Processes that have recorded themselves as a run's workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, worker: str, kind: str = "waits") -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self.folder), worker, kind], stdout=subprocess.PIPE, text=True
        )
        self.processes[worker] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        identity = records.identify(process.pid)
        assert identity is not None
        records.write_started(self.folder, worker, Started(identity, "generator"))
        # once its loop waits, nothing of it moves any more
        deadline = time.monotonic() + PATIENT_S
        while kind == "waits" and not self._is_idle(worker):
            assert time.monotonic() < deadline, f"{worker} does not wait"

    def _is_idle(self, worker: str) -> bool:
        main = request_stacks(self.folder, [worker], answer_s=PATIENT_S).looks[worker].stack("main")
        return main is not None and main.frames[0].function == "select"

    def freeze(self, worker: str) -> None:
        """Stop a process, and wait until no thread of it runs any more."""
        process = self.processes[worker]
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENT_S
        while any(_state(task) != "T" for task in Path(f"/proc/{process.pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"{worker} runs on"
            time.sleep(0.01)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path)
    yield started
    started.end()


def test_a_waiting_worker_shows_what_its_task_awaits_the_innermost_first(workers: Workers):
    workers.start("generator-0")
    look = request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"]
    assert look.is_whole and look.role == "generator"
    life = look.stack("task life")
    assert life is not None
    assert [frame.function for frame in life.frames] == ["wait", "deep_wait", "life"]
    assert {"main", "heartbeat"} <= {stack.name for stack in look.stacks}
    again = request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"].stack("task life")
    assert again == life


def test_a_worker_whose_loop_is_held_up_answers(workers: Workers):
    workers.start("generator-0", "spins")
    main = request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"].stack("main")
    assert main is not None
    assert main.frames[0].function == "spin_for_ever"


def test_a_call_that_holds_the_interpreters_lock_is_shown_by_its_threads_alone(workers: Workers):
    workers.start("generator-0", "holds")
    deadline = time.monotonic() + PATIENT_S
    # its line comes a moment before it holds the lock
    while (look := request_stacks(workers.folder).looks["generator-0"]).is_whole:
        assert time.monotonic() < deadline
    main = look.stack("main")
    assert main is not None
    assert "hold_the_lock" in {frame.function for frame in main.frames}


@pytest.mark.parametrize(("kind", "function"), [("deaf", "spin_for_ever"), ("sleeps", "main")])
def test_a_worker_that_can_answer_is_not_signalled(workers: Workers, kind: str, function: str):
    # faulthandler reads stacks while they change, and ends one process of some hundred
    workers.start("generator-0", kind)
    for _ in range(5):
        look = request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"]
        main, life = look.stack("main"), look.stack("task life")
        assert main is not None and main.frames[0].function == function
        assert life is not None and life.frames[-1].function == "life"
        assert look.is_whole and look.stack("stacks") is None
    assert workers.processes["generator-0"].poll() is None


def test_a_former_process_that_ends_late_leaves_its_successor_the_pipe(workers: Workers):
    former = StackDump(workers.folder, "generator-0")
    workers.start("generator-0", "deaf")
    former.close()
    assert request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"].is_whole
    assert workers.processes["generator-0"].poll() is None


def test_a_worker_without_the_pipe_is_signalled(workers: Workers):
    workers.start("generator-0", "spins")
    request_pipe(workers.folder, "generator-0").unlink()
    main = request_stacks(workers.folder).looks["generator-0"].stack("main")
    assert main is not None and main.frames[0].function == "spin_for_ever"


def test_where_no_pipe_can_be_made_the_signal_is_answered(workers: Workers):
    (workers.folder / "sockets").touch()
    workers.start("generator-0", "spins")
    main = request_stacks(workers.folder).looks["generator-0"].stack("main")
    assert main is not None and main.frames[0].function == "spin_for_ever"


def test_a_worker_is_asked_again_and_again_and_answers_the_newest(workers: Workers):
    workers.start("generator-0", "spins")
    for _ in range(3 * 65536 // 64):
        with request_pipe(workers.folder, "generator-0").open("wb") as pipe:
            pipe.write(b"." * 64)
    assert request_stacks(workers.folder, answer_s=PATIENT_S).looks["generator-0"].is_whole
    assert stack_file(workers.folder, "generator-0").stat().st_size < 5 << 20


def test_the_odd_worker_is_told_from_its_role(workers: Workers):
    for name, kind in (("generator-0", "waits"), ("generator-1", "spins"), ("generator-2", "waits")):
        workers.start(name, kind)
    stands = stands_of(workers.folder, ["generator-1", "generator-0", "reward-9"], answer_s=PATIENT_S)
    odd, others = stands["generator-1"]
    assert odd.startswith("generator-1 stands in main, alone in its role: spin_for_ever (")
    assert others.startswith("generator-0 and generator-2 stand in task life: wait (")
    assert stands["generator-0"][0].startswith("generator-0 stands in task life, as generator-2: wait (")
    assert "reward-9" not in stands, "it is on another host"


def test_many_workers_are_examined_in_the_time_of_one(workers: Workers):
    names = [f"generator-{number}" for number in range(4)]
    for name in names:
        workers.start(name)
        workers.freeze(name)
    begun_s = time.monotonic()
    stands = stands_of(workers.folder, names, answer_s=0.5)
    assert time.monotonic() - begun_s < len(names) * 0.5
    assert all("frozen" in stands[name][0] for name in names)


def test_a_frozen_worker_is_missing_with_a_reason_and_goes_on_later(workers: Workers):
    workers.start("generator-0")
    process = workers.processes["generator-0"]
    workers.freeze("generator-0")
    answers = request_stacks(workers.folder, answer_s=0.2)
    assert not answers.looks
    assert "frozen" in answers.missing["generator-0"]
    process.send_signal(signal.SIGCONT)
    assert "generator-0" in request_stacks(workers.folder, answer_s=PATIENT_S).looks
    assert process.poll() is None


def test_a_process_without_the_handler_is_never_signalled(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = records.identify(process.pid)
        assert identity is not None
        records.write_started(tmp_path, "reward-0", Started(identity, "reward"))
        assert request_stacks(tmp_path, answer_s=0.1).missing == {"reward-0": "it is starting, or has ended"}
        # the file of an ended process of that name, whose id another process has now
        stack_file(tmp_path, "reward-0").parent.mkdir()
        other = msgspec.structs.replace(identity, started="long ago")
        stack_file(tmp_path, "reward-0").write_bytes(msgspec.json.encode(other) + b"\n")
        assert request_stacks(tmp_path, answer_s=0.1).missing == {"reward-0": "its process has ended"}
        assert process.poll() is None
        process.kill()


def test_a_worker_of_another_host_is_asked_there(tmp_path: Path):
    records.write_started(tmp_path, "reward-0", Started(ProcessIdentity("elsewhere", 1, "x"), "reward"))
    assert "elsewhere" in request_stacks(tmp_path, answer_s=0.1).missing["reward-0"]
    assert "no process" in request_stacks(tmp_path, ["reward-9"], answer_s=0.1).missing["reward-9"]


def test_a_signal_after_the_end_of_the_dump_does_not_end_the_process(tmp_path: Path):
    before = signal.getsignal(signal.SIGUSR1)
    dump = StackDump(tmp_path, "reward-0")
    dump.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_tasks_that_change_while_they_are_listed_are_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, all_tasks, calls = signal.getsignal(signal.SIGUSR1), asyncio.all_tasks, list[int]()

    def changing(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[object]]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Set changed size during iteration")
        return all_tasks(loop)

    monkeypatch.setattr("pipeline.process.stacks.dump.asyncio.all_tasks", changing)
    dump = StackDump(tmp_path, "reward-0")

    async def look() -> None:
        loop = asyncio.get_running_loop()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.to_thread(dump.poll, loop)

    asyncio.run(look())
    assert len(calls) == 2
    text = stack_file(tmp_path, "reward-0").read_text()
    assert END in text and " in look\n" in text
    dump.close()
    signal.signal(signal.SIGUSR1, before)


def test_the_file_is_the_owners_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.process.stacks.dump._MAX_BYTES", 20_000)
    before = signal.getsignal(signal.SIGUSR1)
    dump = StackDump(tmp_path, "reward-0")
    path = stack_file(tmp_path, "reward-0")
    assert path.stat().st_mode & 0o777 == 0o600

    async def look() -> None:
        loop = asyncio.get_running_loop()
        poll = threading.Thread(target=dump.poll, args=(loop,))
        os.kill(os.getpid(), signal.SIGUSR1)
        poll.start()
        await asyncio.to_thread(poll.join)

    for _ in range(40):
        asyncio.run(look())
        assert path.stat().st_size < 60_000
    head = path.read_text().splitlines()[0]
    assert str(os.getpid()) in head
    dump.close()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "text", ["", "nonsense\n", "Thread 0x12 (most recent call first):\n", "Task \n", "Threads:\n  0x zz\n"]
)
def test_damaged_text_is_no_error(text: str):
    look = parse_dump(text, worker="w", role="r")
    assert not look.is_whole
    assert all(stack.frames == () for stack in look.stacks)


def test_the_least_wait_of_a_reader_is_longer_than_a_heartbeat():
    from pipeline.runtime.liveness import HEARTBEAT_EVERY_S

    assert request.ANSWER_S > 2 * HEARTBEAT_EVERY_S


def test_the_end_waits_for_an_answer_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump, begun, may_go_on = StackDump(tmp_path, "w-0"), threading.Event(), threading.Event()
    write = dump._write

    def write_slowly(lines: Iterable[str]) -> None:
        begun.set()
        assert may_go_on.wait(PATIENT_S)
        write(lines)

    monkeypatch.setattr(dump, "_write", write_slowly)
    request.send_request(request_pipe(tmp_path, "w-0"))
    assert begun.wait(PATIENT_S)
    ending = threading.Thread(target=dump.close)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive(), "the pipe is being read, and its number would be free for another file"
    may_go_on.set()
    ending.join(PATIENT_S)
    assert END in stack_file(tmp_path, "w-0").read_text()
