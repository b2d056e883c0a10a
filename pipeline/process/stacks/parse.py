"""Parses stack dumps, and groups the workers of a role by where they hang."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from pipeline.process.stacks.dump import END, TASK, THREADS

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NAMED = re.compile(r"^  (0x[0-9a-f]+) (.*)$")
_MAX_FRAMES = 100
_KINDS = ("compute", "storage")
"""Kinds of an actor's threads, named ``<kind>-<worker>``."""


@dataclass(frozen=True, slots=True)
class StackCall:
    file: str
    line: int
    """0 if unknown."""
    function: str

    @property
    def place(self) -> tuple[str, str]:
        """The last two parts of the file's path, and the function: the same on every machine."""
        return "/".join(PurePosixPath(self.file).parts[-2:]), self.function

    def __str__(self) -> str:
        return f"{self.function} ({self.place[0]}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of one thread, or the await chain of one task."""

    name: str
    """``main``, ``compute`` and so on; for a task, ``task`` and its name."""
    frames: tuple[StackCall, ...]
    """Innermost first."""

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Its calls without line numbers, so that a spinning loop looks the same twice."""
        return tuple(frame.place for frame in self.frames)


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    worker: str
    role: str
    stacks: tuple[Stack, ...]
    is_whole: bool
    """False: only unnamed threads, because the process could not write the rest."""

    def stack(self, name: str) -> Stack | None:
        return next((stack for stack in self.stacks if stack.name == name), None)


def parse_dump(text: str, *, worker: str, role: str) -> StackSnapshot:
    """Parse the first dump in a text; unrecognised lines are skipped."""
    found: dict[str, list[StackCall]] = {}
    names: dict[str, str] = {}
    frames = list[StackCall]()
    is_whole = False
    first = ""
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            if names:
                break
            frames = found.setdefault(thread[1], [])
            if line.startswith("Current"):
                first = thread[1]
        elif line.startswith(TASK):
            frames = found.setdefault(f"task {line.removeprefix(TASK)}", [])
        elif line == THREADS:
            frames = []
        elif named := _NAMED.match(line):
            names[f"{int(named[1], 16):x}"] = named[2]
        elif line == END:
            is_whole = True
            break
        elif (frame := _FRAME.match(line)) and len(frames) < _MAX_FRAMES:
            frames.append(StackCall(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    stacks = [Stack(_named(key, names, first), tuple(of)) for key, of in found.items()]
    return StackSnapshot(worker, role, tuple(sorted(stacks, key=lambda stack: stack.name)), is_whole)


def _named(key: str, names: dict[str, str], first: str) -> str:
    if not key.startswith("0x"):
        return key
    name = names.get(f"{int(key, 16):x}", "")
    # the main thread handles signals
    if name == "MainThread" or (not name and key == first):
        return "main"
    kind = next((kind for kind in _KINDS if name.startswith(f"{kind}-")), "")
    return kind or name or key


# Which workers of a role hang elsewhere than the others.
#
# A stack *stands* if it is the same in all snapshots; line numbers are ignored, so a loop within one
# function stands too. A worker's place is where its compute thread stands, else its main thread, and
# if both are idle, what the actor's main task awaits. Workers of a role at the same place form a
# group. The largest group shows what is normal for the role; smaller ones deviate from it.

LIFE = "task life"
"""The actor's own task (``pipeline.runtime.worker_process``)."""
_IDLE = (("concurrent/futures/thread.py", "_worker"), ("selectors.py", "select"))
"""Where a thread waits for work, and where the loop waits for events."""
_SHOWN = 8
"""Number of calls shown of a stack."""
MOVES = "moves"


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Workers of one role that hang at the same place."""

    role: str
    workers: tuple[str, ...]
    where: str
    """``compute``, ``main``, ``task life``, or ``moves``."""
    calls: tuple[str, ...]
    """Calls of the first worker, innermost first."""
    is_unlike: bool
    """Whether a larger group of its role is elsewhere."""


def stack_groups(looks: Mapping[str, Sequence[StackSnapshot]]) -> list[StackGroup]:
    """Group workers by role and place, the largest group of each role first.

    ``looks``: each worker's snapshots in order; at least one. Of two equally large groups neither
    is unlike."""
    by_role: dict[str, dict[tuple[object, ...], list[tuple[str, Stack | None, str]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for worker, of in sorted(looks.items()):
        where, stack = _standing(of)
        key = (where, stack.places if stack else ())
        by_role[of[-1].role][key].append((worker, stack, where))
    found = list[StackGroup]()
    for role, groups in sorted(by_role.items()):
        ordered = sorted(groups.values(), key=lambda members: (-len(members), members[0][0]))
        for members in ordered:
            _, stack, where = members[0]
            calls = tuple(str(frame) for frame in stack.frames[:_SHOWN]) if stack else ()
            workers = tuple(worker for worker, _, _ in members)
            found.append(StackGroup(role, workers, where, calls, len(members) < len(ordered[0])))
    return found


def _standing(looks: Sequence[StackSnapshot]) -> tuple[str, Stack | None]:
    """Return where a worker hangs and its stack there; ``moves`` and None for one that makes
    progress."""
    is_busy = False
    for name in ("compute", "main"):
        stacks = [look.stack(name) for look in looks]
        if any(stack is not None and _is_busy(stack) for stack in stacks):
            is_busy = True
            if stack := _same(stacks):
                return name, stack
    if is_busy:
        return MOVES, None
    if stack := _same([look.stack(LIFE) for look in looks]):
        return LIFE, stack
    return MOVES, None


def _same(stacks: Sequence[Stack | None]) -> Stack | None:
    last = stacks[-1]
    if last is None or any(stack is None or stack.places != last.places for stack in stacks):
        return None
    return last


def _is_busy(stack: Stack) -> bool:
    if not stack.frames:
        return False
    frame = stack.frames[0]
    return not any(frame.file.endswith(file) and frame.function == function for file, function in _IDLE)


MAX_LINES: Final = 6
"""One for the worker's own group, the rest for the largest other groups of its role."""
_MAX_NAMES = 4
_MAX_CALLS = 6


def stand_lines(worker: str, groups: Sequence[StackGroup]) -> tuple[str, ...]:
    """Describe a worker's group, then the others of its role, one line each; empty if it is in no
    group."""
    own = next((group for group in groups if worker in group.workers), None)
    if own is None:
        return ()
    others = [group for group in groups if group.role == own.role and group is not own]
    mates = tuple(name for name in own.workers if name != worker)
    beside = f", as {_threads_named(mates)}" if mates else ", alone in its role" if others else ""
    lines = [_line((worker,), own, beside), *(_line(group.workers, group) for group in others)]
    return tuple(lines[:MAX_LINES])


def _line(workers: Sequence[str], group: StackGroup, beside: str = "") -> str:
    s = "s" if len(workers) == 1 else ""
    where = f"move{s}, or wait{s} for work" if group.where == MOVES else f"stand{s} in {group.where}"
    calls = " < ".join(group.calls[:_MAX_CALLS])
    return f"{_threads_named(workers)} {where}{beside}" + (f": {calls}" if calls else "")


def _threads_named(workers: Sequence[str]) -> str:
    more = len(workers) - _MAX_NAMES
    return " and ".join(workers[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
