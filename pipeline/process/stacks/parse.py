"""From the text of a dump to stacks."""

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
"""Threads of an actor; the worker's name follows in theirs."""


@dataclass(frozen=True, slots=True)
class StackCall:
    """One call."""

    file: str
    line: int
    """0: not known."""
    function: str

    @property
    def place(self) -> tuple[str, str]:
        """The last two parts of the file's path, and the function: alike on every machine."""
        return "/".join(PurePosixPath(self.file).parts[-2:]), self.function

    def __str__(self) -> str:
        return f"{self.function} ({self.place[0]}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's calls, or the chain of awaits of one task."""

    name: str
    """``main``, ``compute`` and so on; of a task, ``task`` and its name."""
    frames: tuple[StackCall, ...]
    """The innermost first."""

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Its calls without lines, so that a turning loop looks the same twice."""
        return tuple(frame.place for frame in self.frames)


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """The stacks of one worker at one moment."""

    worker: str
    role: str
    stacks: tuple[Stack, ...]
    is_whole: bool
    """False: threads alone, without their names, since the process could not go on to more."""

    def stack(self, name: str) -> Stack | None:
        """Return one stack by its name."""
        return next((stack for stack in self.stacks if stack.name == name), None)


def parse_dump(text: str, *, worker: str, role: str) -> StackSnapshot:
    """Return the stacks of the first dump in a text; lines that are neither are left out."""
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
    # the kernel has the main thread handle a signal
    if name == "MainThread" or (not name and key == first):
        return "main"
    kind = next((kind for kind in _KINDS if name.startswith(f"{kind}-")), "")
    return kind or name or key


# Which workers of a role stand elsewhere than the others.
#
# Of several looks, a stack that stays the same *stands*; lines are left out, so that a loop in one
# function stands, too. A worker's place is where its computation stands, or its main thread. When
# both are free, it is what the actor's main task awaits. Workers of one role with one place are a
# group. The largest group is how the role is as a rule; each smaller one is unlike it.

LIFE = "task life"
"""The actor's own task (``pipeline.runtime.worker_process``)."""
_IDLE = (("concurrent/futures/thread.py", "_worker"), ("selectors.py", "select"))
"""Where a thread waits for its next piece of work, and the loop for its next event."""
_SHOWN = 8
"""Calls of a stack that are shown."""
MOVES = "moves"


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Workers of one role that stand at one place."""

    role: str
    workers: tuple[str, ...]
    where: str
    """``compute``, ``main``, ``task life``, or ``moves``."""
    calls: tuple[str, ...]
    """Of the first worker, the innermost first."""
    is_unlike: bool
    """Whether a larger group of its role is at another place."""


def stack_groups(looks: Mapping[str, Sequence[StackSnapshot]]) -> list[StackGroup]:
    """Return the groups by role, the largest of each role first.

    ``looks``: each worker's looks in order; at least one. A tie of two groups has no odd one."""
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
    """Return the place where a worker hangs, and its stack; ``moves`` and None for one that moves."""
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
    """Return whether a thread does more than wait for work, or for the loop's next event."""
    if not stack.frames:
        return False
    frame = stack.frames[0]
    return not any(frame.file.endswith(file) and frame.function == function for file, function in _IDLE)


MAX_LINES: Final = 6
"""Its own group, and the largest others of its role."""
_MAX_NAMES = 4
_MAX_CALLS = 6


def stand_lines(worker: str, groups: Sequence[StackGroup]) -> tuple[str, ...]:
    """Return a worker's group first, then the others of its role; nothing where no group has it."""
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
