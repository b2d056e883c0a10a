"""Faults on real processes: a fleet, one fault of the catalogue after another, and the records that
its observer wrote of each.

*Consumes* the catalogue and seeds. *Produces* a trial each. *Waits for* a healthy fleet before and
after each fault, and between them for the right name or the fault's time. Each wait has a deadline.
A fleet that does not come back is replaced by a fresh one.

Only the injector knows the fault. The observer is a worker of the fleet and reads the registry as
in any run. Its findings are read here from ``incidents.jsonl``."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

from ops.bench.trace.trials import TrialRecord, said_of
from ops.drill.addresses import mailbox_addresses, put_address
from ops.drill.catalogue import CATALOGUE, LEDGER, VERDICT_S, CatalogueEntry, inject
from ops.drill.edges import EdgeRelays
from ops.drill.faults import Site, small_disk
from ops.drill.fleet import DrillFleet, until
from pipeline.incidents.file import INCIDENTS_NAME
from pipeline.incidents.records import IncidentRecord, decode, folded
from pipeline.observability.repairs import read_steps
from pipeline.supervisor.recovery.rungs import Rung
from protocol.ids import Role

SETTINGS = (
    "run.num_updates=1000000",
    "fleet.generator=3", "fleet.reward=2", "fleet.reference=2",
    "generation.num_slots=4", "generation.max_response_tokens=96",
    "emulation.decode_base_s=0.02", "emulation.scoring_token_s=0.0002", "emulation.step_s=0.5",
    "checkpoint.every_updates=10", "checkpoint.keep=2",
    "data.allow_overlap=true", "evaluation.every_updates=60", "evaluation.num_prompts=16",
    "supervisor.silent_after_s=20", "supervisor.stopped_after_s=20", "supervisor.max_data_failures=1000",
    "weights.ack_timeout_s=30",
)  # fmt: skip
"""Over ``configs/drill.toml``: a fleet of nine workers, the observer among them, that uses a small
part of two cores. Its generators and its learner are about equally fast."""
WARM_S = 75.0
"""From the first update to the first fault: the watch learns each worker's usual values."""
QUIET_S = 6.0
"""Without a new record before each fault."""
LINGER_S = 3.0
"""After the right name: whether another is blamed, too."""
ACT_S = 18.0
"""The same where the ladder acts on incidents: it tolerates one for ten seconds."""
_STARTED_S = 60.0
_WELL_S = 60.0
"""Longest wait for a fleet to be well again; then it is replaced."""
_CALM_S = 45.0
_PUT_OFF_S = 120.0
_LATE_S = 60.0
_MAX_UNWELL = 5
"""Fleets that may fail to start, or to have a worker to strike."""
_FRESH_S = 8.0
_POLL_S = 0.1
_NUM_WORKERS = 9
_OWN_RUNGS = frozenset({Rung.ISOLATE, Rung.REPLACE, Rung.EVICT, Rung.ROLE_RESTART, Rung.WHOLE_RUN})
"""A restart after a loss is the supervisor's own."""
_SCORERS = (Role.REWARD, Role.REFERENCE, Role.VALUE)


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """One fault or control of the order."""

    entry: CatalogueEntry
    seed: int


def planned(seeds: Sequence[int], entries: Sequence[CatalogueEntry] = CATALOGUE) -> list[PlannedTrial]:
    """Return all trials in seeded order: of each seed every entry once, shuffled."""
    found: list[PlannedTrial] = []
    for seed in seeds:
        of = [PlannedTrial(each, seed) for each in entries]
        random.Random(seed).shuffle(of)
        found += of
    return found


class FleetUnwell(Exception):
    """The fleet did not start, or did not come back after a fault."""


class TrialFleet:
    """One fleet on which faults are tried."""

    def __init__(self, *, with_disk: bool, settings: Sequence[str] = SETTINGS) -> None:
        """Start nothing. ``with_disk``: checkpoints lie on a small disk, where that is allowed."""
        self._stack = contextlib.ExitStack()
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        prompts = f"data.evaluation=['{folder / 'prompts.jsonl'}']"
        self.fleet = DrillFleet(folder, [*settings, prompts], verdict_s=VERDICT_S)
        self.site = Site(self.fleet)
        if with_disk and self._stack.enter_context(small_disk(self.fleet.run_dir / "checkpoints")):
            self.site.disks.add("checkpoints")
        self._pids: dict[int, str] = {}
        self.edges = EdgeRelays(folder / "edges", lambda pid: self._pids.get(pid))
        self._stack.callback(self.edges.close)
        self._stopped = threading.Event()
        self._standing = threading.Thread(target=self._stand_before_all, name="standing", daemon=True)

    def start(self, warm_s: float = WARM_S) -> None:
        """Start the fleet, and wait until the watch knows its usual values. Raises FleetUnwell."""
        self.fleet.start()
        self._standing.start()
        if (
            not until(lambda: self.fleet.updates() or self.fleet.is_over(), _STARTED_S, poll_s=0.5)
            or self.fleet.is_over()
        ):
            tail = self.fleet.output.read_text(errors="replace")[-2000:] if self.fleet.output.exists() else ""
            raise FleetUnwell(f"no update within {_STARTED_S:g} s of the start:\n{tail}")
        time.sleep(warm_s)
        self.wait_until_well()

    def close(self) -> None:
        """End everything, and remove the folder."""
        self._stopped.set()
        if self._standing.is_alive():
            self._standing.join()
        self.fleet.close()
        self._stack.close()

    # -- looking -----------------------------------------------------------------------------------

    def records(self) -> list[IncidentRecord]:
        """Return all records of incidents so far."""
        try:
            lines = (self.fleet.run_dir / INCIDENTS_NAME).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [record for record in map(decode, lines) if record is not None]

    def acted(self, since_s: float) -> tuple[tuple[str, str], ...]:
        """Return worker and rung of each repair that the ladder has begun by itself since then: an
        isolation comes before each of its restarts."""
        rows = [row for row in read_steps(self.fleet.run_dir) if row.at_s >= since_s and row.outcome == "begun"]
        return tuple((row.worker, row.rung) for row in rows if row.rung in _OWN_RUNGS)

    def open_components(self) -> set[str]:
        """Return the components of open incidents, and of their causes."""
        still = [each for each in folded(self.records()).values() if each.is_open]
        return {each.component for each in still} | {cause.component for each in still for cause in each.causes}

    def targets(self, each: CatalogueEntry) -> list[str]:
        """Return the workers that a fault may strike."""
        return [beat.who.worker for role in each.roles for beat in self.fleet.workers(role)]

    def wait_until_well(self) -> float:
        """Wait until the run moves and all workers are there; return the seconds until then. Then
        wait until no record has come for a while, at most 45 s. Raises FleetUnwell."""
        began = time.monotonic()
        # those until now may be from before the fault's end
        num_before = len(self.fleet.updates())
        while not (len(self.fleet.updates()) > num_before and self._is_whole()):
            if time.monotonic() - began > _WELL_S or self.fleet.is_over():
                raise FleetUnwell(f"no update, or a worker less, for {time.monotonic() - began:.0f} s")
            time.sleep(0.3)
        healed_s = time.monotonic() - began
        until(lambda: time.time() - max((r.at_s for r in self.records()), default=0.0) > QUIET_S, _CALM_S, poll_s=0.5)
        return healed_s

    def _is_whole(self) -> bool:
        beats = self.fleet.beats().values()
        return len(beats) >= _NUM_WORKERS and all(time.time() - beat.at_s < _FRESH_S for beat in beats)

    # -- relays ------------------------------------------------------------------------------------

    def _stand_before_all(self) -> None:
        while not self._stopped.wait(0.2):
            self._pids = {beat.pid: worker for worker, beat in self.fleet.beats().items()} or self._pids
            for who, endpoint in mailbox_addresses(self.fleet).items():
                if who.role not in _SCORERS:
                    continue
                if (address := self.edges.stand_before(who.worker, endpoint)) is not None:
                    put_address(self.fleet, who, address)


def try_all(
    order: Sequence[PlannedTrial],
    *,
    limit_s: float,
    settings: Sequence[str] = SETTINGS,
    warm_s: float = WARM_S,
    linger_s: float = LINGER_S,
) -> Iterator[TrialRecord]:
    """Yield the trials in their order, as far as the time goes. A trial whose workers are all in
    open incidents is put off. ``linger_s``: time of a fault after its right name."""
    left, ends_s = list(order), time.monotonic() + limit_s
    struck: dict[str, float] = {}
    ended: list[tuple[float, tuple[str, ...]]] = []
    num_unwell = 0
    on: TrialFleet | None = None
    try:
        while left and time.monotonic() < ends_s:
            try:
                if on is None:
                    on = TrialFleet(with_disk=any(each.entry.needs_disk for each in left), settings=settings)
                    on.start(warm_s)
                    struck.clear()
                chosen, target = _next(on, left, struck)
                found, onset_s = carry_out(on, chosen, target, linger_s)
                late = {name for until_s, names in ended for name in names if onset_s < until_s + _LATE_S}
                found = replace(found, earlier=tuple(sorted(late)))
                ended.append((time.time(), found.right))
                left.remove(chosen)
                struck[target] = time.monotonic()
            except FleetUnwell:
                num_unwell += 1
                if num_unwell > _MAX_UNWELL:
                    raise
                on = on.close() if on else None
                continue
            try:
                healed_s = round(on.wait_until_well(), 1)
                later = said_of(on.records(), onset_s, time.time())[len(found.said) :]
                yield replace(found, healed_s=healed_s, later=later, acted=on.acted(onset_s))
            except FleetUnwell as error:
                yield replace(found, notes=(*found.notes, str(error)), acted=on.acted(onset_s))
                on = on.close()
    finally:
        if on is not None:
            on.close()


def _next(on: TrialFleet, left: Sequence[PlannedTrial], struck: Mapping[str, float]) -> tuple[PlannedTrial, str]:
    """Return the first trial with a worker to strike, and the worker: the one that has been left
    alone for longest. Raises FleetUnwell."""
    began = time.monotonic()
    while time.monotonic() - began < _PUT_OFF_S:
        is_open = on.open_components()
        for each in left:
            # a link's incident stays with its ends, too
            free = [name for name in on.targets(each.entry) if not any(name in one.split(">") for one in is_open)]
            if free:
                random.Random(each.seed).shuffle(free)
                return each, min(free, key=lambda name: struck.get(name, 0.0))
            if not each.entry.roles and LEDGER not in is_open:
                return each, ""
        time.sleep(0.5)
    raise FleetUnwell(f"each worker of {left[0].entry.name} is in an open incident for {_PUT_OFF_S:g} s")


def carry_out(
    on: TrialFleet, chosen: PlannedTrial, target: str, linger_s: float = LINGER_S
) -> tuple[TrialRecord, float]:
    """Inject one fault, wait for its name, and end it; return the trial with the wall-clock time of
    the onset."""
    each, seed = chosen.entry, chosen.seed
    num_notes = len(on.site.notes)
    fault, onset_s = inject(each, on.site, on.edges, target, 1_000_003 * seed + sum(map(ord, each.name)))
    try:
        _wait_for_name(on, each, fault.right, onset_s, linger_s)
        said = said_of(on.records(), onset_s, time.time())
        load = os.getloadavg()[0]
    finally:
        fault.end()
    trial = TrialRecord(
        code=each.code, name=each.name, seed=seed, target=target, right=tuple(sorted(fault.right)),
        kinds=tuple(sorted(each.kinds)), is_control=each.is_control, stops=each.stops, within_s=each.within_s,
        said=said, load=round(load, 2), notes=(*fault.notes, *on.site.notes[num_notes:]),
    )  # fmt: skip
    return trial, onset_s


def _wait_for_name(
    on: TrialFleet, each: CatalogueEntry, right: AbstractSet[str], onset_s: float, linger_s: float
) -> None:
    deadline, named_s = time.monotonic() + each.within_s, None
    while (now_s := time.monotonic()) < deadline and (named_s is None or now_s - named_s < linger_s):
        said = said_of(on.records(), onset_s, time.time())
        names = {component for one in said for component, _ in one.names}
        if not each.is_control and named_s is None and right & names:
            named_s = now_s
        time.sleep(_POLL_S)
