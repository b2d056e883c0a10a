"""The faults that a drill injects, their times and durations: a pure function of its seed.

Faults come in rounds, one or two at a time; a round begins when the run has taken some updates since the last
one. So a seed repeats a drill as far as processes allow: the same faults of the same targets, in the same
order."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    KILL_GENERATOR = "kill generator"
    """SIGKILL while it holds trajectories"""
    KILL_REWARD = "kill reward"
    """SIGKILL while responses wait for it"""
    KILL_REFERENCE = "kill reference"
    KILL_VALUE = "kill value"
    KILL_ENVIRONMENT = "kill environment"
    """SIGKILL while turns wait for it"""
    SCALE_ENVIRONMENT = "scale environment"
    """one more environment worker, which is drained later, or one less, which is started later"""
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
    """freezes a generator until after it has been replaced: its later acts must have no effect"""
    SLOW_WORKER = "slow worker"
    """stopped four fifths of the time"""
    KILL_SERVER = "kill ledger server"
    FREEZE_SERVER = "freeze ledger server"
    FLICKERING_SERVER = "ledger server frozen between probes"
    """frozen for longer than a probe waits, resumed for milliseconds, frozen again: one answer, and none to the
    next question"""
    DEAD_FROZEN_SERVER = "ledger server frozen for good"
    """never resumed: it must be ended for certain before another is started"""
    MUTE_SERVER = "mute ledger server"
    """it accepts connections and commands, and answers none"""
    CORRUPT = "corrupt"
    """bytes changed in passing"""
    TRUNCATE = "truncate"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    REPLAY = "replay"
    """old messages once more"""
    GARBAGE = "garbage"
    """bytes that are no message, and bytes that are not ZeroMQ"""
    PARTITION = "partition"
    """no connection between generators and a scorer"""
    ONE_WAY = "one-way partition"
    """everything is accepted, nothing arrives"""
    STALL = "stalled link"
    """nothing is accepted: back-pressure"""
    LINK_CUT = "link cut to one host"
    """a generator on its own host, over tcp; nothing passes, and nothing is refused"""
    UNREACHABLE_NAME = "unreachable advertised name"
    """a scorer is registered under an address that leads nowhere"""
    DISK_FULL = "disk full under checkpoints"
    DISK_FULL_LEDGER = "disk full under the ledger"
    REWARD_ERRORS = "reward errors"
    """the verifier raises, hangs or ends its process"""
    CLOCK_JUMP = "clock jump"
    """the wall clock of the run's processes jumps by up to a day, and back"""
    JOIN_AND_LEAVE = "join and leave"
    """a generator that no configuration names joins, and is sent away"""
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
    """a script that has written, so that only ending the server ends it"""
    JUNK = "junk in the registry"
    """values and names that nobody can read, in each key that a generator's token may write"""
    SLOW_VERDICTS = "slow verdicts"
    """one verdict in a few takes 20 s, in time, while incidents restart and evict workers"""
    LATE_VERDICTS = "late verdicts"
    """the verifier never answers for some responses"""
    TINY_MEMORY = "tiny shared memory"
    """the host's shared memory is small, and full from some time on"""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a plan must know about a kind of fault."""

    lasts_s: tuple[float, float] = (0.5, 2.5)
    """Shortest and longest duration in seconds. A fault whose cause is asked for lasts until it is named."""
    moving_s: float | None = None
    """Seconds in which the run takes updates while the fault is on; None: the whole duration."""
    is_on_wire: bool = False
    """It damages a link, and needs a relay on it."""
    is_asked: bool = False
    """``headrace why`` must name its cause while it lasts; ``ops.drill.truth`` has the right answers."""
    is_of_start: bool = False
    """It strikes while a supervisor starts: at the run's start, or after another end."""
    is_alone: bool = False
    """Not combined with another in a round, which it would end, hide, or outlast."""
    is_sole: bool = False
    """The only fault of its drill: another fault's effects would be blamed on it later."""
    is_rare: bool = False
    """Only its own seed has it: it lasts long, or needs another kind of fleet."""
    is_by_tcp: bool = False
    """The fleet uses tcp with keys, where no relay can stand in between."""


_AT_ONCE = (0.0, 0.0)
_PLAIN = Traits()
_KILL = Traits(_AT_ONCE)
_WIRE = Traits(is_on_wire=True)
_START = Traits(_AT_ONCE, moving_s=8.0, is_of_start=True, is_alone=True)
_TRAITS = {
    **{kind: _KILL for kind in FaultKind if kind.value.startswith("kill")},
    FaultKind.KILL_SUPERVISOR: Traits(_AT_ONCE, is_alone=True),
    FaultKind.POWER_CUT: Traits(_AT_ONCE, is_alone=True),
    FaultKind.LONG_FREEZE: Traits((8.0, 8.0), is_alone=True, is_rare=True),
    FaultKind.FLICKERING_SERVER: Traits((4.0, 9.0), moving_s=0.0, is_asked=True, is_alone=True),
    FaultKind.DEAD_FROZEN_SERVER: Traits(moving_s=0.0, is_asked=True, is_alone=True, is_rare=True),
    FaultKind.MUTE_SERVER: Traits((10.0, 12.0), moving_s=0.0, is_asked=True, is_alone=True),
    FaultKind.CORRUPT: _WIRE,
    FaultKind.TRUNCATE: _WIRE,
    FaultKind.DUPLICATE: _WIRE,
    FaultKind.REORDER: _WIRE,
    FaultKind.REPLAY: _WIRE,
    FaultKind.GARBAGE: _WIRE,
    FaultKind.PARTITION: _WIRE,
    FaultKind.ONE_WAY: _WIRE,
    FaultKind.STALL: _WIRE,
    FaultKind.LINK_CUT: Traits((3.0, 6.0), is_asked=True, is_alone=True, is_rare=True, is_by_tcp=True),
    FaultKind.UNREACHABLE_NAME: Traits((3.0, 6.0), is_asked=True, is_alone=True),
    FaultKind.DISK_FULL: Traits(is_asked=True, is_alone=True),
    FaultKind.DISK_FULL_LEDGER: Traits((1.0, 5.0), moving_s=0.0, is_asked=True, is_alone=True),
    FaultKind.HANGUP: Traits(_AT_ONCE, moving_s=0.0, is_asked=True, is_alone=True),
    # workers continue without a supervisor until the cause is named and `down` has reached them
    FaultKind.ORPHANS_DOWN: Traits(_AT_ONCE, moving_s=15.0, is_asked=True, is_alone=True),
    FaultKind.KILL_SERVER_STARTING: _START,
    FaultKind.DOWN_STARTING: _START,
    FaultKind.SCALE_STARTING: _START,
    FaultKind.BUSY_SERVER: Traits((7.5, 8.5), moving_s=0.0, is_asked=True, is_alone=True),
    FaultKind.ENDLESS_SCRIPT: Traits(_AT_ONCE, moving_s=0.0, is_asked=True, is_alone=True, is_rare=True),
    # until it is named and a worker is replaced for it
    FaultKind.JUNK: Traits(moving_s=10.0, is_alone=True),
    FaultKind.SLOW_VERDICTS: Traits((40.0, 50.0), moving_s=0.0, is_alone=True, is_sole=True, is_rare=True),
    FaultKind.LATE_VERDICTS: Traits((12.0, 16.0), is_rare=True),
    FaultKind.TINY_MEMORY: Traits((3.0, 6.0), is_rare=True),
}
"""Traits of the kinds that are not ``_PLAIN``."""
_NAMING_S = 3.0
"""Typical seconds until a cause is named."""
_UPDATES_A_ROUND = 3
"""During its faults and the recovery, besides the gap before the round."""
_UPDATES_AROUND = 5
_GAP_UPDATES = 2
_FAULTS_A_MINUTE = 2.0
LONG_STEP_S = 1.0
"""Seconds of a long drill's updates, so that the history of half an hour can be read."""
_NOT_IN_LONG = frozenset(
    {
        FaultKind.LINK_CUT,
        FaultKind.KILL_VALUE,
        FaultKind.SLOW_VERDICTS,
        FaultKind.LATE_VERDICTS,
        FaultKind.TINY_MEMORY,
    }
)
"""Kinds that need another fleet than the rest: over tcp, with a critic, other settings, or a small memory."""


OF_ENVIRONMENT = frozenset({FaultKind.KILL_ENVIRONMENT, FaultKind.SCALE_ENVIRONMENT})
KINDS = tuple(kind for kind in FaultKind if kind not in OF_ENVIRONMENT)
"""Kinds for a fleet without an environment."""
ENVIRONMENT_KINDS = tuple(
    kind for kind in FaultKind if kind not in (FaultKind.KILL_VALUE, FaultKind.SLOW_VERDICTS, FaultKind.LATE_VERDICTS)
)
"""Kinds for a fleet with one: it has no verifier, and no critic."""


def traits(kind: FaultKind) -> Traits:
    return _TRAITS.get(kind, _PLAIN)


WIRE = frozenset(kind for kind in FaultKind if traits(kind).is_on_wire)
ASKED = frozenset(kind for kind in FaultKind if traits(kind).is_asked)
STARTS = frozenset(kind for kind in FaultKind if traits(kind).is_of_start)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    kind: FaultKind
    duration_s: float
    """0 for instantaneous faults."""
    seed: int
    """For choices that are made when it strikes: which worker, which byte."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    algorithm: str
    num_rewards: int
    rounds: tuple[tuple[PlannedFault, ...], ...]
    gap_updates: int = _GAP_UPDATES
    """Updates that the run takes before each round."""

    @property
    def is_long(self) -> bool:
        """Whether there are minutes between the rounds."""
        return self.gap_updates > _GAP_UPDATES

    @property
    def kinds(self) -> frozenset[FaultKind]:
        return frozenset(fault.kind for faults in self.rounds for fault in faults)

    def num_updates(self, step_s: float) -> int:
        """Return how many updates the run must take to outlast its faults."""
        lasting = sum(max(map(_moving_s, faults), default=0.0) for faults in self.rounds)
        of_rounds = (_UPDATES_A_ROUND + self.gap_updates) * len(self.rounds)
        return _UPDATES_AROUND + of_rounds + math.ceil(lasting / step_s)


def plan(seed: int, kinds: Sequence[FaultKind] = KINDS) -> Plan:
    """Return the plan of a seed. Consecutive seeds go through ``kinds`` in turn, so len(kinds) of them have every
    kind."""
    rng = random.Random(seed)
    first = kinds[seed % len(kinds)]
    is_by_tcp = traits(first).is_by_tcp
    common = [kind for kind in kinds if not traits(kind).is_rare and not (is_by_tcp and kind in WIRE)] or list(kinds)
    rounds: list[tuple[PlannedFault, ...]] = []
    for number in range(1 if traits(first).is_sole else rng.randint(1, 3)):
        chosen = [first if number == 0 else rng.choice(common)]
        if not traits(chosen[0]).is_alone and rng.random() < 0.4:
            other = rng.choice(common)
            if not traits(other).is_alone and other is not chosen[0]:
                chosen.append(other)
        rounds.append(tuple(_planned(kind, rng) for kind in chosen))
    needs_critic = any(fault.kind is FaultKind.KILL_VALUE for faults in rounds for fault in faults)
    algorithms = ["tppo", "vapo"] if needs_critic else ["dapo", "dapo", "tppo", "vapo"]
    return Plan(seed, rng.choice(algorithms), rng.choice([1, 1, 2]), tuple(rounds))


def long_plan(seed: int, minutes: float, step_s: float = LONG_STEP_S) -> Plan:
    """Return a plan of single faults, two a minute, the kinds in turn, for a fleet with updates of ``step_s``.
    Kinds that need their own fleet are left out."""
    rng = random.Random(f"soak/{seed}")
    kinds = [kind for kind in KINDS if kind not in _NOT_IN_LONG]
    rounds: list[tuple[PlannedFault, ...]] = []
    turn: list[FaultKind] = []
    for _ in range(math.ceil(_FAULTS_A_MINUTE * minutes)):
        turn = turn or rng.sample(kinds, len(kinds))
        rounds.append((_planned(turn.pop(), rng),))
    return Plan(seed, "dapo", 1, tuple(rounds), round(60.0 / _FAULTS_A_MINUTE / step_s))


def _planned(kind: FaultKind, rng: random.Random) -> PlannedFault:
    return PlannedFault(kind, round(rng.uniform(*traits(kind).lasts_s), 2), rng.randrange(1 << 32))


def _moving_s(fault: PlannedFault) -> float:
    moving_s = traits(fault.kind).moving_s
    if moving_s is not None:
        return moving_s
    return fault.duration_s + (_NAMING_S if fault.kind in ASKED else 0.0)
