"""From the text of a dump to stacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.process.stacks.dump import END, TASK, THREADS

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NAMED = re.compile(r"^  (0x[0-9a-f]+) (.*)$")
_MAX_FRAMES = 100
_KINDS = ("compute", "storage")
"""Threads of an actor whose names go on with the worker's."""


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
