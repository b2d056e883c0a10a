"""Carries faults out, and ends them.

A fault waits at most a few seconds for the state in which it is to strike. After that it strikes anyway, with a
note.

A few faults need root. Without root a limit on the size of the learner's files imitates a full disk under
checkpoints, and a full disk under the ledger and a separate host are left out, with a note."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ops.drill import starts
from ops.drill.addresses import mailbox_addresses, put_address
from ops.drill.events import (
    Ending,
    EndOrdered,
    Event,
    Faulted,
    HealthySpan,
    Killed,
    Left,
    OrderResult,
    SupervisorEnded,
    UnreportedJunk,
)
from ops.drill.fleet import RUN, DrillFleet, until
from ops.drill.junk import litter, litter_own, spoil_epoch, unnamed
from ops.drill.leftovers import leftovers
from ops.drill.nowhere import Nowhere
from ops.drill.relay import Relays
from ops.drill.schedule import ASKED, STARTS, WIRE, FaultKind, PlannedFault
from ops.drill.scripts import keep_busy
from ops.drill.small_memory import SmallMemory, fill
from ops.drill.truth import Asking, Naming, Struck, ask_until_named
from ops.drill.witness import servers_of
from ops.hosts.namespaces import HostNetwork
from ops.hosts.switch import CUT, WHOLE
from pipeline.ledger.redis import keys
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Incarnation, Role

FLEET_HOST, GUEST_HOST = "fleet", "guest"
"""The host of the supervisor, its workers and the ledger, and the host of one more generator."""
_STATE_S = 3.0
_TIGHT_S = 0.001
_GUEST_S = 30.0
_END_S = 60.0
_TIDY_S = 3.0
"""Workers that the drill started by hand end by themselves after their run. Nothing may remain this much later."""
_LONGEST_FROZEN_S = 60.0
_PULSE_S = (1.0, 4.0)
_GLIMPSE_S = (0.001, 0.06)
_SLOW_S = 20
_VERSION_BYTES = 80 << 10
_SCORERS = (Role.REWARD, Role.REFERENCE, Role.VALUE)
_LEARNER_STATES = {
    FaultKind.KILL_LEARNER_CLAIMED,
    FaultKind.KILL_LEARNER_PUBLISHED,
    FaultKind.KILL_LEARNER_WRITING,
    FaultKind.KILL_LEARNER_WRITTEN,
}


@dataclass(slots=True)
class Site:
    """The parts of a run that faults act on."""

    fleet: DrillFleet
    relays: Relays | None = None
    network: HostNetwork | None = None
    memory: SmallMemory | None = None
    is_starting: bool = False
    """Whether the run itself is starting."""
    disks: set[str] = field(default_factory=set[str])
    """Folders of the run that are on their own small disk."""
    nowhere: dict[str, str] = field(default_factory=dict[str, str])
    """Workers that are registered under an address that leads nowhere, with that address."""
    namings: list[Naming] = field(default_factory=list[Naming])
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a small disk at ``folder`` for a while; yields whether that is permitted. Files written there remain."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = f"size={num_bytes},mode=0700"
    is_mounted = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield is_mounted
    finally:
        if is_mounted:
            copy = folder.with_name(f"{folder.name}.copy")
            _run("cp", "-a", str(folder), str(copy))
            _run("umount", "-l", str(folder))
            with suppress(OSError):
                folder.rmdir()
                copy.rename(folder)


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class ActiveFault:
    """One fault, from its begin to its end."""

    def __init__(self, fault: PlannedFault, site: Site) -> None:
        self.fault = fault
        self.target = ""
        self.folder = ""
        self._site = site
        self._rng = random.Random(fault.seed)
        self._undo: list[Callable[[], object]] = []
        self._faulted: dict[str, float] = {}
        self._asking: Asking | None = None
        self._lasts: Callable[[], bool] = lambda: False
        self._at_end: list[Callable[[], Event | None]] = []
        """Checks to make while the fault is still on."""
        self._begin()
        self._begun_s = time.monotonic()
        if fault.kind in ASKED and self._undo:
            self._asking = Asking(fault.kind, Struck(self.target, self.folder), self._why)

    @property
    def is_over(self) -> bool:
        """Whether it has lasted as planned, was named or could not be in time, and has had its effect."""
        lasted_s = time.monotonic() - self._begun_s
        if lasted_s < self.fault.duration_s or (self._asking is not None and not self._asking.is_over):
            return False
        return lasted_s > _LONGEST_FROZEN_S or not self._lasts()

    def end(self) -> None:
        if self._asking is not None:
            self._site.namings.append(self._asking.result())
        self._site.events += [event for look in self._at_end if (event := look()) is not None]
        for undo in reversed(self._undo):
            undo()
        now = time.monotonic()
        self._site.events += [Faulted(worker, begin_s, now) for worker, begin_s in self._faulted.items()]

    def _why(self, timeout_s: float) -> Any:
        fleet = self._site.fleet
        return fleet.command("why", str(fleet.run_dir), timeout_s=timeout_s)

    def _mark(self, worker: str) -> None:
        """Record that a worker is affected from now on."""
        self._faulted.setdefault(worker, time.monotonic())

    def _begin(self) -> None:
        kind = self.fault.kind
        match kind:
            case FaultKind.KILL_GENERATOR:
                self._kill(Role.GENERATOR, lambda beat: self._count("SCARD", f"held:{beat.who}") > 0)
            case FaultKind.KILL_REWARD | FaultKind.KILL_REFERENCE | FaultKind.KILL_VALUE:
                role = Role(kind.value.removeprefix("kill "))
                self._kill(role, lambda _: self._count("ZCARD", f"due:{role}") > 0)
            case FaultKind.KILL_ENVIRONMENT:
                self._kill(Role.ENVIRONMENT, lambda _: self._count("ZCARD", "due:turn") > 0)
            case FaultKind.SCALE_ENVIRONMENT:
                self._scale(Role.ENVIRONMENT, self._rng.choice([1, 3]))
            case kind if kind in _LEARNER_STATES:
                self._kill(Role.LEARNER, self._learner_state(kind))
            case FaultKind.KILL_SUPERVISOR:
                self._kill_supervisor()
                self._site.fleet.resume()
            case FaultKind.POWER_CUT:
                self._cut_power()
                self._site.fleet.resume()
            case FaultKind.HANGUP:
                self._hang_up()
                self._site.fleet.resume()
            case FaultKind.ORPHANS_DOWN:
                self._kill_supervisor()
                self._ask()
                if self._site.fleet.command("down", str(self._site.fleet.run_dir), timeout_s=_END_S) is None:
                    self._site.events.append(Left("`headrace down` itself, which gave no answer", str(Ending.DOWN)))
                self._told(Ending.DOWN)
                record_leftovers(self._site, str(Ending.DOWN))
                self._site.fleet.resume()
            case FaultKind.FREEZE_GENERATOR | FaultKind.LONG_FREEZE:
                self._freeze(Role.GENERATOR)
            case FaultKind.FREEZE_SCORER:
                self._freeze(self._rng.choice(self._scorers))
            case FaultKind.FREEZE_LEARNER:
                self._freeze(Role.LEARNER)
            case FaultKind.SLOW_WORKER:
                self._slow(self._rng.choice([Role.GENERATOR, Role.LEARNER, *self._scorers]))
            case FaultKind.KILL_SERVER:
                if (pid := self._site.fleet.server_pid()) is not None:
                    self._site.fleet.kill(pid)
            case FaultKind.FREEZE_SERVER:
                if (pid := self._site.fleet.server_pid()) is not None:
                    self._stop(pid)
            case FaultKind.FLICKERING_SERVER:
                self._flicker()
            case FaultKind.DEAD_FROZEN_SERVER:
                if (pid := self._site.fleet.server_pid()) is not None:
                    self._stop(pid)
                    self._lasts = lambda: pid in servers_of(self._site.fleet.run_dir / "ledger")
            case FaultKind.MUTE_SERVER:
                self._mute()
            case kind if kind in STARTS:
                self._strike_start(kind)
            case FaultKind.BUSY_SERVER:
                self._undo.append(keep_busy(self._site.fleet, self.fault.duration_s))
            case FaultKind.ENDLESS_SCRIPT:
                servers = servers_of(self._site.fleet.run_dir / "ledger")
                self._undo.append(keep_busy(self._site.fleet, None))
                self._lasts = lambda: bool(servers & servers_of(self._site.fleet.run_dir / "ledger"))
            case FaultKind.JUNK:
                self._litter()
            case FaultKind.SLOW_VERDICTS:
                self._tell_verifiers(f"sometimes {_SLOW_S}")
                begin_s = time.time()
                self._at_end.append(lambda: HealthySpan(begin_s, time.time()))
            case FaultKind.LATE_VERDICTS:
                self._tell_verifiers("late")
            case FaultKind.TINY_MEMORY:
                self._fill_memory()
            case FaultKind.DISK_FULL:
                self._fill_disk("checkpoints")
            case FaultKind.DISK_FULL_LEDGER:
                self._fill_disk("ledger")
            case FaultKind.LINK_CUT:
                self._cut_link()
            case FaultKind.UNREACHABLE_NAME:
                self._lead_nowhere()
            case FaultKind.REWARD_ERRORS:
                self.target = self._rng.choice(["raise", "raise", "hang", "exit"])
                for beat in self._site.fleet.workers(Role.ENVIRONMENT) or self._site.fleet.workers(Role.REWARD):
                    self._mark(beat.who.worker)
                self._tell_verifiers(self.target)
            case FaultKind.CLOCK_JUMP:
                self._move_clock(self._rng.choice([-1, 1]) * self._rng.choice([1.0, 60.0, 3600.0, 86400.0]))
                self._undo.append(lambda: self._move_clock(0.0))
            case FaultKind.JOIN_AND_LEAVE:
                self.target = "drill-generator"
                process = self._site.fleet.start_worker(Role.GENERATOR, self.target)
                self._undo.append(process.terminate)
            case kind if kind in WIRE:
                self._damage_links(kind)
            case _:
                raise ValueError(f"no such fault: {kind}")

    # -- processes ---------------------------------------------------------------------------------

    def _pick(self, role: Role) -> Heartbeat | None:
        """Choose a live worker of a role, or of another role if there is none (no critic, no reference)."""
        for candidate in (role, *_SCORERS):
            if found := until(lambda role=candidate: self._site.fleet.workers(role), 0.5):
                chosen: Heartbeat = self._rng.choice(found)
                self.target = chosen.who.worker
                return chosen
        return None

    @property
    def _scorers(self) -> tuple[Role, ...]:
        return (Role.ENVIRONMENT, *_SCORERS) if self._site.fleet.workers(Role.ENVIRONMENT) else _SCORERS

    def _scale(self, role: Role, number: int) -> None:
        """Order another number of workers of a role, and the first one at the end."""
        fleet, before = self._site.fleet, len(self._site.fleet.workers(role))

        def order(count: int) -> None:
            if fleet.command("scale", f"{role}={count}", str(fleet.run_dir)) is None and not fleet.is_over():
                self._site.notes.append(f"{self.fault.kind}: refused: {fleet.last_words}")

        self.target = f"{role}={number}"
        order(number)
        self._undo.append(lambda: order(max(1, before)))

    def _kill(self, role: Role, state: Callable[[Heartbeat], bool]) -> None:
        beat = self._pick(role)
        if beat is None:
            return
        if not until(lambda: state(beat), _STATE_S, poll_s=_TIGHT_S):
            self._site.notes.append(f"{self.fault.kind}: {self.target} was not in that state within {_STATE_S:g} s")
        self._mark(beat.who.worker)
        if self._site.fleet.kill(beat.pid):
            self._site.events.append(Killed(beat.who.worker, beat.pid))

    def _learner_state(self, kind: FaultKind) -> Callable[[Heartbeat], bool]:
        fleet = self._site.fleet
        folder = fleet.run_dir / "checkpoints"
        checkpoints, claims = set(fleet.checkpoints()), self._claims()
        published = fleet.ledger("GET", keys.weights(RUN))

        def state(_: Heartbeat) -> bool:
            match kind:
                case FaultKind.KILL_LEARNER_CLAIMED:
                    return bool(self._claims() - claims)
                case FaultKind.KILL_LEARNER_PUBLISHED:
                    return fleet.ledger("GET", keys.weights(RUN)) != published
                case FaultKind.KILL_LEARNER_WRITING:
                    return any(folder.glob(".writing-*/*"))
                case _:
                    return bool(set(fleet.checkpoints()) - checkpoints)

        return state

    def _claims(self) -> set[bytes]:
        return set(self._site.fleet.ledger("HKEYS", keys.claims(RUN)) or ())

    def _count(self, command: str, key: str) -> int:
        return self._site.fleet.ledger(command, keys.prefix(RUN) + key) or 0

    def _freeze(self, role: Role) -> None:
        beat = self._pick(role)
        if beat is not None:
            self._mark(beat.who.worker)
            self._stop(beat.pid)

    def _stop(self, pid: int) -> None:
        self._site.fleet.kill(pid, signal.SIGSTOP)
        self._undo.append(lambda: self._site.fleet.kill(pid, signal.SIGCONT))

    def _slow(self, role: Role) -> None:
        beat = self._pick(role)
        if beat is None:
            return
        self._mark(beat.who.worker)
        fleet, pid, ended = self._site.fleet, beat.pid, threading.Event()

        def drag() -> None:
            while not ended.wait(0.02):
                fleet.kill(pid, signal.SIGSTOP)
                ended.wait(0.08)
                fleet.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=drag, name="slow", daemon=True)
        thread.start()
        self._undo += [thread.join, ended.set]

    def _tell_verifiers(self, order: str) -> None:
        self._site.fleet.switch.write_text(order)
        self._undo.append(lambda: self._site.fleet.switch.unlink(missing_ok=True))

    def _litter(self) -> None:
        """Write junk beside the healthy entries, into one worker's entries, and into another's epoch."""
        fleet = self._site.fleet
        entries = litter(fleet, self._rng)
        status = fleet.command("status", str(fleet.run_dir))
        self._site.events += [UnreportedJunk(entry) for entry in unnamed(status, entries)]
        own = self._pick(self._rng.choice([Role.GENERATOR, Role.LEARNER, *_SCORERS]))
        if own is not None and (before := litter_own(fleet, own.who.worker, self._rng)):
            entry = msgspec.json.decode(before)
            self._undo.append(lambda: put_address(fleet, own.who, entry["endpoint"], entry["public_key"]))
        fenced = self._pick(self._rng.choice([Role.GENERATOR, Role.LEARNER, *_SCORERS]))
        if fenced is None:
            return
        worker = fenced.who.worker
        self.target = f"{own.who.worker if own else '-'}, {worker}"
        self._mark(worker)
        spoil_epoch(fleet, worker, self._rng)

        def is_there() -> bool:
            beat = fleet.beats().get(worker)
            return fleet.is_over() or (beat is not None and beat.pid != fenced.pid)

        self._lasts = lambda: not is_there()
        what = f"junk in the place of the epoch of {worker}"
        self._at_end.append(lambda: OrderResult(what, held=is_there(), found="it was not fenced and replaced"))

    def _fill_memory(self) -> None:
        memory, fleet = self._site.memory, self._site.fleet
        if memory is None:
            self._site.notes.append(f"{self.fault.kind}: left out (no right to make mount namespaces)")
            return
        ballast = fill(memory.folder)
        self._undo.append(lambda: ballast.unlink(missing_ok=True))
        # if all kept versions have room, publishing continues in place
        if memory.num_bytes < 2 * _VERSION_BYTES:
            self._lasts = lambda: not _weights_path(fleet).is_relative_to(fleet.run_dir)
            self._at_end.append(
                lambda: OrderResult(
                    "weights go to the run's folder where /dev/shm has no room",
                    held=_weights_path(fleet).is_relative_to(fleet.run_dir),
                    found=str(_weights_path(fleet)),
                )
            )

    # -- supervisors -------------------------------------------------------------------------------

    def _has_ended(self, how: Ending) -> None:
        """Record that the supervisor was made to end, and how it did."""
        self._told(how)
        self._site.events.append(SupervisorEnded(self._site.fleet.supervisor.returncode))

    def _told(self, how: Ending) -> None:
        version = max((row.policy_version for row in self._site.fleet.updates()), default=-1)
        self._site.events.append(EndOrdered(how, version))

    def _cut_power(self) -> None:
        killed = self._site.fleet.kill_everything()
        self._site.events += [Killed(worker, pid) for worker, pid in killed]
        self._has_ended(Ending.KILL)

    def _strike_start(self, kind: FaultKind) -> None:
        """Strike the run's own start, or that of a supervisor after a kill or a power cut."""
        site, fleet = self._site, self._site.fleet
        self.target = "up"
        if not site.is_starting:
            is_cut = self._rng.random() < 0.5
            self.target = "after a power cut" if is_cut else "after a kill"
            if is_cut:
                self._cut_power()
            else:
                self._kill_supervisor()
            fleet.resume()
        events: list[Event] = []
        match kind:
            case FaultKind.KILL_SERVER_STARTING:
                note = starts.kill_server(fleet, self._rng)
            case FaultKind.SCALE_STARTING:
                events, note = starts.scale(fleet, self._rng)
            case _:
                events, note = starts.go_down(fleet, self._rng)
                record_leftovers(site, str(Ending.DOWN_STARTING))
                fleet.resume()
        site.events += events
        if note:
            site.notes.append(f"{kind}: {note}")

    def _kill_supervisor(self) -> None:
        self._site.fleet.supervisor.kill()
        self._site.fleet.supervisor.wait()
        self._has_ended(Ending.KILL)

    def _hang_up(self) -> None:
        supervisor = self._site.fleet.supervisor
        supervisor.send_signal(signal.SIGHUP)
        if until(lambda: supervisor.poll() is not None, _END_S) is False:
            self._site.events.append(Left(f"the supervisor, {_END_S:g} s later", str(Ending.HANGUP)))
            supervisor.kill()
            supervisor.wait()
        self._has_ended(Ending.HANGUP)
        record_leftovers(self._site, str(Ending.HANGUP))
        self._ask()
        record_leftovers(self._site, f"{Ending.HANGUP} and `headrace why`")

    def _ask(self) -> None:
        self._site.namings.append(ask_until_named(self.fault.kind, Struck(), self._why))

    # -- the ledger's server -----------------------------------------------------------------------

    def _flicker(self) -> None:
        """Freeze the server, resume it for an instant while a client waits for its answer, and freeze it again."""
        fleet, ended = self._site.fleet, threading.Event()
        pid = fleet.server_pid()
        if pid is None:
            return
        rng = random.Random(self._rng.random())

        def flicker() -> None:
            while not ended.is_set():
                fleet.kill(pid, signal.SIGSTOP)
                ended.wait(rng.uniform(*_PULSE_S))
                fleet.kill(pid, signal.SIGCONT)
                ended.wait(rng.uniform(*_GLIMPSE_S))

        thread = threading.Thread(target=flicker, name="flicker", daemon=True)
        thread.start()
        self._undo += [lambda: fleet.kill(pid, signal.SIGCONT), thread.join, ended.set]

    def _mute(self) -> None:
        """Let the server accept connections and commands without answering. No command can end this early."""
        pause_s = self.fault.duration_s
        if self._site.fleet.ledger("CLIENT", "PAUSE", str(round(pause_s * 1000)), "ALL") is None:
            self._site.notes.append(f"{self.fault.kind}: the server did not take the command")
            return
        self._undo.append(lambda: None)

    # -- the rest ----------------------------------------------------------------------------------

    def _fill_disk(self, name: str) -> None:
        folder = self._site.fleet.run_dir / name
        self.folder = str(folder)
        if name == "checkpoints":
            self._mark(Role.LEARNER)
        if name in self._site.disks:
            ballast = folder / ".ballast"
            with suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            self._undo.append(lambda: ballast.unlink(missing_ok=True))
            return
        if name == "ledger":
            self._site.notes.append(f"{self.fault.kind}: left out (no right to mount)")
            return
        beat = self._pick(Role.LEARNER)
        if beat is None:
            return
        self._site.notes.append(f"{self.fault.kind}: imitated by a limit on the size of files (no right to mount)")
        before = resource.prlimit(beat.pid, resource.RLIMIT_FSIZE)
        with suppress(OSError, ProcessLookupError):
            resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, (16, before[1]))

        def lift() -> None:
            with suppress(OSError, ProcessLookupError):
                resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, before)

        self._undo.append(lift)

    def _cut_link(self) -> None:
        """Start a generator on the other host, and pull the cable."""
        fleet, network = self._site.fleet, self._site.network
        if network is None:
            self._site.notes.append(f"{self.fault.kind}: left out (no right to make network namespaces)")
            return
        self.target = "guest-generator"
        guest = fleet.start_worker(Role.GENERATOR, self.target, host=network[GUEST_HOST].on())
        self._undo.append(guest.terminate)
        if not until(lambda: self._sends(self.target), _GUEST_S):
            self._site.notes.append(f"{self.fault.kind}: {self.target} sent nothing within {_GUEST_S:g} s")
        self._mark(self.target)
        network.plug(GUEST_HOST, CUT)
        self._undo.append(lambda: network.plug(GUEST_HOST, WHOLE))

    def _sends(self, worker: str) -> bool:
        beat = self._site.fleet.beats().get(worker)
        return beat is not None and any(link.sent > 0 for link in beat.links)

    def _lead_nowhere(self) -> None:
        """Register a scorer under an address where it is not."""
        beat = self._pick(self._rng.choice([Role.REWARD, Role.REWARD, Role.REFERENCE]))
        if beat is None:
            return
        site, worker = self._site, beat.who.worker
        nowhere = Nowhere(self._rng)
        self._site.nowhere[worker] = nowhere.endpoint
        who, before = _mailbox(site.fleet, worker)
        if who is not None:
            put_address(site.fleet, who, nowhere.endpoint)

        def back() -> None:
            site.nowhere.pop(worker)
            if who is not None and _mailbox(site.fleet, worker) == (who, nowhere.endpoint):
                put_address(site.fleet, who, before)

        self._undo += [nowhere.close, back]

    def _move_clock(self, seconds: float) -> None:
        self.target = self.target or f"{seconds:+g} s"
        with self._site.fleet.clock.open("r+b") as file:
            file.write(struct.pack("<d", seconds))

    def _damage_links(self, kind: FaultKind) -> None:
        relays = self._site.relays
        assert relays is not None, "wire faults are planned with relays"
        beat = self._pick(self._rng.choice(self._scorers))
        if beat is None:
            return
        worker = beat.who.worker
        relays.set(worker, kind)
        self._undo.append(lambda: relays.set(worker, None))
        if kind is FaultKind.GARBAGE and (target := relays.target(worker)):
            _throw_bytes(target.removeprefix("ipc://"), self._rng)


def _throw_bytes(path: str, rng: random.Random) -> None:
    """Connect to a mailbox's socket without speaking ZeroMQ."""
    for _ in range(8):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(0.5)
            raw.connect(path)
            raw.sendall(rng.randbytes(rng.randrange(1, 5000)))
            time.sleep(0.01)


def record_leftovers(site: Site, after: str) -> None:
    """Record what a run that has ended left behind."""
    fleet = site.fleet
    if until(lambda: not leftovers(fleet.run_dir, fleet.memory), _TIDY_S, poll_s=0.2):
        return
    told = {event.what for event in site.events if isinstance(event, Left)}
    site.events += [Left(what, after) for what in leftovers(fleet.run_dir, fleet.memory) if what not in told]


def _weights_path(fleet: DrillFleet) -> Path:
    """Return where the newest published version is."""
    blob = fleet.ledger("GET", keys.weights(RUN))
    return Path(msgspec.json.decode(blob)["path"] if blob else "")


def _mailbox(fleet: DrillFleet, worker: str) -> tuple[Incarnation | None, str]:
    """Return a worker's incarnation and registered address, or None and ""."""
    found = ((who, address) for who, address in mailbox_addresses(fleet).items() if who.worker == worker)
    return next(found, (None, ""))


def interpose(site: Site) -> None:
    """Put a relay in front of every mailbox that has none yet."""
    relays, fleet = site.relays, site.fleet
    if relays is None:
        return
    for who, endpoint in mailbox_addresses(fleet).items():
        if who.worker in site.nowhere or who.role not in (Role.ENVIRONMENT, *_SCORERS):
            continue
        if address := relays.stand_before(who.worker, endpoint):
            put_address(fleet, who, address)
