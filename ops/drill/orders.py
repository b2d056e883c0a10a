"""Faults inside a worker's process that no signal and no cut wire can cause, such as a hung main loop.

A worker's orders are one JSON file in a folder. Its process reads the file again when it changes, and follows
it until the file is removed. The product itself knows no orders: its functions are patched as their modules are
imported (``ops/drill/shim``), and without an order a patched function only calls the original."""

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
_RELOAD_EVERY_S: Final = 0.02
_POLL_S: Final = 0.02


def write_orders(folder: Path, worker: str, orders: Mapping[str, Any]) -> None:
    """Replace a worker's orders; without any it is healthy again."""
    path = folder / f"{worker}.json"
    if not orders:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(dict(orders)))
    fresh.rename(path)


class OrderReader:
    """Reads the current orders of this process's worker."""

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
            self._next_s = now_s + _RELOAD_EVERY_S
            self._reload()
        return self._orders.get(name)

    def _reload(self) -> None:
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


# -- patches -------------------------------------------------------------------------------------


def _patch_context(module: Any, orders: OrderReader) -> None:
    """``hang``: the main loop stops, while heartbeats continue. ``leak``: allocates this many MB a second and
    keeps them."""
    of, kept, last_s = module.ActorContext, list[bytes](), 0.0
    original = of.waiting_for

    def waiting_for(self: Any, *arguments: Any, **words: Any) -> None:
        nonlocal last_s
        original(self, *arguments, **words)
        now_s = time.monotonic()
        rate = orders.get("leak")
        if rate:
            # pages of zeros would be shared
            kept.append(b"\1" * int(rate * 1e6 * min(1.0, now_s - (last_s or now_s))))
        last_s = now_s if rate else 0.0
        while orders.get("hang"):
            time.sleep(_POLL_S)

    of.waiting_for = waiting_for


def _patch_generation(module: Any, orders: OrderReader) -> None:
    """``garbage``: sampled tokens are random."""
    of = module.EmulatedEngine
    window, rng = of._window, random.Random(0)

    def garbage_window(self: Any, slot: Any, reason: Any) -> Any:
        found = window(self, slot, reason)
        if not orders.get("garbage"):
            return found
        tokens = found.tokens.copy()
        words = self._tokens.words
        tokens[:-1] = [words[rng.randrange(words.size)] for _ in range(tokens.size - 1)]
        return replace(found, tokens=tokens)

    of._window = garbage_window


def _patch_training(module: Any, orders: OrderReader) -> None:
    """``nan``: the loss on one batch in this many is not finite, each time the step is repeated. The step is
    refused as in a real backend."""
    original, steps, bad = module.EmulatedTraining.step, count(), set[tuple[str, ...]]()

    def step(self: Any, samples: Any, rule: Any, *limits: Any) -> Any:
        every, names = orders.get("nan"), tuple(sample.name for sample in samples)
        if not every or (names not in bad and next(steps) % int(every)):
            return original(self, samples, rule, *limits)
        bad.add(names)
        before = self.state
        result = original(self, samples, rule)
        self.state = before
        return replace(result, applied=False, loss=float("nan"), grad_norm=float("nan"))

    module.EmulatedTraining.step = step


def _patch_weight_receiver(module: Any, orders: OrderReader) -> None:
    """``stale``: announcements of weights are not read."""
    poll = module.WeightReceiver.poll

    async def deaf_poll(self: Any) -> None:
        if orders.get("stale"):
            # if it stayed set, every wait would return at once and the main loop would spin
            self._announced.clear()
        else:
            await poll(self)

    module.WeightReceiver.poll = deaf_poll


PATCHES: Final[Mapping[str, Callable[[Any, OrderReader], None]]] = {
    "pipeline.runtime.context": _patch_context,
    "ops.emulated.generation": _patch_generation,
    "ops.emulated.training": _patch_training,
    "workers.generator.weight_receiver": _patch_weight_receiver,
}
"""Modules whose functions orders change."""


def _patch_clock(orders: OrderReader) -> None:
    """``clock``: the wall clock of this process is this many seconds ahead."""
    original = time.time

    def moved() -> float:
        return original() + float(orders.get("clock") or 0.0)

    time.time = moved


class _Finder(MetaPathFinder):
    """Patches the modules of ``PATCHES`` when they are loaded."""

    def __init__(self, orders: OrderReader) -> None:
        self._orders = orders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = PATCHES.get(fullname)
        spec = None if patch is None else PathFinder.find_spec(fullname, path, target)
        if patch is None or spec is None or spec.loader is None:
            return None
        loader, orders = spec.loader, self._orders
        execute = loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module, orders)

        _replace_exec(loader, execute_and_patch)
        return spec


def _replace_exec(loader: Loader, execute: Callable[[ModuleType], None]) -> None:
    setattr(loader, "exec_module", execute)  # noqa: B010 -- this one loader's method, not the class's


def obey() -> None:
    """Follow the orders in the folder that the environment names, in this process and its forks."""
    orders = OrderReader(Path(os.environ[FOLDER]))
    _patch_clock(orders)
    sys.meta_path.insert(0, _Finder(orders))
