"""Faults inside a worker's process, by a drill's orders: what no signal and no cut wire can do.

A worker's orders are one JSON file in a folder. Its process reads the file again when it changes,
and behaves by it at the places below until the file is gone. The product has no such places. They
are put around its functions as their modules are imported (``ops/drill/shim``). Without an order
each place is the function itself."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FOLDER: Final = "HEADRACE_DRILL_ORDERS"
"""Environment variable with the folder."""
_LOOK_EVERY_S: Final = 0.02
_POLL_S: Final = 0.02
_LONG_TAIL: Final = 10
"""One in so many responses is longer, under the order ``tail``."""


def write_orders(folder: Path, worker: str, orders: Mapping[str, Any]) -> None:
    """Give a worker these orders in place of its earlier ones; none: it is healthy again."""
    path = folder / f"{worker}.json"
    if not orders:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(dict(orders)))
    fresh.rename(path)


class OrderReader:
    """The orders of this process's worker, as they are now."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._next_s = 0.0
        self._stamp: tuple[int, int] | None = None
        self._orders: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return an order's value; None without that order."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOOK_EVERY_S
            self._look()
        return self._orders.get(name)

    def _look(self) -> None:
        worker = own_name(sys.argv)
        if worker is None:
            return
        path = self._folder / f"{worker}.json"
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._orders, self._stamp = json.loads(path.read_text()), stamp
        except FileNotFoundError:
            self._orders, self._stamp = {}, None


def own_name(arguments: Sequence[str]) -> str | None:
    """Return the worker's name in a command line; None in another process."""
    if "--name" not in arguments[:-1]:
        return None
    return arguments[list(arguments).index("--name") + 1]


# -- the places ------------------------------------------------------------------------------------


def _context(module: Any, orders: OrderReader) -> None:
    """``hang``: the main loop stands still; heartbeats go on. ``leak``: so many MB a second are
    allocated and kept. ``raise``: a task beside the main loop raises, in a process that was there
    at that monotonic time."""
    of, kept, state = module.ActorContext, list[bytes](), {"at_s": 0.0, "begun_s": 0.0, "raised_s": 0.0}
    original = of.waiting_for

    async def fails() -> None:
        raise RuntimeError("the drill orders this task to fail")

    def waiting_for(self: Any, *arguments: Any, **words: Any) -> None:
        original(self, *arguments, **words)
        now_s = time.monotonic()
        state["begun_s"] = state["begun_s"] or now_s
        raise_s = float(orders.get("raise") or 0.0)
        if raise_s > max(state["begun_s"], state["raised_s"]):
            state["raised_s"] = raise_s
            self.spawn("drill", fails())
        rate = orders.get("leak")
        if rate:
            # not zeros, whose pages would be shared
            kept.append(b"\1" * int(rate * 1e6 * min(1.0, now_s - (state["at_s"] or now_s))))
        state["at_s"] = now_s if rate else 0.0
        while orders.get("hang"):
            time.sleep(_POLL_S)

    of.waiting_for = waiting_for


def _pace(module: Any, orders: OrderReader) -> None:
    """``slow``: emulated work takes so many times as long. ``stuck``: a computation never ends."""
    original = module.Pace.spend

    def spend(self: Any, seconds: float) -> None:
        while orders.get("stuck"):
            time.sleep(_POLL_S)
        original(self, seconds * float(orders.get("slow") or 1.0))

    module.Pace.spend = spend


def _generation(module: Any, orders: OrderReader) -> None:
    """``dead``: the engine reports success, and samples nothing. ``garbage``: its tokens are
    random. ``load``: new weights are not in the engine while the order lasts."""
    of = module.EmulatedEngine
    advance, window, load = of.advance, of._window, of.load_weights
    rng = random.Random(0)

    def dead_advance(self: Any, max_steps: int) -> Any:
        if orders.get("dead"):
            time.sleep(_POLL_S)
            return []
        return advance(self, max_steps)

    def garbage_window(self: Any, slot: Any, reason: Any) -> Any:
        found = window(self, slot, reason)
        if not orders.get("garbage"):
            return found
        tokens = found.tokens.copy()
        words = self._tokens.words
        tokens[:-1] = [words[rng.randrange(words.size)] for _ in range(tokens.size - 1)]
        return replace(found, tokens=tokens)

    def slow_load(self: Any, tensors: Any, policy_version: int) -> None:
        while orders.get("load"):
            time.sleep(_POLL_S)
        load(self, tensors, policy_version)

    of.advance, of._window, of.load_weights = dead_advance, garbage_window, slow_load


def _law(module: Any, orders: OrderReader) -> None:
    """``tail``: one response in ten is so many times as long. ``long``: all are."""
    original = module.LengthLaw.draw

    def draw(self: Any, seed: int, trajectory: Any) -> int:
        length = original(self, seed, trajectory)
        is_long = random.Random(str(trajectory)).randrange(_LONG_TAIL) == 0
        return int(length * float((orders.get("tail") if is_long else None) or orders.get("long") or 1.0))

    module.LengthLaw.draw = draw


def _training(module: Any, orders: OrderReader) -> None:
    """``nan``: the loss on one batch in so many is no number, however often the step is made. It is
    refused as the real one is."""
    original, steps, bad = module.EmulatedTraining.step, count(), set[tuple[str, ...]]()

    def step(self: Any, samples: Any, objective: Any, *limits: Any) -> Any:
        every, names = orders.get("nan"), tuple(sample.name for sample in samples)
        if not every or (names not in bad and next(steps) % int(every)):
            return original(self, samples, objective, *limits)
        bad.add(names)
        before = self.state
        result = original(self, samples, objective)
        self.state = before
        return replace(result, applied=False, loss=float("nan"), grad_norm=float("nan"))

    module.EmulatedTraining.step = step


def _weight_receiver(module: Any, orders: OrderReader) -> None:
    """``stale``: no announcement is seen."""
    look = module.WeightReceiver.look

    async def deaf_look(self: Any) -> None:
        if orders.get("stale"):
            # without it the next wait would end at once, for ever, and the main loop would stand
            self._announced.clear()
        else:
            await look(self)

    module.WeightReceiver.look = deaf_look
    _digest(module, orders)


def _digest(module: Any, orders: OrderReader) -> None:
    """``damage``: the bytes of a version are not those that were published, by whatever way they
    came."""
    digest = module.digest_buffer

    def wrong_digest(data: Any) -> Any:
        found = digest(data)
        return f"{found[:-4]}dead" if orders.get("damage") else found

    module.digest_buffer = wrong_digest


def _links(module: Any, orders: OrderReader) -> None:
    """``corrupt``: a byte is changed in half of the messages to this worker."""
    original, rng = module.ZmqSender.__init__, random.Random(0)

    class Corrupting:
        def __init__(self, socket: Any, endpoint: str) -> None:
            self._socket, self._endpoint = socket, endpoint

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

        def put(self, frames: Any) -> Any:
            receiver = orders.get("corrupt")
            if receiver and f"/{receiver}." in self._endpoint and rng.random() < 0.5:
                frames = flipped(frames, rng)
            return self._socket.put(frames)

    def make(self: Any, socket: Any, endpoint: str, *arguments: Any, **words: Any) -> None:
        original(self, Corrupting(socket, endpoint), endpoint, *arguments, **words)

    module.ZmqSender.__init__ = make


def flipped(frames: Sequence[Any], rng: random.Random) -> list[bytes]:
    """Return a message with one byte of its largest frame changed."""
    changed = [bytes(frame) for frame in frames]
    largest = max(range(len(changed)), key=lambda at: len(changed[at]))
    body = bytearray(changed[largest])
    if body:
        body[rng.randrange(len(body))] ^= 1 + rng.randrange(255)
    changed[largest] = bytes(body)
    return changed


PLACES: Final[Mapping[str, Callable[[Any, OrderReader], None]]] = {
    "pipeline.runtime.context": _context,
    "workers.engines.emulated.pace": _pace,
    "workers.engines.emulated.generation": _generation,
    "workers.engines.emulated.law": _law,
    "workers.engines.emulated.training": _training,
    "workers.generator.weight_receiver": _weight_receiver,
    "workers.generator.host_weights": _digest,
    "pipeline.weights.host_fetch": _digest,
    "protocol.zeromq.links": _links,
}
"""Modules whose functions orders change."""


def _clock(orders: OrderReader) -> None:
    """``clock``: the wall clock of this process is so many seconds ahead."""
    others = time.time

    def moved() -> float:
        return others() + float(orders.get("clock") or 0.0)

    time.time = moved


class _Finder(MetaPathFinder):
    """Finds the modules of ``PLACES`` where they are, and changes them once they are loaded."""

    def __init__(self, orders: OrderReader) -> None:
        self._orders = orders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = PLACES.get(fullname)
        spec = None if place is None else PathFinder.find_spec(fullname, path, target)
        if place is None or spec is None or spec.loader is None:
            return None
        loader, orders = spec.loader, self._orders
        execute = loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            place(module, orders)

        _put(loader, changed)
        return spec


def _put(loader: Loader, execute: Callable[[ModuleType], None]) -> None:
    setattr(loader, "exec_module", execute)  # noqa: B010 -- this one loader's method, not the class's


def obey() -> None:
    """Follow the orders of the folder that the environment names, in this process and in those
    forked of it."""
    orders = OrderReader(Path(os.environ[FOLDER]))
    _clock(orders)
    sys.meta_path.insert(0, _Finder(orders))
