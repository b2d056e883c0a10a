"""Which host fetches a version from which: a tree below the learner, by the order of the relays.

A relay passes parts on while it still receives others. So a narrow tree costs about one copy's
time, whatever its depth: the learner sends ``width`` copies, and each level adds a few parts. A
delta is passed on only once it is whole, since only its result has a digest. So each level adds a
delta's time, and a wider tree is better.

A host's parent always came before it, so hosts never wait for one another in a circle, even if they
see different numbers of relays."""

from __future__ import annotations

MAX_WIDTH = 8
"""Most hosts that fetch from one source."""
_HOP_PARTS = 2
"""Delay of a level that passes parts on, in times of a part: the part itself, and a request."""


def width(num_parts: int, num_relays: int, *, is_passed_on_whole: bool) -> int:
    """Return how many relays fetch from each source, so that the last one has all soonest.

    ``num_parts``: size of what is fetched, in parts. ``is_passed_on_whole``: a relay passes nothing
    on before it has all."""

    def cost(width: int) -> int:
        depth = _depth(num_relays, width)
        per_level = width * num_parts
        # a delta is applied before it is passed on, which takes about as long as to receive it
        return depth * (per_level + num_parts) if is_passed_on_whole else per_level + depth * _HOP_PARTS

    return min(range(1, MAX_WIDTH + 1), key=cost)


def ancestors(position: int, width: int) -> list[int]:
    """Return the places from which the relay at ``position`` fetches, its parent first.

    The learner is above the last one. Empty: the learner is the parent."""
    found: list[int] = []
    while (position := position // width - 1) >= 0:
        found.append(position)
    return found


def _depth(num_relays: int, width: int) -> int:
    """Return the number of levels below the learner."""
    return len(ancestors(num_relays - 1, width)) + 1 if num_relays else 0
