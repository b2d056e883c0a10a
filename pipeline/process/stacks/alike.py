"""Which workers of a role stand elsewhere than the others.

Of several looks, a stack that stays the same *stands*; lines are left out, so that a loop in one
function stands, too. A worker's place is where its computation stands, or its main thread. When
both are free, it is what the actor's main task awaits. Workers of one role with one place are a
group. The largest group is how the role is as a rule; each smaller one is unlike it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.process.stacks.parse import Stack, StackSnapshot

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
    """Whether a larger group of its role stands elsewhere."""


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
    """Return where a worker stands, and its stack there; ``moves`` and None if nowhere."""
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
