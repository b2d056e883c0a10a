"""Words of ``waiting_for``: what a worker's main loop waits for, and for which worker.

``room:reward-0``, ``input:generator-1`` and ``credit(a>b)`` name a worker or link after the word.
Case does not matter. An unknown word may be work, or a healthy wait: the role's own past decides.

A heartbeat names the kind of its main loop's wait and describes it for people. The worker that can
end the wait follows from the role, that description and the published version."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from pipeline.ledger.types import REFUSAL_WORDS, Refusal
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role

_PARTS = re.compile(r"\s*([^\s:(\[=]*)\s*[\s:(\[=]?\s*(.*?)[\s)\]]*$")


class Awaited(StrEnum):
    """The work or wait of a main loop."""

    NOTHING = "nothing"
    """It computes."""
    INPUT = "input"
    ROOM = "room"
    """Room in a receiver's mailbox, or credit for it."""
    LEDGER = "ledger"
    WEIGHTS = "weights"
    LOCK = "lock"
    DISK = "disk"
    ENDPOINT = "endpoint"
    """An outside service: a judge, a tool."""
    START = "start"
    """Its own start, or a first computation."""
    REST = "rest"
    """Nothing is expected of it: paused, draining or stopped."""
    UNKNOWN = "unknown"


_WORDS: dict[Awaited, str] = {
    Awaited.NOTHING: "compute computing busy running working active process processing step train training generate "
    "generating score scoring evaluate evaluating evaluation eval",
    Awaited.INPUT: "input inputs idle empty work starved queue get recv receive prompt prompts data batch",
    Awaited.ROOM: "room credit credits output outputs full backpressure put send sending outbox space downstream quota",
    Awaited.LEDGER: "ledger redis valkey buffer database db store storage",
    Awaited.WEIGHTS: "weights weight sync version update policy quarantine broadcast",
    Awaited.LOCK: "lock mutex gil semaphore",
    Awaited.DISK: "disk io checkpoint fsync snapshot",
    Awaited.ENDPOINT: "endpoint judge http tool api external service",
    Awaited.START: "starting start loading load compile compiling warmup init initializing",
    Awaited.REST: "draining drain drained stopped stopping stop exiting exited left leaving departed paused pause "
    "finished retired",
}
_BY_WORD = {word: awaited for awaited, words in _WORDS.items() for word in words.split()}
_UNSAID = ("", "-", "none", "unknown", "nan", "null")


@lru_cache(maxsize=4096)
def read_wait(waiting_for: str) -> tuple[Awaited, str]:
    """Return what is waited for, and the named worker or link, or ""."""
    found = _PARTS.match(waiting_for)
    word, target = found.groups() if found else (waiting_for, "")
    return _BY_WORD.get(word.lower(), Awaited.UNKNOWN), target


def is_unknown(waiting_for: str) -> bool:
    """Return whether there is a word that is unknown."""
    return waiting_for.strip().lower() not in _UNSAID and read_wait(waiting_for)[0] is Awaited.UNKNOWN


_SAME: Final = {
    WaitingFor.INPUT: "input",
    WaitingFor.COMPUTE: "compute",
    WaitingFor.ENDPOINT: "endpoint",
    WaitingFor.LEDGER: "ledger",
    WaitingFor.DRAINING: "draining",
    WaitingFor.STOPPED: "stopped",
}
_RESTING: Final = "paused"
"""Nothing is expected of the worker. The supervisor limits the time of a start."""
_NOTHING_LEFT: Final = frozenset(
    REFUSAL_WORDS[refusal] for refusal in (Refusal.PAUSED, Refusal.EXHAUSTED, Refusal.CLOSED)
)
_BEHIND: Final = REFUSAL_WORDS[Refusal.BEHIND]


@dataclass(frozen=True, slots=True)
class FleetNames:
    """The workers that a wait may name."""

    workers: frozenset[str]
    learner: str = ""
    """Empty without one."""

    def named_in(self, words: str) -> list[str]:
        """Return the workers whose names are in these words, each once."""
        return list(dict.fromkeys(word for word in words.split() if word in self.workers))


def fleet_names(workers: Collection[tuple[str, Role]]) -> FleetNames:
    """Return the names of a fleet's workers."""
    learner = min((name for name, role in workers if role is Role.LEARNER), default="")
    return FleetNames(frozenset(name for name, _ in workers), learner)


def wait_word(
    role: Role, waiting_for: WaitingFor, detail: str, names: FleetNames, *, is_behind: bool, knows_disk: bool = True
) -> str:
    """Return ``waiting_for`` of a row, as the functions here read it.

    Args:
        role: Of the waiting worker.
        waiting_for: The wait.
        detail: The wait in words.
        names: Of the fleet.
        is_behind: A newer version than the worker's is published.
        knows_disk: The worker has written such a file before, so that the usual time is known."""
    match waiting_for:
        case WaitingFor.ROOM:
            return _room(detail, names)
        case WaitingFor.CREDIT if detail in _NOTHING_LEFT:
            return _RESTING
        case WaitingFor.CREDIT if detail == _BEHIND:
            return _weights(names, is_behind)
        case WaitingFor.CREDIT:
            return _of("credit", names.learner)
        case WaitingFor.WEIGHTS if role is Role.LEARNER:
            # It waits until generators have taken a version: they have no room for a newer one.
            return _room(detail, names)
        case WaitingFor.WEIGHTS:
            return _weights(names, is_behind)
        case WaitingFor.QUARANTINE:
            return _of("quarantine", names.learner)
        case WaitingFor.DISK:
            return "disk" if knows_disk else _RESTING
        case WaitingFor.STARTING | WaitingFor.COMPILE:
            return _RESTING
        case _:
            return _SAME[waiting_for]


def _room(detail: str, names: FleetNames) -> str:
    """Return the wait for room; of one worker where the words name one, else where links are
    full."""
    named = names.named_in(detail)
    return _of("room", named[0] if len(named) == 1 else "")


def _weights(names: FleetNames, is_behind: bool) -> str:
    """Return the wait for weights. A version that exists is fetched: that is the worker's own
    work."""
    return "loading" if is_behind else _of("weights", names.learner)


def _of(word: str, worker: str) -> str:
    return f"{word}:{worker}" if worker else word
