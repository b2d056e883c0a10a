"""The right answers of ``headrace why`` to each kind of fault, and the questions, until an answer is right or time
is up.

Fields of the answer decide whether a cause is named: the ``cause`` and the ``who`` of a chain, and the struck
folder or worker. The words around them are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ops.drill.schedule import ASKED, FaultKind

NAMING_S = 10.0
_PAUSE_S = 0.2
_LEAST_S = 0.5
_NOT_REACHED = " does not reach "

Answer = dict[str, Any]
Ask = Callable[[float], Answer | None]
"""Seconds to wait -> the command's output; None if it printed nothing by then."""


@dataclass(frozen=True, slots=True)
class Struck:
    """The target of a fault: a worker or a folder."""

    target: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Truth:
    """The true cause of a fault's effects."""

    cause: str
    """In words, for people."""
    is_named: Callable[[Answer, Struck], bool]


@dataclass(frozen=True, slots=True)
class Naming:
    """How the true cause of one fault was found."""

    kind: str
    seconds: float | None
    """From the fault's begin; None if it was not named in time."""
    answer: str
    """The last answer's headline."""


def _chains(answer: Answer) -> list[Answer]:
    return [chain for chain in answer.get("chains", []) if isinstance(chain, dict)]


def _words(chain: Answer) -> str:
    return " ".join([*chain["links"], chain["next"]])


def _leads(*causes: str) -> Callable[[Answer, Struck], bool]:
    """The first chain has one of these causes."""
    return lambda answer, _: bool(_chains(answer)) and _chains(answer)[0]["cause"] in causes


def _any(*causes: str) -> Callable[[Answer, Struck], bool]:
    return lambda answer, _: any(chain["cause"] in causes for chain in _chains(answer))


def _names_worker(*causes: str) -> Callable[[Answer, Struck], bool]:
    """A chain with one of these causes is about the struck worker, or another line names the worker that cannot be
    reached."""

    def is_named(answer: Answer, struck: Struck) -> bool:
        told = [words for words in answer.get("also", []) if _NOT_REACHED in words]
        told += [f"{chain['who']} {_words(chain)}" for chain in _chains(answer) if chain["cause"] in causes]
        return any(struck.target in words.split() for words in told)

    return is_named


def _names_folder(*causes: str) -> Callable[[Answer, Struck], bool]:
    """A chain with one of these causes names the folder that has no room."""
    return lambda answer, struck: any(
        chain["cause"] in causes and struck.folder in _words(chain) for chain in _chains(answer)
    )


def _is_down(answer: Answer, _: Struck) -> bool:
    return answer.get("state") == "stopping" and _leads("nobody", "draining")(answer, _)


TRUTHS: dict[FaultKind, Truth] = {
    FaultKind.FLICKERING_SERVER: Truth("the ledger's server does not answer", _leads("ledger")),
    FaultKind.DEAD_FROZEN_SERVER: Truth("the ledger's server does not answer", _leads("ledger")),
    FaultKind.MUTE_SERVER: Truth("the ledger's server does not answer", _leads("ledger")),
    FaultKind.BUSY_SERVER: Truth("the ledger's server does not answer", _leads("ledger")),
    FaultKind.ENDLESS_SCRIPT: Truth("the ledger's server does not answer", _leads("ledger")),
    FaultKind.LINK_CUT: Truth("the link to the cut worker, by its name", _names_worker("unreachable")),
    FaultKind.UNREACHABLE_NAME: Truth("the worker that cannot be reached", _names_worker("unreachable")),
    FaultKind.DISK_FULL: Truth("no room in the checkpoints' folder, by its path", _names_folder("disk")),
    FaultKind.DISK_FULL_LEDGER: Truth("no room in the ledger's folder, by its path", _names_folder("disk")),
    FaultKind.HANGUP: Truth("the run was stopped, and none of its processes exists", _is_down),
    FaultKind.ORPHANS_DOWN: Truth("no supervisor runs", _any("supervisor")),
}
assert set(TRUTHS) == ASKED


def ask_until_named(kind: FaultKind, struck: Struck, ask: Ask, *, within_s: float = NAMING_S) -> Naming:
    """Ask repeatedly until the true cause is named, for at most ``within_s``; a later answer does not count."""
    began, headline = time.monotonic(), ""
    while (left_s := began + within_s - time.monotonic()) > 0.0:
        answer = ask(max(_LEAST_S, left_s))
        took_s = time.monotonic() - began
        if answer is not None:
            headline = str(answer.get("headline", ""))
            if TRUTHS[kind].is_named(answer, struck) and took_s <= within_s:
                return Naming(str(kind), round(took_s, 2), headline)
        time.sleep(_PAUSE_S)
    return Naming(str(kind), None, headline or "no answer")


class Asking:
    """Asks on a thread while the fault is on."""

    def __init__(self, kind: FaultKind, struck: Struck, ask: Ask) -> None:
        self._found: Naming | None = None

        def run() -> None:
            self._found = ask_until_named(kind, struck, ask)

        self._thread = threading.Thread(target=run, name="why", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the cause was named, or not in time."""
        return not self._thread.is_alive()

    def result(self) -> Naming:
        """Wait for the last answer."""
        self._thread.join()
        assert self._found is not None
        return self._found
