"""The faults that a drill injects, their times and durations: a pure function of its seed.

Faults come in rounds, one or two at a time; a round begins when the run has taken two updates since
the last one. So a drill is repeated by its seed as far as processes can be: the same faults of the
same targets, in the same order."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """The kind of a fault."""

    KILL_GENERATOR = "kill generator"
    """SIGKILL while it holds trajectories"""
    KILL_REWARD = "kill reward"
    """SIGKILL while responses wait for it"""
    KILL_REFERENCE = "kill reference"
    KILL_VALUE = "kill value"
    KILL_LEARNER_CLAIMED = "kill learner: claimed"
    """SIGKILL between a claim and its step"""
    KILL_LEARNER_PUBLISHED = "kill learner: published"
    """... between a published version and its checkpoint"""
    KILL_LEARNER_WRITING = "kill learner: writing"
    """... in the middle of writing a checkpoint"""
    KILL_LEARNER_WRITTEN = "kill learner: written"
    """... between a checkpoint and its settlement"""
    KILL_SUPERVISOR = "kill supervisor"
    """SIGKILL; another is started at once"""
    POWER_CUT = "power cut"
    """SIGKILL of everything, the ledger's server too; then ``--resume``"""
    FREEZE_GENERATOR = "freeze generator"
    """SIGSTOP, later SIGCONT"""
    FREEZE_SCORER = "freeze scorer"
    FREEZE_LEARNER = "freeze learner"
    LONG_FREEZE = "long freeze"
    """of a generator, until after it has been replaced: its later acts must have no effect"""
    SLOW_WORKER = "slow worker"
    """stopped four fifths of the time"""
    KILL_SERVER = "kill ledger server"
    FREEZE_SERVER = "freeze ledger server"
    FLICKERING_SERVER = "ledger server frozen between probes"
    """frozen for longer than a probe waits, let go for milliseconds, frozen again: one answer, and
    none to the next question"""
    DEAD_FROZEN_SERVER = "ledger server frozen for good"
    """never let go on: it must be ended for certain before another is started"""
    MUTE_SERVER = "mute ledger server"
    """it takes connections and commands, and answers none"""
    CORRUPT = "corrupt"
    """bytes changed in passing"""
    TRUNCATE = "truncate"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    REPLAY = "replay"
    """old messages once more"""
    GARBAGE = "garbage"
    """bytes that are no message, and bytes that are no ZeroMQ"""
    PARTITION = "partition"
    """no connection between generators and a scorer"""
    ONE_WAY = "one-way partition"
    """everything is taken, nothing arrives"""
    STALL = "stalled link"
    """nothing is taken: back-pressure"""
    LINK_CUT = "link cut to one host"
    """a generator on a host of its own, by tcp; nothing passes, and nothing is refused"""
    UNREACHABLE_NAME = "unreachable advertised name"
    """a scorer is registered under an address that leads nowhere"""
    DISK_FULL = "disk full under checkpoints"
    DISK_FULL_LEDGER = "disk full under the ledger"
    REWARD_ERRORS = "reward errors"
    """the verifier raises, hangs or ends its process"""
    CLOCK_JUMP = "clock jump"
    """the wall clock of the run's processes jumps by up to a day, and back"""
    JOIN_AND_LEAVE = "join and leave"
    """a generator that no configuration names comes, and is sent away"""
    HANGUP = "hangup"
    """SIGHUP of the supervisor, as when its terminal is closed; then ``--resume``"""
    ORPHANS_DOWN = "supervisor gone, then down"
    """SIGKILL of the supervisor, ``headrace down``, then ``--resume``"""
    KILL_SERVER_STARTING = "kill ledger server: starting"
    """SIGKILL of the server while a supervisor starts"""
    DOWN_STARTING = "down during a start"
    """``headrace down`` while a supervisor starts; then ``--resume``"""
    SCALE_STARTING = "scale during a start"
    """``headrace scale`` while a supervisor starts"""
    BUSY_SERVER = "busy ledger server"
    """it runs a script for about 8 s, and answers nothing else"""
    ENDLESS_SCRIPT = "script without end"
    """it has written, so that the server must be ended for it"""
    JUNK = "junk in the registry"
    """values and names that nobody can read, in each key that a generator's token may write"""
    SLOW_VERDICTS = "slow verdicts"
    """one verdict in a few takes 20 s, in time, while incidents restart and evict workers"""
    LATE_VERDICTS = "late verdicts"
    """the verifier never answers for some responses"""
    TINY_MEMORY = "tiny shared memory"
    """the shared memory of its host is small, and full from some time on"""


WIRE = frozenset(
    {
        FaultKind.CORRUPT,
        FaultKind.TRUNCATE,
        FaultKind.DUPLICATE,
        FaultKind.REORDER,
        FaultKind.REPLAY,
        FaultKind.GARBAGE,
        FaultKind.PARTITION,
        FaultKind.ONE_WAY,
        FaultKind.STALL,
    }
)
"""Faults on a link, which need a relay on it."""

ASKED = frozenset(
    {
        FaultKind.FLICKERING_SERVER,
        FaultKind.DEAD_FROZEN_SERVER,
        FaultKind.MUTE_SERVER,
        FaultKind.LINK_CUT,
        FaultKind.UNREACHABLE_NAME,
        FaultKind.DISK_FULL,
        FaultKind.DISK_FULL_LEDGER,
        FaultKind.HANGUP,
        FaultKind.ORPHANS_DOWN,
        FaultKind.BUSY_SERVER,
        FaultKind.ENDLESS_SCRIPT,
    }
)
"""Faults whose cause ``headrace why`` must name while they last; ``ops.drill.truth`` has the right
answers."""
STARTS = frozenset({FaultKind.KILL_SERVER_STARTING, FaultKind.DOWN_STARTING, FaultKind.SCALE_STARTING})
"""Faults that strike while a supervisor starts: at the run's start, or after another end."""
STANDSTILL = frozenset(
    {
        FaultKind.FLICKERING_SERVER,
        FaultKind.DEAD_FROZEN_SERVER,
        FaultKind.MUTE_SERVER,
        FaultKind.DISK_FULL_LEDGER,
        FaultKind.HANGUP,
        FaultKind.BUSY_SERVER,
        FaultKind.ENDLESS_SCRIPT,
        FaultKind.SLOW_VERDICTS,
    }
)
"""Faults during which no update is taken, or hardly one."""
_AT_ONCE = frozenset(
    {kind for kind in FaultKind if kind.value.startswith("kill")}
    | {FaultKind.POWER_CUT, FaultKind.HANGUP, FaultKind.ORPHANS_DOWN, FaultKind.ENDLESS_SCRIPT}
    | STARTS
)
"""Faults without duration."""
_SOLE = frozenset({FaultKind.SLOW_VERDICTS})
"""Faults that are all of their drill: what another fault does to a worker would be blamed on it later."""
_ALONE = (
    ASKED | STARTS | _SOLE | {FaultKind.KILL_SUPERVISOR, FaultKind.POWER_CUT, FaultKind.LONG_FREEZE, FaultKind.JUNK}
)
"""Faults that nothing is combined with: they would end the other one, hide its cause, or last
longer than it makes sense."""
_BY_TCP = frozenset({FaultKind.LINK_CUT})
"""Faults for which the fleet speaks tcp with keys, between which no relay can stand."""
_RARE = (
    frozenset(
        {
            FaultKind.LONG_FREEZE,
            FaultKind.DEAD_FROZEN_SERVER,
            FaultKind.ENDLESS_SCRIPT,
            FaultKind.LATE_VERDICTS,
            FaultKind.TINY_MEMORY,
        }
    )
    | _BY_TCP
    | _SOLE
)
"""Faults that only a seed of their own has: they last long, or need a fleet of another kind."""
_LASTING = {
    FaultKind.LONG_FREEZE: (8.0, 8.0),
    FaultKind.FLICKERING_SERVER: (4.0, 9.0),
    FaultKind.MUTE_SERVER: (10.0, 12.0),
    FaultKind.DISK_FULL_LEDGER: (1.0, 5.0),
    FaultKind.LINK_CUT: (3.0, 6.0),
    FaultKind.UNREACHABLE_NAME: (3.0, 6.0),
    FaultKind.BUSY_SERVER: (7.5, 8.5),
    FaultKind.SLOW_VERDICTS: (40.0, 50.0),
    FaultKind.LATE_VERDICTS: (12.0, 16.0),
    FaultKind.TINY_MEMORY: (3.0, 6.0),
}
"""Seconds, at least and at most, of faults that do not last as long as most. A fault with a
question to ``why`` lasts until it is named."""
_SHORTEST_S, _LONGEST_S = 0.5, 2.5
_NAMING_S = 3.0
"""Typical seconds until a cause is named."""
_MOVING_S = {FaultKind.ORPHANS_DOWN: 15.0, FaultKind.JUNK: 10.0, **dict.fromkeys(STARTS, 8.0)}
"""Workers go on without a supervisor until the cause is named, in ten seconds at most, and `down`
has reached them; beside junk, until it is named and a worker is replaced for it; and while another supervisor starts."""
_UPDATES_A_ROUND = 5
_UPDATES_AROUND = 5


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault."""

    kind: FaultKind
    duration_s: float
    """0 for those that happen at once."""
    seed: int
    """For choices that are made when it happens: which worker, which byte."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one drill."""

    seed: int
    algorithm: str
    num_rewards: int
    rounds: tuple[tuple[PlannedFault, ...], ...]

    @property
    def kinds(self) -> frozenset[FaultKind]:
        """Kinds of fault in it."""
        return frozenset(fault.kind for faults in self.rounds for fault in faults)

    def num_updates(self, step_s: float) -> int:
        """Return how many updates the run must take, so that it is not over before
        the faults are."""
        lasting = sum(max(map(_moving_s, faults), default=0.0) for faults in self.rounds)
        return _UPDATES_AROUND + _UPDATES_A_ROUND * len(self.rounds) + math.ceil(lasting / step_s)


def plan(seed: int, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> Plan:
    """Return the plan of a seed. Seeds in a row go through ``kinds`` in turn, so that len(kinds) of
    them have every kind."""
    rng = random.Random(seed)
    first = kinds[seed % len(kinds)]
    common = [kind for kind in kinds if kind not in _RARE and not (first in _BY_TCP and kind in WIRE)] or list(kinds)
    rounds: list[tuple[PlannedFault, ...]] = []
    for number in range(1 if first in _SOLE else rng.randint(1, 3)):
        chosen = [first if number == 0 else rng.choice(common)]
        if chosen[0] not in _ALONE and rng.random() < 0.4:
            other = rng.choice(common)
            if other not in _ALONE and other is not chosen[0]:
                chosen.append(other)
        rounds.append(tuple(planned_fault(kind, rng) for kind in chosen))
    needs_critic = any(fault.kind is FaultKind.KILL_VALUE for faults in rounds for fault in faults)
    algorithms = ["tppo", "vapo"] if needs_critic else ["dapo", "dapo", "tppo", "vapo"]
    return Plan(seed, rng.choice(algorithms), rng.choice([1, 1, 2]), tuple(rounds))


def planned_fault(kind: FaultKind, rng: random.Random) -> PlannedFault:
    """Return a fault of a kind, with its duration."""
    duration_s = rng.uniform(*_LASTING.get(kind, (_SHORTEST_S, _LONGEST_S)))
    if kind in _AT_ONCE:
        duration_s = 0.0
    return PlannedFault(kind, round(duration_s, 2), rng.randrange(1 << 32))


def _moving_s(fault: PlannedFault) -> float:
    """Return for how long the run takes updates while a fault is on."""
    if fault.kind in STANDSTILL:
        return 0.0
    if fault.kind in _MOVING_S:
        return _MOVING_S[fault.kind]
    return fault.duration_s + (_NAMING_S if fault.kind in ASKED else 0.0)
