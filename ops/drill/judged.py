"""Invariants about verdicts: what is trained has one, and it is the verifier's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ops.drill.events import DeadLetter, Ended, Event, Judged, NotScored, Stored
from ops.drill.limits import Found, Limits

_DEAD = "dropped:dead_letter"
_REWARD, _LEARNER = "reward", "learner"


def trained_are_judged(events: Sequence[Event], limits: Limits) -> Found:
    """No response is trained without a verdict, nor with another one than its verifier's."""
    del limits
    finals = {event.chunk: event.verdict for event in events if isinstance(event, Stored) and event.is_final}
    accuracies: dict[str, float] = {}
    for event in events:
        match event:
            case Judged(chunk, accuracy):
                accuracies[chunk] = accuracy
                if (true := finals.get(chunk)) is not None and accuracy != true:
                    yield f"{chunk} was judged {accuracy:g}, its verifier's verdict is {true:g}"
            case Ended(name, "trained") if name in finals and name not in accuracies:
                yield f"{name} was trained and has no verdict"
            case _:
                pass


def dead_letters_were_tried(events: Sequence[Event], limits: Limits) -> Found:
    """A response without a verdict is tried as often as allowed before it is a dead letter, and its
    group continues as long as two of its members have a verdict or may get one."""
    tries = Counter[tuple[str, str]]()
    dead: dict[str, set[str]] = defaultdict(set)
    """By group: trajectories without a verdict."""
    others = set[str]()
    """Groups that have ended for another reason."""
    for event in events:
        match event:
            case NotScored(chunk, field):
                tries[chunk, field] += 1
            case DeadLetter(chunk, field):
                trajectory = chunk.rpartition(".")[0]
                if field == _REWARD:
                    dead[_group(chunk)].add(trajectory)
                else:
                    others.add(_group(chunk))
                if field != _LEARNER and tries[chunk, field] < limits.max_attempts:
                    yield f"{chunk} is a dead letter after {tries[chunk, field]} of {limits.max_attempts} tries at its {field}"
            case Ended(name, fate) if fate == _DEAD and name.count(".") == 2:
                without = dead[_group(name)]
                left = limits.group_size - len(without)
                if name not in without and _group(name) not in others and left >= min(2, limits.group_size):
                    yield f"{name} ended as a dead letter, and {left} of its group had a verdict or might get one"
            case _:
                pass


def _group(name: str) -> str:
    return name.split(".")[1]
