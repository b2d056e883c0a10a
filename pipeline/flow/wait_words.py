"""From a heartbeat's wait to the word of a row, and the worker that the wait names.

A heartbeat names the kind of its main loop's wait, and has the rest in words for people. The worker
that can end the wait follows from the role, those words and the published version."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pipeline.ledger.types import REFUSAL_WORDS, Refusal
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role

_SAME: Final = {
    WaitingFor.INPUT: "input",
    WaitingFor.COMPUTE: "compute",
    WaitingFor.ENDPOINT: "endpoint",
    WaitingFor.LEDGER: "ledger",
    WaitingFor.DRAINING: "draining",
    WaitingFor.STOPPED: "stopped",
}
_RESTING: Final = "paused"
"""Nothing is expected of the worker. A start has a limit of its own (``pipeline.supervisor``)."""
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
    """Return ``waiting_for`` of a row, as ``pipeline.flow.words`` reads it.

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
    """Return the wait for weights. A version that is there is fetched: that is the worker's own
    work."""
    return "loading" if is_behind else _of("weights", names.learner)


def _of(word: str, worker: str) -> str:
    return f"{word}:{worker}" if worker else word
