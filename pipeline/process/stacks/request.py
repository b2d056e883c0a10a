"""The reader's side: requests stacks from a run's workers on this host and reads what they write.

A worker that has not answered after two thirds of the time gets the signal (see ``dump``)."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipeline.process import records
from pipeline.process.records import ProcessIdentity, Started
from pipeline.process.stacks.dump import END, SIGNAL, request_pipe, send_request, stack_file
from pipeline.process.stacks.parse import StackSnapshot, parse_dump, stack_groups, stand_lines

ANSWER_S = 3.0
"""A heartbeat interval in a large fleet, plus a margin."""
_UNANSWERED = 2 / 3
"""Share of the time after which an unanswering worker gets the signal."""
LOOK_EVERY_S = 0.5
"""Time between two snapshots."""
_POLL_S = 0.02
_MAX_READ = 4 << 20


@dataclass(slots=True)
class StackAnswers:
    looks: dict[str, StackSnapshot] = field(default_factory=dict[str, StackSnapshot])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Why a worker has no snapshot."""


def request_stacks(
    run_dir: Path, workers: Collection[str] | None = None, *, answer_s: float = ANSWER_S
) -> StackAnswers:
    """Return the stacks of workers on this host; ``workers`` None: of all.

    Takes at most ``answer_s``. A process that this run did not start, or that has no signal handler
    installed, is never signalled."""
    started = records.read_started(run_dir)
    answers = StackAnswers()
    asked = dict[str, tuple[int, ProcessIdentity]]()
    for worker in sorted(started) if workers is None else workers:
        if worker not in started:
            answers.missing[worker] = "no process of this name was started here"
        elif reason := _send(run_dir, worker, started[worker], asked):
            answers.missing[worker] = reason
    begun_s = time.monotonic()
    waiting = _wait(run_dir, {worker: size for worker, (size, _) in asked.items()}, begun_s + _UNANSWERED * answer_s)
    for worker in list(waiting):
        if reason := _signal(asked[worker][1]):
            answers.missing[worker] = reason
            del waiting[worker], asked[worker]
    _wait(run_dir, waiting, begun_s + answer_s)
    for worker, (size, _) in asked.items():
        text = _read(run_dir, worker, size)
        look = parse_dump(text, worker=worker, role=started[worker].role)
        if look.stacks:
            answers.looks[worker] = look
        else:
            answers.missing[worker] = f"no answer in {answer_s:g} s: the process is frozen, or has just ended"
    return answers


def _wait(run_dir: Path, sizes: Mapping[str, int], deadline: float) -> dict[str, int]:
    """Return the workers that have not answered by the deadline. ``sizes``: the sizes of their
    files before the request."""
    waiting = dict(sizes)
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        waiting = {worker: size for worker, size in waiting.items() if END not in _read(run_dir, worker, size)}
    return waiting


def _send(run_dir: Path, worker: str, record: Started, asked: dict[str, tuple[int, ProcessIdentity]]) -> str:
    """Send a request to one worker. Returns why it was not sent, or "" after adding it to ``asked``
    with its file's size."""
    if record.identity.host != records.this_host():
        return f"its process is on host {record.identity.host}: run this there"
    if SIGNAL is None:
        return "this system has no SIGUSR1"
    path = stack_file(run_dir, worker)
    try:
        with path.open("rb") as file:
            identity = msgspec.json.decode(file.readline(1 << 16), type=ProcessIdentity)
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is starting, or has ended"
    except (OSError, msgspec.DecodeError) as error:
        return f"{path} does not name its process: {error}"
    if records.identify(identity.pid) != identity:
        return "its process has ended"
    asked[worker] = size, identity
    send_request(request_pipe(run_dir, worker))
    return ""


def _signal(identity: ProcessIdentity) -> str:
    """Signal a process that does not answer. Returns why that failed, or ""."""
    if records.identify(identity.pid) != identity or SIGNAL is None:
        return "its process has ended"
    try:
        os.kill(identity.pid, SIGNAL)
    except OSError as error:
        return f"its process cannot be signalled: {error}"
    return ""


def _read(run_dir: Path, worker: str, size: int) -> str:
    try:
        with stack_file(run_dir, worker).open("rb") as file:
            # a file that was started over is shorter
            file.seek(size if os.fstat(file.fileno()).st_size >= size else 0)
            return file.read(_MAX_READ).decode("utf-8", errors="replace")
    except OSError:
        return ""


def stands_of(
    run_dir: Path, workers: Collection[str], *, num_looks: int = 1, answer_s: float = ANSWER_S
) -> dict[str, tuple[str, ...]]:
    """Describe in a few lines where each of these workers hangs compared with others of its role,
    or why that is unknown. Workers of other hosts are left out.

    All workers are examined at once, so many take no longer than one. ``num_looks``: number of
    snapshots, half a second apart; with a single one every worker seems to hang."""
    started = records.read_started(run_dir)
    here = [worker for worker in workers if worker in started]
    roles = {started[worker].role for worker in here}
    asked = [name for name, record in started.items() if record.role in roles]
    looks: dict[str, list[StackSnapshot]] = {}
    missing = dict[str, str]()
    for number in range(num_looks if asked else 0):
        if number:
            time.sleep(LOOK_EVERY_S)
        answers = request_stacks(run_dir, asked, answer_s=answer_s)
        missing |= answers.missing
        for worker, look in answers.looks.items():
            looks.setdefault(worker, []).append(look)
    groups = stack_groups(looks)
    return {worker: stand_lines(worker, groups) or (f"{worker}: {missing[worker]}",) for worker in here}
