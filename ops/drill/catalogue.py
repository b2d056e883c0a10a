"""The catalogue of faults and negative controls: how each is injected, and the components that are
right to blame. Drills and ``python -m ops.bench.trace`` share it.

*Consumes* a fleet that is well. *Produces* one fault, and its end. The truth is known here and in
the scoring, and nowhere else: no detector reads either.

Codes are those of the project's list of faults: F01 to F20, and N1 to N8 for what must be blamed on
no worker. A drill's kinds of fault belong to the same codes (``CODES``)."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ops.drill.edges import EdgeRelays, EdgeTrouble
from ops.drill.faults import Site, Striking
from ops.drill.fleet import DrillFleet, until
from ops.drill.orders import write_orders
from ops.drill.schedule import FaultKind, PlannedFault
from protocol.ids import Role

EXPLICIT_S, GRAY_S, CONTROL_S = 25.0, 140.0, 30.0
"""Time within which a fault must be named, one that stops something and one that does not; and the
time that a control lasts."""
LEDGER = "ledger"
VERDICT_S = 0.02
"""Seconds of a healthy verdict, for fleets in which verifiers become slow."""
_STATE_S = 5.0
_DRAG_S = (0.03, 0.3)
"""A dragged server runs for so long, and stands for so long."""
_SCORERS = (Role.REWARD, Role.REFERENCE)


@dataclass(slots=True)
class Injection:
    """One fault or control that is on."""

    site: Site
    edges: EdgeRelays
    rng: random.Random
    target: str
    """A worker; "" for one that strikes none."""
    right: set[str] = field(default_factory=set[str])
    """Components that are right to blame."""
    undo: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    notes: list[str] = field(default_factory=list[str])

    @property
    def fleet(self) -> DrillFleet:
        """The fleet."""
        return self.site.fleet

    def end(self) -> None:
        """End it."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()

    def order(self, worker: str, **orders: object) -> None:
        """Give a worker orders, until the end."""
        write_orders(self.fleet.orders, worker, orders)
        self.undo.append(lambda: write_orders(self.fleet.orders, worker, {}))

    def pid(self, worker: str) -> int | None:
        """Return a worker's process; None when it is away."""
        beat = self.fleet.beats().get(worker)
        return None if beat is None else beat.pid

    def names(self, *roles: Role) -> list[str]:
        """Return the workers of these roles."""
        return [beat.who.worker for role in roles for beat in self.fleet.workers(role)]


Begin = Callable[[Injection], None]
"""Begins a fault and adds to ``right``. Without an addition its target is right."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A kind of fault or control."""

    code: str
    name: str
    begin: Begin
    roles: tuple[Role, ...] = ()
    """Of the worker that it strikes."""
    kinds: frozenset[str] = frozenset()
    """Right kinds of a finding."""
    within_s: float = EXPLICIT_S
    """From the onset; of a control the time that it lasts."""
    needs_disk: bool = False
    """Whether the checkpoints must lie on a small disk."""
    stops: bool = True
    """Whether something stands still, so that the bar of a stall holds."""

    @property
    def is_control(self) -> bool:
        """Whether no worker is to be blamed."""
        return self.code.startswith("N")


# -- faults ----------------------------------------------------------------------------------------


def _crash(on: Injection) -> None:
    pid = on.pid(on.target)
    if pid is None or not on.fleet.kill(pid):
        on.notes.append(f"{on.target} was not there to be killed")


def _freeze(on: Injection) -> None:
    if (pid := on.pid(on.target)) is not None:
        on.fleet.kill(pid, signal.SIGSTOP)
        on.undo.append(lambda: on.fleet.kill(pid, signal.SIGCONT))


def _ordered(**orders: object) -> Begin:
    return lambda on: on.order(on.target, **orders)


def _fail(on: Injection) -> None:
    """A task of the present process raises; its successor's does not."""
    on.order(on.target, **{"raise": time.monotonic()})


def _slow_verdicts(factor: float) -> Begin:
    """The verifiers of one reward worker take so many times as long."""
    return lambda on: _switch(on, f"slow {VERDICT_S * (factor - 1):g}")


def _switch(on: Injection, text: str) -> None:
    pid = on.pid(on.target)
    on.fleet.switch.write_text(f"{text} @{pid}" if on.target else text)
    on.undo.append(lambda: on.fleet.switch.unlink(missing_ok=True))


def _verifier(text: str) -> Begin:
    return lambda on: _switch(on, text)


def _corrupt(on: Injection) -> None:
    receiver = on.rng.choice(on.names(*_SCORERS))
    on.order(on.target, corrupt=receiver)
    on.right |= {on.target, f"{on.target}>{receiver}"}


def _edge(trouble: EdgeTrouble) -> Begin:
    def begin(on: Injection) -> None:
        receiver = on.rng.choice(on.names(*_SCORERS))
        on.edges.set(on.target, receiver, trouble)
        on.undo.append(lambda: on.edges.set(on.target, receiver, None))
        on.right.add(f"{on.target}>{receiver}")

    return begin


def _of_the_drill(kind: FaultKind, *right: str) -> Begin:
    """One of the drill's own, which lasts until it is ended."""

    def begin(on: Injection) -> None:
        striking = Striking(PlannedFault(kind, 0.0, on.rng.randrange(1 << 32)), on.site)
        on.undo.append(striking.end)
        on.right |= set(right)

    return begin


def _slow_server(on: Injection) -> None:
    """The ledger's server runs a tenth of the time. To name it is right, to blame others is not."""
    on.right.add(LEDGER)
    pid, ended = on.fleet.server_pid(), threading.Event()
    if pid is None:
        on.notes.append("the ledger has no server of its own")
        return

    def drag() -> None:
        while not ended.wait(_DRAG_S[0]):
            on.fleet.kill(pid, signal.SIGSTOP)
            ended.wait(_DRAG_S[1])
            on.fleet.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=drag, name="drag", daemon=True)
    thread.start()
    on.undo += [thread.join, ended.set]


def _stale(order: str) -> Begin:
    def begin(on: Injection) -> None:
        on.order(on.target, **{order: True})
        on.right |= {on.target, f"{Role.LEARNER}>{on.target}"}

    return begin


# -- controls --------------------------------------------------------------------------------------


def _all(*roles: Role, **orders: object) -> Begin:
    def begin(on: Injection) -> None:
        for worker in on.names(*roles):
            on.order(worker, **orders)

    return begin


def _weight_sync(on: Injection) -> None:
    """No generator takes new weights for four seconds, again and again."""
    workers, ended = on.names(Role.GENERATOR), threading.Event()

    def pause() -> None:
        while not ended.is_set():
            for held in (True, False):
                for worker in workers:
                    write_orders(on.fleet.orders, worker, {"load": True} if held else {})
                ended.wait(4.0 if held else 6.0)

    thread = threading.Thread(target=pause, name="sync", daemon=True)
    thread.start()
    on.undo += [*(partial(write_orders, on.fleet.orders, worker, {}) for worker in workers), thread.join, ended.set]


def _collection(on: Injection) -> None:
    """One worker after another stands still for two seconds."""
    ended = threading.Event()

    def stand() -> None:
        while not ended.wait(on.rng.uniform(3.0, 6.0)):
            pid = on.pid(on.rng.choice(on.names(Role.GENERATOR, Role.LEARNER, *_SCORERS)))
            if pid is not None:
                on.fleet.kill(pid, signal.SIGSTOP)
                ended.wait(2.0)
                on.fleet.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stand, name="collection", daemon=True)
    thread.start()
    on.undo += [thread.join, ended.set]


def _nothing(on: Injection) -> None:
    """Let time pass; the fleet evaluates every so many updates."""


def _scale(change: int) -> Begin:
    def begin(on: Injection) -> None:
        number = len(on.names(Role.GENERATOR))

        def to(count: int) -> None:
            if on.fleet.command("scale", f"generator={count}", str(on.fleet.run_dir), timeout_s=30.0) is None:
                on.notes.append(f"`headrace scale generator={count}` gave no answer")
            if not until(lambda: len(on.names(Role.GENERATOR)) == count, 30.0, poll_s=0.2):
                on.notes.append(f"the fleet did not come to {count} generators")

        to(number + change)
        on.undo.append(partial(to, number))

    return begin


_DEAD = frozenset({"silent", "crashed", "restarted", "replaced", "hung", "stuck"})
_HUNG = frozenset({"hung", "stuck", "silent", "errors"})
_SLOW = frozenset({"slow", "stuck", "hung"})
_EDGE = frozenset({"undelivered", "slow_link", "unacknowledged", "never_started", "unreached", "unreachable"})
_ERRORS = frozenset({"errors", "refused", "crashed", "restarted", "silent", "stuck", "hung", "endpoint"})
_STALE = frozenset({"stale", "refused", "weights", "quarantine"})
_NUMERIC = frozenset({"numeric", "errors"})
_SERVER = frozenset({"silent", "ledger", "slow", "stuck"})
_MOVERS = (Role.GENERATOR, Role.REWARD, Role.REFERENCE)

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry("F01", "killed generator", _crash, (Role.GENERATOR,), _DEAD),
    CatalogueEntry("F01", "killed scorer", _crash, _SCORERS, _DEAD),
    CatalogueEntry("F01", "killed learner", _crash, (Role.LEARNER,), _DEAD),
    CatalogueEntry("F02", "frozen generator", _freeze, (Role.GENERATOR,), _DEAD),
    CatalogueEntry("F02", "frozen scorer", _freeze, _SCORERS, _DEAD),
    CatalogueEntry("F02", "frozen learner", _freeze, (Role.LEARNER,), _DEAD),
    CatalogueEntry("F03", "hung loop of a generator", _ordered(hang=True), (Role.GENERATOR,), _HUNG),
    CatalogueEntry("F03", "hung loop of a scorer", _ordered(hang=True), _SCORERS, _HUNG),
    CatalogueEntry("F03", "hung step of the learner", _ordered(stuck=True), (Role.LEARNER,), _HUNG),
    CatalogueEntry("F04", "slow generator, 4 times", _ordered(slow=4.0), (Role.GENERATOR,), _SLOW, GRAY_S, stops=False),
    CatalogueEntry("F04", "slow generator, 8 times", _ordered(slow=8.0), (Role.GENERATOR,), _SLOW, GRAY_S, stops=False),
    CatalogueEntry("F04", "slow verifiers of one worker", _slow_verdicts(8.0), (Role.REWARD,), _SLOW, GRAY_S, stops=False),
    CatalogueEntry(
        "F05", "leak of 20 MB/s", _ordered(leak=20.0), _MOVERS, frozenset({"leak", "odd"}), GRAY_S, stops=False
    ),
    CatalogueEntry("F06", "loss is no number in one step of three", _ordered(nan=3), (Role.LEARNER,), _NUMERIC),
    CatalogueEntry("F07", "corrupt messages on an edge", _corrupt, (Role.GENERATOR,), _EDGE | {"refused", "errors"}, 60.0),
    CatalogueEntry("F08", "cut edge", _edge(EdgeTrouble(is_cut=True)), (Role.GENERATOR,), _EDGE),
    CatalogueEntry("F08", "edge cut one way", _edge(EdgeTrouble(is_one_way=True)), (Role.GENERATOR,), _EDGE),
    CatalogueEntry(
        "F08", "slow edge", _edge(EdgeTrouble(bytes_per_s=500.0)), (Role.GENERATOR,), _EDGE, GRAY_S, stops=False
    ),
    CatalogueEntry(
        "F09", "stopped ledger", _of_the_drill(FaultKind.FREEZE_SERVER, LEDGER), (), _SERVER, 12.0
    ),
    CatalogueEntry("F09", "slow ledger", _slow_server, (), _SERVER, stops=False),
    CatalogueEntry(
        "F10", "full disk under checkpoints", _of_the_drill(FaultKind.DISK_FULL, Role.LEARNER), (Role.LEARNER,),
        frozenset({"disk", "errors"}), needs_disk=True, stops=False,
    ),
    CatalogueEntry("F11", "clock 5 s ahead", _ordered(clock=5.0), _MOVERS, frozenset({"clock"}), stops=False),
    CatalogueEntry("F12", "stale weights", _stale("stale"), (Role.GENERATOR,), _STALE, GRAY_S, stops=False),
    CatalogueEntry("F12", "damaged weights", _stale("damage"), (Role.GENERATOR,), _STALE | _DEAD | {"failed"}),
    CatalogueEntry("F13", "verifiers raise", _verifier("raise"), (Role.REWARD,), _ERRORS, stops=False),
    CatalogueEntry("F13", "verifiers time out", _verifier("hang"), (Role.REWARD,), _ERRORS | _SLOW, GRAY_S, stops=False),
    CatalogueEntry(
        "F13", "constant reward", _verifier("constant"), (Role.REWARD,), frozenset({"reward", "odd"}), GRAY_S, stops=False
    ),
    CatalogueEntry("F19", "failed task", _fail, _MOVERS, frozenset({"failed"})),
    CatalogueEntry("F19", "dead engine that reports success", _ordered(dead=True), (Role.GENERATOR,), _HUNG),
    CatalogueEntry(
        "F20", "garbage tokens", _ordered(garbage=True), (Role.GENERATOR,),
        frozenset({"mismatch"}), GRAY_S, stops=False,
    ),
    CatalogueEntry("N1", "long-tailed prompts", _all(Role.GENERATOR, tail=6.0), within_s=CONTROL_S),
    CatalogueEntry("N2", "pause for weights", _weight_sync, within_s=CONTROL_S),
    CatalogueEntry("N3", "pauses of 2 s", _collection, within_s=CONTROL_S),
    CatalogueEntry("N4", "slow ledger for all", _slow_server, within_s=CONTROL_S),
    CatalogueEntry("N5", "twice the load", _all(Role.GENERATOR, long=2.0), within_s=CONTROL_S),
    CatalogueEntry("N6", "evaluations", _nothing, within_s=CONTROL_S),
    CatalogueEntry("N7", "one generator more", _scale(1), within_s=CONTROL_S),
    CatalogueEntry("N7", "one generator fewer", _scale(-1), within_s=CONTROL_S),
    CatalogueEntry("N8", "slow verifiers of all", _verifier("slow 0.1"), within_s=CONTROL_S),
)  # fmt: skip
"""All of them. Names are unique."""

CODES: dict[FaultKind, str] = {
    FaultKind.KILL_GENERATOR: "F01",
    FaultKind.KILL_REWARD: "F01",
    FaultKind.KILL_REFERENCE: "F01",
    FaultKind.KILL_VALUE: "F01",
    FaultKind.KILL_LEARNER_CLAIMED: "F01",
    FaultKind.KILL_LEARNER_PUBLISHED: "F01",
    FaultKind.KILL_LEARNER_WRITING: "F01",
    FaultKind.KILL_LEARNER_WRITTEN: "F01",
    FaultKind.KILL_SUPERVISOR: "F16",
    FaultKind.POWER_CUT: "F17",
    FaultKind.FREEZE_GENERATOR: "F02",
    FaultKind.FREEZE_SCORER: "F02",
    FaultKind.FREEZE_LEARNER: "F02",
    FaultKind.LONG_FREEZE: "F02",
    FaultKind.SLOW_WORKER: "F04",
    FaultKind.KILL_SERVER: "F09",
    FaultKind.FREEZE_SERVER: "F09",
    FaultKind.FLICKERING_SERVER: "F09",
    FaultKind.DEAD_FROZEN_SERVER: "F09",
    FaultKind.MUTE_SERVER: "F09",
    FaultKind.CORRUPT: "F07",
    FaultKind.TRUNCATE: "F07",
    FaultKind.GARBAGE: "F07",
    FaultKind.DUPLICATE: "F14",
    FaultKind.REORDER: "F14",
    FaultKind.REPLAY: "F14",
    FaultKind.PARTITION: "F08",
    FaultKind.ONE_WAY: "F08",
    FaultKind.STALL: "F08",
    FaultKind.LINK_CUT: "F08",
    FaultKind.UNREACHABLE_NAME: "F08",
    FaultKind.DISK_FULL: "F10",
    FaultKind.DISK_FULL_LEDGER: "F10",
    FaultKind.REWARD_ERRORS: "F13",
    FaultKind.CLOCK_JUMP: "F11",
    FaultKind.JOIN_AND_LEAVE: "N7",
    FaultKind.HANGUP: "F16",
    FaultKind.ORPHANS_DOWN: "F16",
    FaultKind.KILL_SERVER_STARTING: "F09",
    FaultKind.DOWN_STARTING: "F16",
    FaultKind.SCALE_STARTING: "F16",
    FaultKind.BUSY_SERVER: "F09",
    FaultKind.ENDLESS_SCRIPT: "F09",
    FaultKind.JUNK: "F07",
    FaultKind.SLOW_VERDICTS: "N8",
    FaultKind.LATE_VERDICTS: "F13",
    FaultKind.TINY_MEMORY: "F10",
}


def entry(name: str) -> CatalogueEntry:
    """Return the entry of a name. Raises KeyError."""
    return {each.name: each for each in CATALOGUE}[name]


def inject(each: CatalogueEntry, site: Site, edges: EdgeRelays, target: str, seed: int) -> tuple[Injection, float]:
    """Begin a fault; return it with the wall-clock time of its onset.

    The time is that of the begin, or of the kill and the order themselves: they come last."""
    on = Injection(site, edges, random.Random(seed), target)
    onset_s = time.time()
    each.begin(on)
    if not each.is_control and not on.right:
        on.right.add(target)
    return on, onset_s
