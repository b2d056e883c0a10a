"""Words of ``waiting_for``: what a worker's main loop waits for, and of which worker.

``room:reward-0``, ``input:generator-1`` and ``credit(a>b)`` name a worker or link after the word.
Letters' case does not matter. A word that is not known may be work, or a healthy wait. The role's
own past decides."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

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
    """Return whether a word is there and is not known."""
    return waiting_for.strip().lower() not in _UNSAID and read_wait(waiting_for)[0] is Awaited.UNKNOWN
