"""One iteration of RL as work that repeats: generation, scoring, learning, and the update that brings new weights.

An iteration has several chunks of trajectories, and some blocks run once for all of them. The weights that generation
waits for are those of an iteration before: one earlier is on-policy, each more lets work overlap that would else wait.
So the period falls with staleness until the busiest device's work is all that is left of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from pipeline.schedule.blocks import Block, Dependency, Placement
from pipeline.schedule.bounds import Bounds
from pipeline.schedule.files import limits, read_json
from pipeline.schedule.plan import Proven, Start
from pipeline.schedule.repetend import Repetend, copied
from pipeline.schedule.search import search
from protocol.errors import ConfigError

_MOST_STALENESS = 8
NO_LIMIT = 1 << 30
"""Of memory, more than anything takes."""


class IterationBlock(Block, frozen=True, forbid_unknown_fields=True):
    """A block of each chunk, or of the iteration."""

    once: bool = False
    """It runs once an iteration, for all chunks."""


class IterationDependency(Dependency, frozen=True, forbid_unknown_fields=True):
    """``distance`` counts iterations. A block that runs once waits for all chunks, and all chunks wait for it."""

    stale: bool = False
    """The new weights: the distance is what is varied."""


class IterationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person writes of an iteration."""

    devices: int
    chunks: int
    blocks: tuple[IterationBlock, ...]
    dependencies: tuple[IterationDependency, ...]
    memory: int | tuple[int, ...] | None = None

    def placement(self, name: str, chunks: int, staleness: int) -> Placement:
        """Return the blocks of a whole iteration. Chunks pass each block in order, also from iteration to iteration."""
        once = {block.name: block.once for block in self.blocks}
        Placement(name, self.devices, self.blocks, self.dependencies).check_names()

        def copies(block: str) -> list[str]:
            return [block] if once[block] else [copied(block, chunk) for chunk in range(chunks)]

        blocks = [Block(c, b.span, b.memory, b.devices) for b in self.blocks for c in copies(b.name)]
        waits = list[Dependency]()
        for block in self.blocks:
            if len(row := copies(block.name)) > 1:
                waits += [Dependency(a, b) for a, b in pairwise(row)] + [Dependency(row[-1], row[0], 1)]
        for each in self.dependencies:
            distance = staleness if each.stale else each.distance
            before, after = copies(each.before), copies(each.after)
            by_chunk = not distance and len(before) == len(after)
            pairs = zip(before, after, strict=True) if by_chunk else [(before[-1], after[0])]
            waits += [Dependency(a, b, distance) for a, b in pairs]
        return Placement(name, self.devices, tuple(blocks), tuple(waits)).check()


class Queue(msgspec.Struct, frozen=True):
    """What waits between two blocks in the endless plan."""

    before: str
    after: str
    chunks: int
    """Most chunks at once."""
    iterations: int
    """Most iterations whose chunks are between the start of the one and the start of the other."""


class IterationPlan(msgspec.Struct, frozen=True):
    """The plan of an iteration with one staleness."""

    staleness: int
    """Iterations from an update to the first chunk that is generated with it; 1 is on-policy."""
    period: Proven
    latency: Proven
    bounds: Bounds
    queues: tuple[Queue, ...]
    starts: tuple[Start, ...]
    """Start times, a fixed order on each device."""
    latest: tuple[Start, ...] = ()
    """The latest start times with which the new weights are not late, as priorities of a choice that never waits while
    there is work: smaller is first, then the earlier start. What nothing waits for yields to what the update needs."""


def plan_iteration(path: Path, *, chunks: int | None = None, time_limit_s: float = 60.0) -> list[IterationPlan]:
    """Return plans with staleness 1, 2 and so on, until more of it does not help. Raises ConfigError."""
    file = read_json(path, IterationFile)
    chunks = file.chunks if chunks is None else chunks
    if chunks < 1:
        raise ConfigError(f"{path}: {chunks} chunks; expected 1 or more")
    if not any(each.stale for each in file.dependencies):
        raise ConfigError(f"{path}: no dependency is of the new weights; expected one with stale: true")
    memory = limits(NO_LIMIT if file.memory is None else file.memory, file.devices)
    plans = list[IterationPlan]()
    end_s = time.monotonic() + time_limit_s
    for staleness in range(1, _MOST_STALENESS + 1):
        left_s = end_s - time.monotonic()
        if plans and left_s <= 0:
            break
        found = search(file.placement(path.stem, chunks, staleness), memory, time_limit_s=max(left_s / 2, 1.0))
        repetend = found.repetend
        if repetend is None:
            raise ConfigError(f"{path}: no order was found in time; give it more with --time-limit")
        starts = sorted(repetend.starts.items(), key=lambda item: item[1])
        latest = _latest(file.placement(path.stem, chunks, staleness), file, repetend)
        plans.append(
            IterationPlan(
                staleness,
                Proven(repetend.period, float(found.period_bound), found.period_proof),
                Proven(repetend.latency, found.latency_bound, found.latency_proof),
                found.bounds,
                tuple(_queues(file, repetend)),
                tuple(Start(step.block, 0, start) for step, start in starts),
                tuple(Start(step.block, 0, latest[step.block]) for step, _ in starts),
            )
        )
        if repetend.period <= max(found.bounds.work, found.bounds.memory):
            break
    return plans


def _latest(placement: Placement, file: IterationFile, repetend: Repetend) -> dict[str, int]:
    """Return each block's latest start: that of the blocks that bring new weights is their own, and what they do not wait
    for may be one period late."""
    fixed = {each.before for each in file.dependencies if each.stale}
    starts = {step.block: start for step, start in repetend.starts.items()}
    spans = {block.name: block.span for block in placement.blocks}
    latest = {name: start if name in fixed else start + repetend.period for name, start in starts.items()}
    for _ in placement.blocks:
        for each in placement.dependencies:
            until = latest[each.after] + repetend.period * each.distance
            latest[each.before] = min(latest[each.before], until - spans[each.before])
    return latest


def _queues(file: IterationFile, repetend: Repetend) -> Iterator[Queue]:
    period, starts = repetend.period, {step.block: start for step, start in repetend.starts.items()}
    spans = {block.name: block.span for block in file.blocks}
    once = {block.name for block in file.blocks if block.once}
    for each in file.dependencies:
        if each.stale or each.distance or once & {each.before, each.after}:
            continue
        chunks = [step.block.partition("#")[2] for step in repetend.starts if step.block.startswith(f"{each.before}#")]
        begins = [starts[f"{each.before}#{chunk}"] for chunk in chunks]
        ends = [begin + spans[each.before] for begin in begins]
        takes = [starts[f"{each.after}#{chunk}"] for chunk in chunks]
        waiting = [
            sum((at - end) // period - (at - take) // period for end, take in zip(ends, takes, strict=True))
            for at in ends
        ]
        apart = [take // period - begin // period for begin, take in zip(begins, takes, strict=True)]
        yield Queue(each.before, each.after, max(waiting), max(apart) + 1)
