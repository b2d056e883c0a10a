"""Invariants about verdicts: everything that is trained on has one, and it is the verifier's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ops.drill.events import Answered, DeadLetter, Ended, Event, Found, Judged, Limits, NotScored, Stored

_DEAD = "dropped:dead_letter"
_REWARD, _LEARNER = "reward", "learner"


def trained_are_judged(events: Sequence[Event], _: Limits) -> Found:
    """No response is trained on without a verdict, or with another one than its verifier's."""
    finals = {event.chunk: event.verdict for event in events if isinstance(event, Stored) and event.is_final}
    finals |= {
        event.chunk: event.accuracy for event in events if isinstance(event, Answered) and event.accuracy is not None
    }
    accuracies: dict[str, float] = {}
    for event in events:
        match event:
            case Judged(chunk, accuracy):
                accuracies[chunk] = accuracy
                if (true := finals.get(chunk)) is not None and accuracy != true:
                    yield f"{chunk} was judged {accuracy:g}, but its verifier's verdict is {true:g}"
            case Ended(name, "trained") if name in finals and name not in accuracies:
                yield f"{name} was trained on without a verdict"
            case _:
                pass


def answers_are_true(events: Sequence[Event], _: Limits) -> Found:
    """Each answer of the environment, and the verdict at the end, follows from what was stored before it, whichever
    process gave it and whatever was killed. There is one for each chunk."""
    answered: set[str] = set()
    for event in events:
        if isinstance(event, Answered):
            if event.fault:
                yield f"{event.chunk}: {event.fault}"
            if event.chunk in answered:
                yield f"{event.chunk} was answered twice"
            answered.add(event.chunk)


def dead_letters_were_tried(events: Sequence[Event], limits: Limits) -> Found:
    """A response without a verdict is tried as often as allowed before it becomes a dead letter, and its group
    continues as long as two of its members have or may get a verdict."""
    tries = Counter[tuple[str, str]]()
    dead: dict[str, set[str]] = defaultdict(set)
    """Trajectories without a verdict, by group."""
    others = set[str]()
    """Groups that ended for another reason."""
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
                    yield f"{name} ended as a dead letter, though {left} of its group had or might get a verdict"
            case _:
                pass


def _group(name: str) -> str:
    return name.split(".")[1]
