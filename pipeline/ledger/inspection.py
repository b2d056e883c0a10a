"""Looks into the ledger: open groups, staleness, and what was dropped against what was trained.

``headrace ledger groups``, ``versions`` and ``drops`` show it; ``redis.admin`` implements it.
Nothing here changes the ledger, and no call carries an incarnation.

No call walks the ledger. Groups come from bounded ranges of its queues. Ready and running units are
counted by range. Trained and dropped work is counted by *tallies*: the transition that ends a unit
keeps them (``redis/scripts/parts/tallies.lua``). A run that an earlier release began has fewer in
them than in its other counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pipeline.ledger.admin import Place, WaitedTrajectory
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory
from pipeline.ledger.types import DropReason, QueueStat, Unit
from protocol.ids import TrajectoryId

MAX_STALENESS: Final = 64
"""Staleness is counted up to this; more counts as this."""
MILLION: Final = 1_000_000
"""Accuracies are summed in millionths, as integers: the sums are exact and in no order."""
MAX_LOOKS: Final = 20_000
"""Chunks that one look at open groups may ask for; with the last of them the list ends."""
MAX_CLAIMED: Final = 4096
"""Claimed units whose staleness is read in one look."""

MIN_RESPONSES: Final = 100
"""Of each kind, before their lengths are compared."""
MIN_GROUPS: Final = 20
"""Whole groups that the responses of each kind would fill, before their lengths are compared."""
MIN_EXCESS: Final = 0.1
"""Of the trained responses' mean length: by so much longer are responses whose loss matters."""
MIN_ERRORS: Final = 3.0
"""Standard errors that the difference must exceed: of several reasons, looked at again and again,
few exceed so many by chance."""
DELIBERATE: Final = frozenset({DropReason.CANCELLED, DropReason.ROLLED_BACK, DropReason.VALUE_WARMUP})
"""Reasons that do not select by length: they end, repeat or precede the policy's training."""
EMPTIED_BY: Final[dict[str, str]] = {
    "credit": "learner",
    "evaluation_open": "generator",
    "open": "generator",
    "parked": "learner",
    "leased": "generator",
    "again": "generator",
    "reward": "reward",
    "reference": "reference",
    "value": "value",
    "guidance": "reference",
    "finished": "value",
    "finished_claimed": "value",
    "ready": "learner",
    "claimed": "learner",
    "dead": "you",
    "bytes": "learner",
}
"""``parked`` windows wait for credit, which the learner returns. ``claimed`` units wait for the
learner's next checkpoint, ``finished_claimed`` trajectories for the value worker's. ``again`` holds
the prompts of retried dead letters. ``finished`` is listed for a run with a critic."""
_TRAINED = "trained"
_STALENESS = ":staleness:"


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group with members that lack something."""

    number: int
    prompt: int
    """Place of its prompt in the stream."""
    age_s: float | None
    """Since it was admitted; None if an earlier release admitted it."""
    num_done: int
    """Members that are sampled and lack no score."""
    num_left: int
    """Members that have left the ledger, trained or dropped. A group unit leaves as a whole."""
    judged_by: str
    """The scorer that judges the whole group; empty without one."""
    waited: tuple[WaitedTrajectory, ...]
    """The other members."""


@dataclass(frozen=True, slots=True)
class GroupsView:
    """The oldest open groups."""

    unit: Unit
    group_size: int
    num_groups: int
    """Admitted and not ended; the groups that lack nothing are among them."""
    num_running: int
    """Units with credit that are not ready."""
    groups: tuple[OpenGroup, ...]
    """In order of admission."""


def waits_for(waited: WaitedTrajectory, judged_by: str = "") -> str:
    """Return who or what a group's member waits for: an incarnation, a role, credit."""
    if waited.place is Place.FINISHED:
        return judged_by or " and ".join(lack.field.value for lack in waited.lacks)
    if waited.place is Place.PARKED:
        return "credit"
    return waited.holder or "a generator"


@dataclass(frozen=True, slots=True)
class StalenessView:
    """Units by staleness: by how many versions their oldest token was behind.

    Of ready and running units: behind the published version. Of trained ones: behind the version
    that claimed them. Of dropped ones: behind the version at the drop. After the learner went back,
    versions count by their updates (``pipeline.ledger.version_history``)."""

    unit: Unit
    policy_version: int
    eta: int
    ready: Mapping[int, int]
    running: Mapping[int, int]
    num_unbegun: int
    """Running units without a holder and without a token."""
    claimed: Mapping[int, int]
    """Of at most ``MAX_CLAIMED`` units."""
    num_claimed: int
    trained: Mapping[int, int]
    dropped: Mapping[str, Mapping[int, int]]
    """By reason; without units that had no token."""


@dataclass(frozen=True, slots=True)
class ResponseTally:
    """Length and difficulty of finished responses that left the ledger in one way."""

    num_responses: int = 0
    num_tokens: int = 0
    sum_squares: int = 0
    """Of their lengths."""
    num_judged: int = 0
    """Those whose group had a score."""
    sum_difficulty: int = 0
    """Of these, in millionths: 1 less the mean accuracy of the group's scored members."""

    @property
    def mean_length(self) -> float | None:
        """Tokens; None without a response."""
        return self.num_tokens / self.num_responses if self.num_responses else None

    @property
    def mean_difficulty(self) -> float | None:
        """From 0 to 1; None without a judged response."""
        return self.sum_difficulty / MILLION / self.num_judged if self.num_judged else None

    def squared_error(self, group_size: int) -> float:
        """Return the squared standard error of the mean length, at its upper bound.

        Responses of one group have a prompt in common, so they are not independent. The bound is
        reached when all responses of a group are of one length: then a group counts as one
        response. That is a design effect of ``group_size``. Infinite without more than a group's
        worth of responses."""
        if self.num_responses <= group_size:
            return math.inf
        spread = self.sum_squares - self.num_tokens * self.num_tokens / self.num_responses
        return max(spread, 0.0) / (self.num_responses - group_size) * group_size / self.num_responses

    def __add__(self, other: ResponseTally) -> ResponseTally:
        return ResponseTally(
            self.num_responses + other.num_responses,
            self.num_tokens + other.num_tokens,
            self.sum_squares + other.sum_squares,
            self.num_judged + other.num_judged,
            self.sum_difficulty + other.sum_difficulty,
        )


@dataclass(frozen=True, slots=True)
class EndedRow:
    """Work that left the ledger in one way."""

    reason: str
    """Of the drop; empty for trained work."""
    num_groups: int
    num_trajectories: int
    num_tokens: int
    """Of all its chunks, also those of unfinished responses."""
    responses: ResponseTally = field(default_factory=ResponseTally)
    """Responses that were given up after training stay with the trained ones here."""


@dataclass(frozen=True, slots=True)
class DropsView:
    """Dropped work by reason, against trained work."""

    trained: EndedRow
    dropped: tuple[EndedRow, ...]
    """Reasons that occurred, in the order of ``DropReason``."""
    group_size: int
    """Responses of one prompt."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each reason that drops longer responses than those trained on.

        The means differ by more than ``MIN_EXCESS`` of the trained mean, and by more than
        ``MIN_ERRORS`` standard errors, which count a group as one response. There are
        ``MIN_RESPONSES`` of each kind, and as many as ``MIN_GROUPS`` groups have."""
        found = (favours_short(row, self.trained, self.group_size) for row in self.dropped)
        return tuple(warning for warning in found if warning)


def drops_value(found: DropsView) -> dict[str, Any]:
    """Return dropped and trained work for JSON: rows with their means, and the warnings."""
    return {
        "trained": _row_value(found.trained, found.group_size),
        "dropped": [_row_value(row, found.group_size) for row in found.dropped],
        "warnings": list(found.warnings),
    }


def _row_value(row: EndedRow, group_size: int) -> dict[str, Any]:
    tally = row.responses
    return {
        "reason": row.reason,
        "num_groups": row.num_groups,
        "num_trajectories": row.num_trajectories,
        "num_tokens": row.num_tokens,
        "num_responses": tally.num_responses,
        "mean_length": tally.mean_length,
        "mean_length_error": math.sqrt(tally.squared_error(group_size)),
        "mean_difficulty": tally.mean_difficulty,
    }


_DOING: Final[Mapping[str, str]] = {
    DropReason.STALE: "wait for late work (staleness.late = 'wait'), raise staleness.eta, or add generators",
    DropReason.NO_SIGNAL: "the filter drops groups that are all right or all wrong, and masked over-long ones go too; easier "
    "prompts or more tokens for a response leave fewer long groups all wrong",
    DropReason.DEAD_LETTER: "long responses make a scorer fail; `headrace ledger dead-letters` has the tracebacks",
    DropReason.NON_FINITE: "long responses have values that are not finite; look at the learner's log",
}


def favours_short(dropped: EndedRow, trained: EndedRow, group_size: int) -> str:
    """Return the warning that this drop favours short answers; empty when it does not."""
    ours, theirs = dropped.responses, trained.responses
    fewest = max(MIN_RESPONSES, MIN_GROUPS * group_size)
    if dropped.reason in DELIBERATE or min(ours.num_responses, theirs.num_responses) < fewest:
        return ""
    long, short = ours.mean_length, theirs.mean_length
    assert long is not None and short is not None
    excess = long - short
    error = math.sqrt(ours.squared_error(group_size) + theirs.squared_error(group_size))
    if excess <= MIN_EXCESS * short or excess <= MIN_ERRORS * error:
        return ""
    return (
        f"dropping as {dropped.reason} favours short answers: {ours.num_responses:,} dropped responses have "
        f"{long:,.1f} tokens in the mean, {theirs.num_responses:,} trained ones {short:,.1f}; that is {excess:,.1f} "
        f"(standard error at most {error:,.1f}) more. {_DOING[dropped.reason]}"
    )


class LedgerInspection(Protocol):
    """Looks into the ledger. Every method is one look at one moment, but for ``groups``, of which each
    group is. Each raises LedgerUnavailable."""

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
        """Return up to ``max_groups`` of the oldest open groups: members done, who has the rest,
        what each waits for, since when."""
        ...

    async def versions(self) -> StalenessView:
        """Return the staleness of what is ready, running, claimed, trained and dropped."""
        ...

    async def drops(self) -> DropsView:
        """Return what was dropped, by reason, against what was trained."""
        ...

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
        """Return what happened to a trajectory that is in the ledger, or among the newest that have
        left it."""
        ...


def queue_stat(name: str, depth: int, limit: int | None, oldest_age_s: float | None) -> QueueStat:
    """Return the stat of one of the ledger's queues."""
    return QueueStat(name, depth, limit, oldest_age_s, EMPTIED_BY[name])


def staleness_of(tallies: Mapping[str, int]) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """Return the units by staleness: the trained ones, and the dropped ones by reason."""
    found: dict[str, dict[int, int]] = {}
    for name, number in tallies.items():
        end, marked, behind = name.partition(_STALENESS)
        if marked and number:
            found.setdefault(end, {})[int(behind)] = number
    ordered = {end: dict(sorted(counts.items())) for end, counts in found.items()}
    return ordered.get(_TRAINED, {}), {
        reason.value: counts for reason in DropReason if (counts := ordered.get(f"dropped:{reason.value}"))
    }


def drops_from(
    trained: Mapping[str, int],
    dropped: Mapping[str, Mapping[str, int]],
    tallies: Mapping[str, int],
    *,
    group_size: int,
) -> DropsView:
    """Return the drops against what was trained.

    Args:
        trained: By currency: groups, trajectories, tokens.
        dropped: By currency, then by reason.
        tallies: By name.
        group_size: Responses of one prompt."""
    by_reason = {
        reason.value: {currency: counts.get(reason.value, 0) for currency, counts in dropped.items()}
        for reason in DropReason
    }
    rows = (_row(reason, counts, f"dropped:{reason}", tallies) for reason, counts in by_reason.items())
    there = tuple(row for row in rows if row.num_trajectories or row.num_tokens)
    return DropsView(_row("", trained, _TRAINED, tallies), there, group_size)


def _row(reason: str, counts: Mapping[str, int], end: str, tallies: Mapping[str, int]) -> EndedRow:
    responses, tokens, squares, judged, difficulty = (
        tallies.get(f"{end}:{name}", 0) for name in ("responses", "tokens", "squares", "judged", "difficulty")
    )
    groups, trajectories, num_tokens = (counts.get(currency, 0) for currency in ("groups", "trajectories", "tokens"))
    return EndedRow(
        reason, groups, trajectories, num_tokens, ResponseTally(responses, tokens, squares, judged, difficulty)
    )
