"""Carries faults out, and ends them.

*Consumes* a planned fault and the fleet. *Produces* the fault. *Waits for* the state in which it is to strike, at most a few
seconds; then it strikes anyway, and says so.

A few need what only root has. Without it they are imitated: a full disk by a limit on the size of the learner's files.
"""

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

import msgspec

from ops.drill.events import Event, Killed
from ops.drill.fleet import RUN, DrillFleet, until
from ops.drill.relay import Relays
from ops.drill.schedule import WIRE, FaultKind, PlannedFault
from pipeline.replay import keys
from pipeline.runtime.registry import Heartbeat
from protocol.ids import Role

_STATE_S = 3.0
_TIGHT_S = 0.001
_DISK_BYTES = 8 << 20
_SCORERS = (Role.REWARD, Role.REFERENCE, Role.VALUE)
_LEARNER_STATES = {
    FaultKind.KILL_LEARNER_CLAIMED,
    FaultKind.KILL_LEARNER_PUBLISHED,
    FaultKind.KILL_LEARNER_WRITING,
    FaultKind.KILL_LEARNER_WRITTEN,
}


@dataclass(slots=True)
class Site:
    """What faults act on."""

    fleet: DrillFleet
    relays: Relays | None = None
    has_disk: bool = False
    """Whether the checkpoints lie on a small disk of their own."""
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk at ``folder`` for a while, where that is allowed; what was written there is there afterwards too."""
    folder.mkdir(parents=True, exist_ok=True)
    is_mounted = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder))
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


class Striking:
    """One fault that is on."""

    def __init__(self, fault: PlannedFault, site: Site) -> None:
        """Begin the fault."""
        self.fault = fault
        self.target = ""
        self._site = site
        self._rng = random.Random(fault.seed)
        self._undo: list[Callable[[], object]] = []
        self._begin()

    def end(self) -> None:
        """End the fault."""
        for undo in reversed(self._undo):
            undo()

    def _begin(self) -> None:
        kind = self.fault.kind
        match kind:
            case FaultKind.KILL_GENERATOR:
                self._kill(Role.GENERATOR, lambda beat: self._count("SCARD", f"held:{beat.who}") > 0)
            case FaultKind.KILL_REWARD | FaultKind.KILL_REFERENCE | FaultKind.KILL_VALUE:
                role = Role(kind.value.removeprefix("kill "))
                self._kill(role, lambda _: self._count("ZCARD", f"due:{role}") > 0)
            case kind if kind in _LEARNER_STATES:
                self._kill(Role.LEARNER, self._learner_state(kind))
            case FaultKind.KILL_SUPERVISOR:
                self._site.fleet.supervisor.kill()
                self._site.fleet.supervisor.wait()
                self._site.fleet.resume()
            case FaultKind.POWER_CUT:
                killed = self._site.fleet.kill_everything()
                self._site.events += [Killed(worker, pid) for worker, pid in killed]
                self._site.fleet.resume()
            case FaultKind.FREEZE_GENERATOR | FaultKind.LONG_FREEZE:
                self._freeze(Role.GENERATOR)
            case FaultKind.FREEZE_SCORER:
                self._freeze(self._rng.choice(_SCORERS))
            case FaultKind.FREEZE_LEARNER:
                self._freeze(Role.LEARNER)
            case FaultKind.SLOW_WORKER:
                self._slow(self._rng.choice([Role.GENERATOR, Role.LEARNER, *_SCORERS]))
            case FaultKind.KILL_SERVER:
                if (pid := self._site.fleet.server_pid()) is not None:
                    self._site.fleet.kill(pid)
            case FaultKind.FREEZE_SERVER:
                if (pid := self._site.fleet.server_pid()) is not None:
                    self._stop(pid)
            case FaultKind.DISK_FULL:
                self._fill_disk()
            case FaultKind.REWARD_ERRORS:
                self.target = self._rng.choice(["raise", "raise", "hang", "exit"])
                self._site.fleet.switch.write_text(self.target)
                self._undo.append(lambda: self._site.fleet.switch.unlink(missing_ok=True))
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

    # -- processes -----------------------------------------------------------------------------------------------------

    def _pick(self, role: Role) -> Heartbeat | None:
        """Choose a worker of a role that is there; of another role when there is none (no critic, no reference)."""
        for candidate in (role, *_SCORERS):
            if found := until(lambda role=candidate: self._site.fleet.workers(role), 0.5):
                chosen: Heartbeat = self._rng.choice(found)
                self.target = chosen.who.worker
                return chosen
        return None

    def _kill(self, role: Role, state: Callable[[Heartbeat], bool]) -> None:
        beat = self._pick(role)
        if beat is None:
            return
        if not until(lambda: state(beat), _STATE_S, poll_s=_TIGHT_S):
            self._site.notes.append(f"{self.fault.kind}: {self.target} was not in that state within {_STATE_S:g} s")
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
            self._stop(beat.pid)

    def _stop(self, pid: int) -> None:
        self._site.fleet.kill(pid, signal.SIGSTOP)
        self._undo.append(lambda: self._site.fleet.kill(pid, signal.SIGCONT))

    def _slow(self, role: Role) -> None:
        beat = self._pick(role)
        if beat is None:
            return
        fleet, pid, ended = self._site.fleet, beat.pid, threading.Event()

        def drag() -> None:
            while not ended.wait(0.02):
                fleet.kill(pid, signal.SIGSTOP)
                ended.wait(0.08)
                fleet.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=drag, name="slow", daemon=True)
        thread.start()
        self._undo += [thread.join, ended.set]

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        folder = self._site.fleet.run_dir / "checkpoints"
        if self._site.has_disk:
            ballast = folder / ".ballast"
            with suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            self._undo.append(lambda: ballast.unlink(missing_ok=True))
            return
        beat = self._pick(Role.LEARNER)
        if beat is None:
            return
        self._site.notes.append("disk full: imitated by a limit on the size of the learner's files (no right to mount)")
        before = resource.prlimit(beat.pid, resource.RLIMIT_FSIZE)
        with suppress(OSError, ProcessLookupError):
            resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, (16, before[1]))

        def lift() -> None:
            with suppress(OSError, ProcessLookupError):
                resource.prlimit(beat.pid, resource.RLIMIT_FSIZE, before)

        self._undo.append(lift)

    def _move_clock(self, seconds: float) -> None:
        self.target = self.target or f"{seconds:+g} s"
        with self._site.fleet.clock.open("r+b") as file:
            file.write(struct.pack("<d", seconds))

    def _damage_links(self, kind: FaultKind) -> None:
        relays = self._site.relays
        assert relays is not None, "wire faults are planned with relays"
        beat = self._pick(self._rng.choice(_SCORERS))
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


def interpose(site: Site) -> None:
    """Put a relay in the place of every mailbox that has none yet."""
    relays, fleet = site.relays, site.fleet
    if relays is None:
        return
    endpoints = fleet.ledger("HGETALL", keys.endpoints(RUN))
    for name, blob in (endpoints or {}).items():
        entry = msgspec.json.decode(blob)
        if entry["role"] in _SCORERS and (address := relays.stand_before(name.decode(), entry["endpoint"])):
            fleet.ledger("HSET", keys.endpoints(RUN), name, msgspec.json.encode(entry | {"endpoint": address}))
