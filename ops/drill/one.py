"""One drill: a fleet, the faults of a seed, the check.

Every step of the run has a deadline: the first updates, two updates after each round of faults, the end."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ops.drill.check import KillCost, Limits, Violation, check, kill_costs
from ops.drill.events import Audited, DeadLetter, Event, Finished, Stalled
from ops.drill.faults import FLEET_HOST, GUEST_HOST, ActiveFault, Site, interpose, record_leftovers, small_disk
from ops.drill.fleet import RUN, DrillFleet, each_turn
from ops.drill.record import read_events
from ops.drill.relay import Relays
from ops.drill.schedule import LONG_STEP_S, STARTS, WIRE, FaultKind, Plan, PlannedFault
from ops.drill.small_memory import small_memory
from ops.drill.truth import Naming
from ops.drill.witness import Witness
from ops.emulated.settings import emulation_of
from ops.hosts.namespaces import SpaceRefused, host_network
from pipeline.config import RESOLVED_NAME
from pipeline.config.load import load_config, read_resolved

PATIENCE_S = 60.0
"""A run without an update for this long is stuck; on a machine with two idle cores one comes every 0.2 s."""
_LAST_UPDATES = 2
_LONGEST_S = 120.0
"""No fault lasts longer."""
_DISKS = {FaultKind.DISK_FULL: ("checkpoints", 8 << 20), FaultKind.DISK_FULL_LEDGER: ("ledger", 96 << 20)}
"""Folder under the run's, and bytes of its small disk."""
_LONG_DISK_FACTOR = 4
_TPPO = ("algorithm.tail_drop_tokens=2",)
"""Of windows of eight tokens."""
_LONG_SETTINGS = (f"engines.settings.step_s={LONG_STEP_S}", "checkpoint.every_updates=10", "observer.enabled=true")
"""Overrides of ``configs/drill.toml`` in a long drill."""
_MEMORY_BYTES = (128 << 10, 1 << 20)
"""Sizes of a small ``/dev/shm``: room for one version of the weights, or for some and a few rings."""
_OWN_SETTINGS = {
    FaultKind.SLOW_VERDICTS: ("recovery.policy=act", "reward.timeout_s=10.0"),
    # so that a response is a dead letter within the fault
    FaultKind.LATE_VERDICTS: ("reward.wait_s=0.6", "ledger.max_attempts=3"),
}
_ENVIRONMENT = (
    "environment.path=ops.drill.game:Game",
    "environment.timeout_s=3.0",
    "fleet.environment=2",
    # with a chat template
    "model.path=ops/demo/tools_model",
    "generation.max_response_tokens=120",
)
_LOCAL = ("generation.engine=local", "learner.backend=torch", "reference.backend=torch", "value.backend=torch")


@dataclass(slots=True)
class Outcome:
    seed: int
    algorithm: str
    kinds: tuple[str, ...]
    violations: list[Violation] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    """From the end of each round's faults to the second update after it."""
    namings: list[Naming] = field(default_factory=list)
    """How long ``headrace why`` took to name each requested cause."""
    costs: list[KillCost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    num_updates: int = 0
    wall_s: float = 0.0
    num_relayed: int = 0
    num_damaged: int = 0
    num_dead_letters: int = 0
    """Responses that never got a verdict."""
    folder: Path | None = None
    """Kept if something was violated."""


class DrillWatch:
    """Polls the run while the drill waits."""

    def __init__(self, site: Site, patience_s: float) -> None:
        self._site = site
        self.patience_s = patience_s
        self._next_interpose_s = 0.0
        self.version = -1
        """Newest policy version in the history; it never decreases, even when rows are removed."""
        self.num_seen = 0
        """Number of versions seen."""

    def poll(self) -> None:
        for row in self._site.fleet.updates():
            if row.policy_version > self.version:
                self.version = row.policy_version
                self.num_seen += 1
        now = time.monotonic()
        if self._site.relays is not None and now >= self._next_interpose_s:
            self._next_interpose_s = now + 0.1
            interpose(self._site)

    def updates(self, num: int) -> bool:
        """Wait for ``num`` further updates, or the run's end; return False if they do not come."""
        wanted = self.num_seen + num
        return self._until(lambda: self.num_seen >= wanted)

    def end(self) -> bool:
        """Wait for the run's end; return False if the run stops moving."""
        return self._until(lambda: False)

    def _until(self, condition: Callable[[], bool]) -> bool:
        moved_s, seen = time.monotonic(), self.num_seen
        while time.monotonic() < moved_s + self.patience_s:
            for _ in each_turn(0.1):
                self.poll()
                if condition() or self._site.fleet.is_over():
                    return True
            if self.num_seen != seen:
                moved_s, seen = time.monotonic(), self.num_seen
        return False


def drill(
    plan: Plan,
    folder: Path,
    *,
    engine: str = "emulated",
    patience_s: float = PATIENCE_S,
    keep: bool = False,
    changes: Sequence[str] = (),
    environment: bool = False,
) -> Outcome:
    """Run a drill in ``folder``, which is removed afterwards unless something was violated or ``keep`` is set.
    ``changes``: settings on top of those of ``configs/drill.toml``."""
    started = time.monotonic()
    kinds = tuple(str(kind) for kind in plan.kinds)
    outcome = Outcome(plan.seed, plan.algorithm, kinds)
    step_s = LONG_STEP_S if plan.is_long else emulation_of(load_config([Path("configs/drill.toml")])).step_s
    settings = [
        f"run.num_updates={plan.num_updates(step_s)}",
        f"run.seed={plan.seed}",
        f"algorithm.name={plan.algorithm}",
        f"fleet.reward={plan.num_rewards}",
        f"algorithm.dynamic_sampling={'true' if plan.algorithm == 'dapo' else 'false'}",
        *(_TPPO if plan.algorithm == "tppo" else ()),
        *(_LONG_SETTINGS if plan.is_long else ()),
        *(_LOCAL if engine == "local" else ()),
        *(_ENVIRONMENT if environment else ()),
        *(setting for kind, own in _OWN_SETTINGS.items() if kind in plan.kinds for setting in own),
        *changes,
    ]
    with contextlib.ExitStack() as stack:
        network = None
        if FaultKind.LINK_CUT in plan.kinds:
            # the fault notes that it is left out
            with contextlib.suppress(SpaceRefused):
                network = stack.enter_context(host_network(FLEET_HOST, GUEST_HOST, apart=False))
        if network is not None:
            settings += ["wire.transport=tcp", f"wire.host={network[FLEET_HOST].address}"]
        # before the namespace of a small memory, which would not see what is mounted later
        disks = {
            name
            for kind, (name, num_bytes) in _DISKS.items()
            if kind in plan.kinds
            and stack.enter_context(
                small_disk(folder / RUN / name, num_bytes * (_LONG_DISK_FACTOR if plan.is_long else 1))
            )
        }
        memory = None
        if FaultKind.TINY_MEMORY in plan.kinds:
            memory = stack.enter_context(small_memory(random.Random(plan.seed).choice(_MEMORY_BYTES)))
        host = network[FLEET_HOST].on() if network else memory.on() if memory else ()
        fleet = DrillFleet(folder, settings, host=host)
        site = Site(fleet, network=network, memory=memory, disks=disks)
        if memory is not None:
            fleet.memory = memory.folder
        if plan.kinds & WIRE:
            site.relays = Relays(folder / "relays", plan.seed)
        witness = Witness(fleet.run_dir)
        try:
            _carry_out(plan, site, outcome, patience_s)
            conclude(site)
        finally:
            fleet.close()
            site.events += witness.close()
            if site.relays is not None:
                outcome.num_relayed, outcome.num_damaged = site.relays.num_passed, site.relays.num_damaged
                site.relays.close()
    outcome.namings = site.namings
    outcome.notes, outcome.wall_s = site.notes, time.monotonic() - started
    if not (fleet.run_dir / RESOLVED_NAME).is_file():
        outcome.violations = [Violation("everything moves", f"the run was not started: see {fleet.output}")]
        outcome.folder = folder
        return outcome
    events, outcome.violations = judge(site)
    outcome.num_dead_letters = sum(isinstance(event, DeadLetter) and event.field == "reward" for event in events)
    outcome.costs = kill_costs(events) if engine == "emulated" else []
    outcome.num_updates = len(fleet.updates())
    if outcome.violations or keep:
        outcome.folder = folder
    else:
        fleet.remove()
    return outcome


def conclude(site: Site) -> None:
    """Audit a run that has ended, and record its leftovers."""
    if site.fleet.is_over():
        record_leftovers(site, "the run's end")
        site.events.append(_audit(site.fleet))
        record_leftovers(site, "the run's end and `headrace ledger audit`")
        site.events.append(Finished(site.fleet.supervisor.returncode))


def judge(site: Site) -> tuple[list[Event], list[Violation]]:
    """Return the events of a run that has ended, including the site's, and what they violate."""
    config = read_resolved(site.fleet.run_dir)
    limits = Limits(
        eta=config.staleness.eta,
        group_size=config.algorithm.group_size,
        num_slots=config.generation.num_slots,
        window_tokens=config.generation.window_tokens,
        num_updates=config.run.num_updates,
        max_attempts=config.ledger.max_attempts,
    )
    events: list[Event] = [*read_events(site.fleet), *site.events]
    return events, check(events, limits)


def _carry_out(plan: Plan, site: Site, outcome: Outcome, patience_s: float) -> None:
    """Start the run, inject its faults, and wait for its end."""
    fleet, watch = site.fleet, DrillWatch(site, patience_s)
    fleet.start()
    rounds = list(plan.rounds)
    if strikes_own_start(rounds[0][0]):
        site.is_starting = True
        (fault,) = rounds.pop(0)
        _end(ActiveFault(fault, site), outcome, watch)
        site.is_starting = False
        if not _recovers([fault], site, outcome, watch):
            return
    for number, faults in enumerate(rounds):
        if plan.is_long:
            # the server would rewrite its file, which is the run's history; each new server needs the order
            fleet.ledger("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")
        if not watch.updates(plan.gap_updates):
            site.events.append(Stalled(f"no update for {patience_s:g} s before round {number} of the faults"))
            return
        if fleet.is_over():
            site.notes.append(f"the run was over before round {number} of the faults")
            return
        striking = [ActiveFault(fault, site) for fault in faults]
        for one in sorted(striking, key=lambda one: one.fault.duration_s):
            _end(one, outcome, watch)
        if not _recovers(faults, site, outcome, watch):
            return
    if not watch.end():
        site.events.append(Stalled(f"the run did not end: no update for {patience_s:g} s"))


def strikes_own_start(fault: PlannedFault) -> bool:
    """Whether a plan's first fault strikes the run's own start, and not a later one."""
    return fault.kind in STARTS and fault.seed % 3 == 0


def _recovers(faults: Sequence[PlannedFault], site: Site, outcome: Outcome, watch: DrillWatch) -> bool:
    """Wait for the updates after a round of faults; return whether they came."""
    watch.poll()
    ended = time.monotonic()
    if not watch.updates(_LAST_UPDATES):
        names = ", ".join(str(fault.kind) for fault in faults)
        site.events.append(Stalled(f"no update for {watch.patience_s:g} s after {names}"))
        return False
    outcome.resume_s.append(time.monotonic() - ended)
    return True


def _end(one: ActiveFault, outcome: Outcome, watch: DrillWatch) -> None:
    for _ in each_turn(_LONGEST_S):
        watch.poll()
        if one.is_over:
            break
    one.end()
    outcome.targets.append(f"{one.fault.kind} ({one.target})" if one.target else str(one.fault.kind))


def _audit(fleet: DrillFleet) -> Audited:
    found = fleet.command("ledger", "audit", str(fleet.run_dir))
    if found is None:
        return Audited(balances=False, in_flight=0, text=f"the audit gave no answer: {fleet.last_words}")
    in_flight = sum(found["trajectories"]["in_flight"].values())
    return Audited(found["balances"], in_flight, f"{found['trajectories']}")
