"""The period of an RL iteration: planned, and measured with a process for each device and a choice of what runs next.

    python -m ops.bench iteration --json ops/results/iteration.json

Devices are processes that sleep for each block, told what to do over ZeroMQ. ``hard`` keeps the plan's order on each
device; ``plan`` takes the ready block whose latest start is first, and never waits while there is one; the others are
known choices without a plan. All choices run at the same time, on the same draws of how long generation takes. The same
with virtual time and more iterations has no noise."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Protocol

import zmq

from ops.bench.table import provenance, show, write_json
from ops.emulated.pace import Pace
from pipeline.schedule.blocks import Block, Placement
from pipeline.schedule.files import read_json
from pipeline.schedule.iteration import IterationFile, IterationPlan, plan_iteration

FILE: Final = Path("configs/schedules/iteration.json")
DISTANCES: Final = (1, 2, 3)
VARIANCES: Final = (0.0, 0.3, 1.0)
_VARIED: Final = "generate"
_UNIT_S: Final = 0.01
_WARM_UP: Final = 4
_ANSWER_MS: Final = 60_000
Step = tuple[str, int]
"""A block, and its iteration."""
Key = Callable[[Step, int], Any]
"""What is smallest begins first, of a ready block and its place in the order of becoming ready."""


class Devices(Protocol):
    """Run blocks; ``wait`` returns the steps that ended next, and the time."""

    def begin(self, step: Step, devices: Sequence[int], span: float) -> None: ...
    def wait(self) -> tuple[list[Step], float]: ...


class Virtual:
    """Devices whose time is only counted."""

    def __init__(self) -> None:
        self._now, self._ends = 0.0, list[tuple[float, Step]]()

    def begin(self, step: Step, devices: Sequence[int], span: float) -> None:
        del devices
        heappush(self._ends, (self._now + span, step))

    def wait(self) -> tuple[list[Step], float]:
        self._now, step = heappop(self._ends)
        done = [step]
        while self._ends and self._ends[0][0] <= self._now:
            done.append(heappop(self._ends)[1])
        return done, self._now


def _device(endpoint: str, number: int) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, bytes([number + 1]))
    socket.connect(endpoint)
    socket.send(b"")
    pace = Pace()
    while (message := socket.recv()) != b"end":
        span, _, name = message.partition(b" ")
        pace.spend(float(span) * _UNIT_S)
        socket.send(name)


class Processes:
    """Devices that are processes, which sleep."""

    def __init__(self, number: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        spawned = get_context("spawn")
        self._all = [spawned.Process(target=_device, args=(f"tcp://127.0.0.1:{port}", n)) for n in range(number)]
        self._left: dict[Step, int] = {}
        for each in self._all:
            each.start()
        for _ in self._all:
            self._socket.recv_multipart()

    def begin(self, step: Step, devices: Sequence[int], span: float) -> None:
        self._left[step] = len(devices)
        for device in devices:
            self._socket.send_multipart([bytes([device + 1]), f"{span} {step[0]} {step[1]}".encode()])

    def wait(self) -> tuple[list[Step], float]:
        while True:
            _, text = self._socket.recv_multipart()
            name, _, iteration = text.decode().rpartition(" ")
            step = (name, int(iteration))
            self._left[step] -= 1
            if not self._left[step]:
                del self._left[step]
                return [step], time.monotonic() / _UNIT_S

    def close(self) -> None:
        for number, each in enumerate(self._all):
            self._socket.send_multipart([bytes([number + 1]), b"end"])
            each.join(10)
        self._socket.close()


def run(
    placement: Placement,
    devices: Devices,
    key: Key,
    spans: Callable[[Step], float],
    iterations: int,
    *,
    hard: bool = False,
) -> float:
    """Run iterations; return the period after the warm-up, in units. ``hard``: a block waits for its place in the order of
    ``key`` on each of its devices."""
    blocks = {block.name: block for block in placement.blocks}
    waits = {(name, i): 0 for name in blocks for i in range(iterations)}
    after: dict[Step, list[Step]] = {step: [] for step in waits}
    for each in placement.dependencies:
        for i in range(each.distance, iterations):
            waits[each.after, i] += 1
            after[each.before, i - each.distance].append((each.after, i))
    orders = {d: sorted((s for s in waits if d in blocks[s[0]].devices), key=lambda s: key(s, 0)) for d in _all(blocks)}
    places = dict.fromkeys(orders, 0)
    free, ready, ends = set(orders), dict[Step, int](), dict[int, float]()
    for step in [step for step, num in waits.items() if not num]:
        ready[step] = len(ready)
    num_ready, num_left = len(ready), len(waits)
    while num_left:
        for step in sorted(ready, key=lambda one: key(one, ready[one])):
            needed = blocks[step[0]].devices
            in_turn = not hard or all(orders[d][places[d]] == step for d in needed)
            if in_turn and free.issuperset(needed):
                free.difference_update(needed)
                del ready[step]
                for device in needed:
                    places[device] += 1
                devices.begin(step, needed, spans(step))
        done, now = devices.wait()
        for step in done:
            free.update(blocks[step[0]].devices)
            num_left -= 1
            ends[step[1]] = now
            for follower in after[step]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready[follower], num_ready = num_ready, num_ready + 1
    return (ends[iterations - 1] - ends[_WARM_UP]) / (iterations - 1 - _WARM_UP)


def _all(blocks: dict[str, Block]) -> Iterable[int]:
    return sorted({device for block in blocks.values() for device in block.devices})


def choices(placement: Placement, plan: IterationPlan) -> dict[str, tuple[Key, bool]]:
    """Return what may decide which ready block runs next, and whether it is a fixed order."""
    starts, latest = ({start.block: start.start for start in of} for of in (plan.starts, plan.latest))
    tails, period = _tails(placement), plan.period.value
    spans = {block.name: block.span for block in placement.blocks}
    return {
        "hard": (lambda step, _: (starts[step[0]] + period * step[1], step), True),
        "plan": (lambda step, _: (latest[step[0]] + period * step[1], starts[step[0]], step), False),
        "first ready": (lambda _, place: place, False),
        "oldest, longest tail": (lambda step, place: (step[1], -tails[step[0]], place), False),
        "longest tail": (lambda step, place: (-tails[step[0]], step[1], place), False),
        "shortest tail": (lambda step, place: (tails[step[0]], step[1], place), False),
        "shortest block": (lambda step, place: (spans[step[0]], step[1], place), False),
    }


def _tails(placement: Placement) -> dict[str, float]:
    """Return the time from a block's start to its iteration's end, by the longest way."""
    tails = {block.name: float(block.span) for block in placement.blocks}
    spans = dict(tails)
    for _ in placement.blocks:
        for each in placement.dependencies:
            if not each.distance:
                tails[each.before] = max(tails[each.before], spans[each.before] + tails[each.after])
    return tails


def lengths(placement: Placement, cv: float, seed: int) -> Callable[[Step], float]:
    """Return spans, of which those of generation are log-normal with this coefficient of variation and their own mean."""
    spans = {block.name: float(block.span) for block in placement.blocks}
    sigma = math.sqrt(math.log1p(cv * cv))

    def span(step: Step) -> float:
        if not step[0].startswith(_VARIED) or not cv:
            return spans[step[0]]
        return spans[step[0]] * random.Random(f"{seed} {step}").lognormvariate(-sigma * sigma / 2, sigma)

    return span


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench iteration", description="Planned and measured periods.")
    parser.add_argument("--iterations", type=int, default=30, help="of a measured run (default: %(default)s)")
    parser.add_argument("--virtual", type=int, default=2000, help="of a run in virtual time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    file, plans = read_json(FILE, IterationFile), {plan.staleness: plan for plan in plan_iteration(FILE)}
    rows = list[dict[str, Any]]()
    for distance in DISTANCES:
        plan = plans.get(distance, plans[max(plans)])
        placement = file.placement(FILE.stem, file.chunks, distance)
        for cv in VARIANCES:
            spans, named = lengths(placement, cv, 0), choices(placement, plan)
            for kind, iterations in (("measured", options.iterations), ("virtual", options.virtual)):
                found = _periods(placement, named, spans, iterations, is_real=kind == "measured")
                greedy = {name: period for name, period in found.items() if name not in ("hard", "plan")}
                best = min(greedy, key=lambda name: greedy[name])
                rows.append(
                    {
                        "distance": distance,
                        "cv": cv,
                        "kind": kind,
                        "planned": plan.period.value,
                        "periods": found,
                        "best": best,
                    }
                )
    show(
        "periods in units of 10 ms",
        ("distance", "cv", "", "planned", "hard", "plan", "best other", "", "plan / best", "plan / planned"),
        [
            (r["distance"], r["cv"], r["kind"], float(r["planned"]), r["periods"]["hard"], r["periods"]["plan"],
             r["periods"][r["best"]], r["best"], f"{r['periods']['plan'] / r['periods'][r['best']]:.3f}",
             f"{r['periods']['plan'] / r['planned']:.3f}")
            for r in rows
        ],
    )  # fmt: skip
    if options.json:
        write_json(options.json, provenance("iteration", arguments, seed=0) | {"rows": rows})


def _periods(
    placement: Placement,
    named: dict[str, tuple[Key, bool]],
    spans: Callable[[Step], float],
    iterations: int,
    *,
    is_real: bool,
) -> dict[str, float]:
    if not is_real:
        return {
            name: run(placement, Virtual(), key, spans, iterations, hard=hard) for name, (key, hard) in named.items()
        }
    fleets = {name: Processes(placement.num_devices) for name in named}
    try:
        with ThreadPoolExecutor(len(named)) as pool:
            ends = {
                name: pool.submit(run, placement, fleets[name], key, spans, iterations, hard=hard)
                for name, (key, hard) in named.items()
            }
            return {name: end.result() for name, end in ends.items()}
    finally:
        for fleet in fleets.values():
            fleet.close()


if __name__ == "__main__":
    main()
