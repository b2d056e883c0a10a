"""One drill: a fleet, the faults of a seed, the check.

Every step of the run has a deadline: the first updates, two updates after each round of faults, the
end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ops.drill.check import KillCost, Limits, Violation, check, kill_costs
from ops.drill.events import Audited, Event, Finished, Stalled
from ops.drill.faults import FLEET_HOST, GUEST_HOST, Site, Striking, interpose, look_for_leftovers, small_disk
from ops.drill.fleet import DrillFleet, each_turn
from ops.drill.record import read_events
from ops.drill.relay import Relays
from ops.drill.schedule import WIRE, FaultKind, Plan
from ops.drill.truth import Naming
from ops.drill.witness import Witness
from ops.hosts.namespaces import SpaceRefused, host_network
from pipeline.config import RESOLVED_NAME
from pipeline.config.load import load_config, read_resolved

PATIENCE_S = 60.0
"""Without an update for so long, a run is stuck; on a machine with two cores of its own one comes
every 0.2 s."""
_LAST_UPDATES = 2
_LONGEST_S = 120.0
"""No fault lasts longer."""
_DISKS = {FaultKind.DISK_FULL: "checkpoints", FaultKind.DISK_FULL_LEDGER: "ledger"}
_LOCAL = ("generation.engine=local", "learner.backend=torch", "reference.backend=torch", "value.backend=torch")


@dataclass(slots=True)
class Outcome:
    """The outcome of a drill."""

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
    folder: Path | None = None
    """Kept when something was violated."""


class DrillWatch:
    """Looks at the run while the drill waits."""

    def __init__(self, site: Site, patience_s: float) -> None:
        self._site = site
        self.patience_s = patience_s
        self._next_interpose_s = 0.0
        self.version = -1
        """Newest policy version in the history; it never goes back, even when rows are
        taken out."""
        self.num_seen = 0
        """Versions seen."""

    def look(self) -> None:
        """Take in the new rows."""
        for row in self._site.fleet.updates():
            if row.policy_version > self.version:
                self.version = row.policy_version
                self.num_seen += 1
        now = time.monotonic()
        if self._site.relays is not None and now >= self._next_interpose_s:
            self._next_interpose_s = now + 0.1
            interpose(self._site)

    def updates(self, num: int) -> bool:
        """Wait for so many further updates, or the end of the run; False when they do not come."""
        wanted = self.num_seen + num
        return self._until(lambda: self.num_seen >= wanted)

    def end(self) -> bool:
        """Wait for the run's end, as long as it moves; False when it stops moving."""
        return self._until(lambda: False)

    def _until(self, condition: Callable[[], bool]) -> bool:
        moved_s, seen = time.monotonic(), self.num_seen
        while time.monotonic() < moved_s + self.patience_s:
            for _ in each_turn(0.1):
                self.look()
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
) -> Outcome:
    """Run a drill in ``folder``, which is removed afterwards unless something was violated or
    ``keep`` is set. ``changes``: settings over those of ``configs/drill.toml``."""
    started = time.monotonic()
    kinds = tuple(str(kind) for kind in plan.kinds)
    outcome = Outcome(plan.seed, plan.algorithm, kinds)
    step_s = load_config([Path("configs/drill.toml")]).emulation.step_s
    settings = [
        f"run.num_updates={plan.num_updates(step_s)}",
        f"run.seed={plan.seed}",
        f"algorithm.name={plan.algorithm}",
        f"fleet.reward={plan.num_rewards}",
        f"algorithm.dynamic_sampling={'true' if plan.algorithm == 'dapo' else 'false'}",
        *(_LOCAL if engine == "local" else ()),
        *changes,
    ]
    with contextlib.ExitStack() as stack:
        network = None
        if FaultKind.LINK_CUT in plan.kinds:
            # the fault notes what is left out
            with contextlib.suppress(SpaceRefused):
                network = stack.enter_context(host_network(FLEET_HOST, GUEST_HOST, apart=False))
        if network is not None:
            settings += ["wire.transport=tcp", f"wire.host={network[FLEET_HOST].address}"]
        fleet = DrillFleet(folder, settings, host=network[FLEET_HOST].on() if network else ())
        site = Site(fleet, network=network)
        if plan.kinds & WIRE:
            site.relays = Relays(folder / "relays", plan.seed)
        for kind, name in _DISKS.items():
            if kind in plan.kinds and stack.enter_context(small_disk(fleet.run_dir / name)):
                site.disks.add(name)
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
    outcome.costs = kill_costs(events) if engine == "emulated" else []
    outcome.num_updates = len(fleet.updates())
    if outcome.violations or keep:
        outcome.folder = folder
    else:
        fleet.remove()
    return outcome


def conclude(site: Site) -> None:
    """Audit a run that is over, and look for its leftovers."""
    if site.fleet.is_over():
        look_for_leftovers(site, "the run's end")
        site.events.append(_audit(site.fleet))
        look_for_leftovers(site, "the run's end and `headrace ledger audit`")
        site.events.append(Finished(site.fleet.supervisor.returncode))


def judge(site: Site) -> tuple[list[Event], list[Violation]]:
    """Return the events of a run that is over, the site's included, and what they violate."""
    config = read_resolved(site.fleet.run_dir)
    limits = Limits(
        eta=config.staleness.eta,
        group_size=config.algorithm.group_size,
        num_slots=config.generation.num_slots,
        window_tokens=config.generation.window_tokens,
        num_updates=config.run.num_updates,
    )
    events: list[Event] = [*read_events(site.fleet), *site.events]
    return events, check(events, limits)


def _carry_out(plan: Plan, site: Site, outcome: Outcome, patience_s: float) -> None:
    """Start the run, inject its faults, and wait for its end."""
    fleet, watch = site.fleet, DrillWatch(site, patience_s)
    fleet.start()
    for number, faults in enumerate(plan.rounds):
        if not watch.updates(2):
            site.events.append(Stalled(f"no update for {patience_s:g} s before round {number} of the faults"))
            return
        if fleet.is_over():
            site.notes.append(f"the run was over before round {number} of the faults")
            return
        striking = [Striking(fault, site) for fault in faults]
        for one in sorted(striking, key=lambda one: one.fault.duration_s):
            for _ in each_turn(_LONGEST_S):
                watch.look()
                if one.is_over:
                    break
            one.end()
        outcome.targets += [
            f"{one.fault.kind} ({one.target})" if one.target else str(one.fault.kind) for one in striking
        ]
        watch.look()
        ended = time.monotonic()
        if not watch.updates(_LAST_UPDATES):
            names = ", ".join(str(fault.kind) for fault in faults)
            site.events.append(Stalled(f"no update for {patience_s:g} s after {names}"))
            return
        outcome.resume_s.append(time.monotonic() - ended)
    if not watch.end():
        site.events.append(Stalled(f"the run did not end: no update for {patience_s:g} s"))


def _audit(fleet: DrillFleet) -> Audited:
    found = fleet.command("ledger", "audit", str(fleet.run_dir))
    if found is None:
        return Audited(balances=False, in_flight=0, text="the audit gave no answer")
    in_flight = sum(found["trajectories"]["in_flight"].values())
    return Audited(found["balances"], in_flight, f"{found['trajectories']}")
