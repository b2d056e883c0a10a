"""Compares the answers of workers to one self-check: which of them differ from the rest. Pure.

All workers of a role compute the same prompts, greedily and one at a time, under the same weights.
So their answers under a version are the same, bit for bit on devices of one kind. An answer that
most of the workers with that version do not have is a fault. Two workers that differ, and no third,
leave open which is at fault: both are named, as undecided.

Workers that answer for themselves need no grouping: one check each is enough. Their hosts are a
grouping all the same. Where all workers of a host differ from the rest, and two
or more of them are there, the host is named. It may have another kind of device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

Answers = Mapping[str, Mapping[int, str]]
"""By worker and policy version."""


@dataclass(frozen=True, slots=True)
class Differing:
    """The result of one self-check of a role."""

    workers: tuple[str, ...] = ()
    """Workers without the answer that most have."""
    undecided: tuple[str, ...] = ()
    """Workers that differ from one another, with no answer that most have."""
    hosts: tuple[str, ...] = ()
    """Hosts of two or more workers, all of which differ."""
    compared: tuple[str, ...] = ()
    """Workers with an answer under a version that another worker has answered, too."""

    @property
    def is_sound(self) -> bool:
        """Whether no answer differs."""
        return not (self.workers or self.undecided)


def differing(answers: Answers, hosts: Mapping[str, str]) -> Differing:
    """Compare all answers; ``hosts`` by worker."""
    by_version = {
        version: {worker: of[version] for worker, of in answers.items() if version in of}
        for version in sorted({version for of in answers.values() for version in of})
    }
    several = [given for given in by_version.values() if len(given) > 1]
    compared = {worker for given in several for worker in given}
    bad = set[str]()
    for given in several:
        (answer, number), *_ = Counter(given.values()).most_common(1)
        if 2 * number > len(given):
            bad |= {worker for worker, own in given.items() if own != answer}
    undecided = set[str]()
    for given in several:
        rest = {worker: own for worker, own in given.items() if worker not in bad}
        undecided |= rest.keys() if len(set(rest.values())) > 1 else set()
    of_host: dict[str, set[str]] = {}
    for worker in compared:
        of_host.setdefault(hosts.get(worker, ""), set()).add(worker)
    wrong = [host for host, workers in of_host.items() if len(of_host) > 1 and len(workers) > 1 and workers <= bad]
    return Differing(tuple(sorted(bad)), tuple(sorted(undecided)), tuple(sorted(wrong)), tuple(sorted(compared)))
