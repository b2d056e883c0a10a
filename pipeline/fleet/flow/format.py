"""The ``waiting_for`` vocabulary: what a worker's main loop waits for, and for which worker.

``room:reward-0``, ``input:generator-1`` and ``credit(a>b)`` name a worker or link after the word, in
any case. An unknown word may mean work or a healthy wait; the role's past decides.

A heartbeat gives the kind of wait and a description for people. Which worker can end the wait is
derived from the role, that description and the published version."""

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
    """What a main loop is doing or waiting for."""

    NOTHING = "nothing"
    """Computing."""
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
    """Starting up, or running a first computation."""
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
_EMPTY_WORDS = ("", "-", "none", "unknown", "nan", "null")


@lru_cache(maxsize=4096)
def read_wait(waiting_for: str) -> tuple[Awaited, str]:
    """Return what is awaited, and the worker or link it names ("" if none)."""
    found = _PARTS.match(waiting_for)
    word, target = found.groups() if found else (waiting_for, "")
    return _BY_WORD.get(word.lower(), Awaited.UNKNOWN), target


def is_unknown(waiting_for: str) -> bool:
    return waiting_for.strip().lower() not in _EMPTY_WORDS and read_wait(waiting_for)[0] is Awaited.UNKNOWN


_SAME_WORD: Final = {
    WaitingFor.INPUT: "input",
    WaitingFor.COMPUTE: "compute",
    WaitingFor.ENDPOINT: "endpoint",
    WaitingFor.LEDGER: "ledger",
    WaitingFor.DRAINING: "draining",
    WaitingFor.STOPPED: "stopped",
}
_RESTING: Final = "paused"
"""No progress is expected; the supervisor limits how long a start may take."""
_NOTHING_LEFT: Final = frozenset(
    REFUSAL_WORDS[refusal] for refusal in (Refusal.PAUSED, Refusal.EXHAUSTED, Refusal.CLOSED)
)
_BEHIND: Final = REFUSAL_WORDS[Refusal.BEHIND]


@dataclass(frozen=True, slots=True)
class FleetNames:
    workers: frozenset[str]
    learner: str = ""
    """Empty if the fleet has no learner."""

    def named_in(self, words: str) -> list[str]:
        """Return the workers named in this text, without duplicates."""
        return list(dict.fromkeys(word for word in words.split() if word in self.workers))


def fleet_names(workers: Collection[tuple[str, Role]]) -> FleetNames:
    learner = min((name for name, role in workers if role is Role.LEARNER), default="")
    return FleetNames(frozenset(name for name, _ in workers), learner)


def wait_word(
    role: Role, waiting_for: WaitingFor, detail: str, names: FleetNames, *, is_behind: bool, knows_disk: bool = True
) -> str:
    """Translate a heartbeat's wait into the ``waiting_for`` of a row.

    Args:
        role: Role of the waiting worker.
        waiting_for: Kind of wait.
        detail: The heartbeat's description of the wait.
        names: The fleet's workers.
        is_behind: Whether a newer version than the worker's is published.
        knows_disk: Whether the worker has written such a file before, so its usual time is known."""
    match waiting_for:
        case WaitingFor.ROOM:
            return _room_word(detail, names)
        case WaitingFor.CREDIT if detail in _NOTHING_LEFT:
            return _RESTING
        case WaitingFor.CREDIT if detail == _BEHIND:
            return _weights_word(names, is_behind)
        case WaitingFor.CREDIT:
            return _with_target("credit", names.learner)
        case WaitingFor.WEIGHTS if role is Role.LEARNER:
            # Generators must take a version before there is room for a newer one.
            return _room_word(detail, names)
        case WaitingFor.WEIGHTS:
            return _weights_word(names, is_behind)
        case WaitingFor.QUARANTINE:
            return _with_target("quarantine", names.learner)
        case WaitingFor.DISK:
            return "disk" if knows_disk else _RESTING
        case WaitingFor.STARTING | WaitingFor.COMPILE:
            return _RESTING
        case _:
            return _SAME_WORD[waiting_for]


def _room_word(detail: str, names: FleetNames) -> str:
    """Name the receiver if the text names exactly one; otherwise full links will show which it is."""
    named = names.named_in(detail)
    return _with_target("room", named[0] if len(named) == 1 else "")


def _weights_word(names: FleetNames, is_behind: bool) -> str:
    """Loading a version that exists is the worker's own work; otherwise it waits for the learner."""
    return "loading" if is_behind else _with_target("weights", names.learner)


def _with_target(word: str, worker: str) -> str:
    return f"{word}:{worker}" if worker else word
