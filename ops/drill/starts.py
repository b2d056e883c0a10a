"""Faults that strike while a supervisor starts: from when it has its lock until it owns the run's state."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from typing import Any

from ops.drill.events import Ending, EndOrdered, Event, OrderResult, SupervisorEnded
from ops.drill.fleet import RUN, DrillFleet, until
from ops.drill.witness import servers_of
from pipeline.ledger.redis import keys
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.ids import Role

_START_S = 120.0
_SPREAD_S = 1.5
"""The fault strikes at most this much later."""
_TIGHT_S = 0.002
_ORDER_S = 180.0
_HELD_S = 60.0
_FINISHED = "is finished"


def is_starting(fleet: DrillFleet) -> bool:
    """Whether the newest supervisor lives and does not own the run's state yet."""
    if fleet.is_over():
        return False
    blob = fleet.ledger("GET", keys.run_status(RUN))
    try:
        return blob is None or json.loads(blob).get("supervisor") != fleet.supervisor.pid
    except ValueError:
        return True


def kill_server(fleet: DrillFleet, rng: random.Random) -> str:
    """Kill the ledger's server; return a note, "" if that was during the start."""
    folder = fleet.run_dir / "ledger"
    _until_begun(fleet)
    if not until(lambda: servers_of(folder), _START_S, poll_s=_TIGHT_S):
        return "no server had been started"
    time.sleep(rng.choice([0.0, rng.uniform(0.0, _SPREAD_S)]))
    was_late = not is_starting(fleet)
    for pid in servers_of(folder):
        fleet.kill(pid)
    return "the start was over" if was_late else ""


def go_down(fleet: DrillFleet, rng: random.Random) -> tuple[list[Event], str]:
    """End the run by ``headrace down``; return what happened, and a note."""
    answer, words, note = _accepted(fleet, rng, "down", str(fleet.run_dir))
    version = max((row.policy_version for row in fleet.updates()), default=-1)
    is_over = bool(until(fleet.is_over, 5.0))
    found = "the supervisor went on" if answer is not None else f"the command failed: {words}"
    if not is_over:
        fleet.supervisor.kill()
        fleet.supervisor.wait()
    events: list[Event] = [
        OrderResult("`headrace down` during a start", held=is_over and answer is not None, found=found)
    ]
    return [*events, EndOrdered(Ending.DOWN_STARTING, version), SupervisorEnded(fleet.supervisor.returncode)], note


def scale(fleet: DrillFleet, rng: random.Random) -> tuple[list[Event], str]:
    """Change the number of generators; return whether that holds, and a note."""
    number = rng.choice([1, 3])
    answer, words, note = _accepted(fleet, rng, "scale", f"generator={number}", str(fleet.run_dir))
    what = f"`headrace scale generator={number}` during a start"
    if answer is None and (fleet.is_over() or _FINISHED in words):
        return [], f"the run was over before the start was; {note}"
    if answer is None:
        return [OrderResult(what, held=False, found=f"{note}: {words}")], ""
    until(lambda: not is_starting(fleet), _START_S)
    is_held = until(lambda: fleet.is_over() or _num_generators(fleet) == (number, number), _HELD_S)
    found = "{} are wanted, {} exist".format(*_num_generators(fleet))
    return [OrderResult(what, held=bool(is_held), found=found)], note


def _accepted(fleet: DrillFleet, rng: random.Random, *order: str) -> tuple[Any, str, str]:
    """Give an order during the start, repeating it while it is refused because the run folder is missing or the
    start is not over. Return the answer, the last words, and a note."""
    first = Order(fleet, *order)
    _until_begun(fleet)
    time.sleep(rng.choice([0.0, rng.uniform(0.0, _SPREAD_S)]))
    num_refused, deadline = 0, time.monotonic() + _START_S
    was_late = not is_starting(fleet)
    answer, words = first.give()
    while answer is None and _FINISHED not in words and time.monotonic() < deadline and not fleet.is_over():
        num_refused += 1
        was_late = not is_starting(fleet)
        answer, words = Order(fleet, *order).give()
    when = "after" if was_late else "during"
    note = f"{order[0]} accepted {when} the start" + (f", refused {num_refused} times before" if num_refused else "")
    return answer, words, note if num_refused or was_late else ""


def _num_generators(fleet: DrillFleet) -> tuple[int, int]:
    """Return how many generators of this host are wanted, and how many exist."""
    blob = fleet.ledger("GET", keys.fleet(RUN))
    wanted = json.loads(blob).get("generator", 0) if blob else 0
    own = [beat for beat in fleet.workers(Role.GENERATOR) if beat.who.worker.startswith("generator-")]
    return wanted, len(own)


def _until_begun(fleet: DrillFleet) -> None:
    """Wait until the newest supervisor has its lock."""
    until(lambda: fleet.is_over() or supervisor_pid(fleet.run_dir) == fleet.supervisor.pid, _START_S, poll_s=_TIGHT_S)


class Order:
    """A ``headrace`` command whose imports are done, so that it begins at once."""

    _PREPARED = (
        "import sys, pipeline.operator.ending, pipeline.operator.steering, pipeline.runtime.registry.redis, pipeline.cli\n"
        "print(flush=True); sys.stdin.readline(); pipeline.cli.main()"
    )

    def __init__(self, fleet: DrillFleet, *arguments: str) -> None:
        self._process = fleet.prepared(self._PREPARED, *arguments, "--json")

    def give(self) -> tuple[Any, str]:
        """Let it begin; return its output, or None and its last words."""
        try:
            out, error = self._process.communicate("\n", timeout=_ORDER_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return None, f"no answer within {_ORDER_S:g} s"
        try:
            return (json.loads(out) if self._process.returncode == 0 else None), error[-300:]
        except json.JSONDecodeError:
            return None, error[-300:]
