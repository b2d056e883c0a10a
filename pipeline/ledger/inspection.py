"""Read-only views of the ledger: open groups, staleness, and dropped work compared with trained work.

``headrace ledger groups``, ``versions`` and ``drops`` show them; ``redis.admin`` implements them. No call
takes an incarnation.

No call walks the ledger. Groups come from bounded ranges of its queues, ready and running units are counted
by range, and trained and dropped work is counted in *tallies*, which are updated by the transition that ends
a unit (``redis/scripts/parts/tallies.lua``). In a run that an earlier release began, the tallies count less
than the other counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pipeline.ledger.admin import Place, WaitedTrajectory
from pipeline.ledger.life import TrajectoryLife, UnknownTrajectory
from pipeline.ledger.types import DropReason, QueueStat, Unit
from protocol.ids import TrajectoryId
from protocol.trajectory import Field

MAX_STALENESS: Final = 64
"""Larger staleness is counted as this."""
MILLION: Final = 1_000_000
"""Accuracies are summed as integer millionths, so the sums are exact and independent of order."""
MAX_LOOKS: Final = 20_000
"""Most chunks that one call may read to list open groups; the list ends there."""
MAX_CLAIMED: Final = 4096
"""Most claimed units whose staleness one call reads."""

MIN_RESPONSES: Final = 100
"""Responses needed of each kind before their lengths are compared."""
MIN_GROUPS: Final = 20
"""Number of whole groups that the responses of each kind must amount to before lengths are compared."""
MIN_EXCESS: Final = 0.1
"""Dropped responses must be longer by this fraction of the trained mean length to matter."""
MIN_ERRORS: Final = 3.0
"""Standard errors that the difference must exceed. High, since several reasons are tested repeatedly."""
DELIBERATE: Final = frozenset({DropReason.CANCELLED, DropReason.ROLLED_BACK, DropReason.VALUE_WARMUP})
"""Reasons that do not select by length: the work ended, was repeated, or preceded policy training."""
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
    "turn": "environment",
    "finished": "value",
    "finished_claimed": "value",
    "ready": "learner",
    "claimed": "learner",
    "dead": "you",
    "bytes": "learner",
}
"""Who empties each queue. ``parked`` windows wait for credit, which the learner returns; ``claimed`` units
for the learner's next checkpoint, ``finished_claimed`` trajectories for the value worker's. ``again``
holds the prompts of retried dead letters. ``finished`` only exists in runs with a critic."""
_TRAINED = "trained"
_STALENESS = ":staleness:"


@dataclass(frozen=True, slots=True)
class OpenGroup:
    number: int
    prompt: int
    """Position of its prompt in the stream."""
    age_s: float | None
    """Seconds since admission; None if an earlier release admitted it."""
    num_done: int
    """Members that are sampled and have all scores."""
    num_left: int
    """Members that have left the ledger, trained or dropped. A group unit leaves as a whole."""
    judged_by: str
    """The scorer that is judging the whole group; empty if none is."""
    waited: tuple[WaitedTrajectory, ...]
    """The incomplete members."""


@dataclass(frozen=True, slots=True)
class GroupsView:
    unit: Unit
    group_size: int
    num_groups: int
    """Admitted groups that have not ended, complete ones included."""
    num_running: int
    """Units that have credit but are not ready."""
    groups: tuple[OpenGroup, ...]


def waits_for(waited: WaitedTrajectory, judged_by: str = "") -> str:
    """Return what a group's member waits for: an incarnation, a role or credit."""
    lacks = " and ".join("environment" if one.field is Field.TURN else one.field.value for one in waited.lacks)
    if waited.place is Place.WAITING:
        return lacks
    if waited.place is Place.FINISHED:
        return judged_by or lacks
    if waited.place is Place.PARKED:
        return "credit"
    return waited.holder or "a generator"


@dataclass(frozen=True, slots=True)
class StalenessView:
    """Numbers of units by staleness: by how many versions their oldest token is behind.

    Ready and running units are compared with the published version, trained ones with the version that
    claimed them, dropped ones with the version at the drop. After the learner went back to a checkpoint,
    versions count by their updates (``pipeline.ledger.version_history``)."""

    unit: Unit
    policy_version: int
    eta: int
    ready: Mapping[int, int]
    running: Mapping[int, int]
    num_unbegun: int
    """Running units without a holder and without tokens."""
    claimed: Mapping[int, int]
    """For at most ``MAX_CLAIMED`` units."""
    num_claimed: int
    trained: Mapping[int, int]
    dropped: Mapping[str, Mapping[int, int]]
    """Dropped units by reason, without those that had no tokens."""


@dataclass(frozen=True, slots=True)
class ResponseTally:
    """Length and difficulty of the finished responses that left the ledger in one way."""

    num_responses: int = 0
    num_tokens: int = 0
    sum_squares: int = 0
    num_judged: int = 0
    """Responses whose group had a score."""
    sum_difficulty: int = 0
    """Sum over the judged ones, in millionths. Difficulty is 1 - the mean accuracy of the group's scored
    members."""

    @property
    def mean_length(self) -> float | None:
        """Mean length in tokens; None without responses."""
        return self.num_tokens / self.num_responses if self.num_responses else None

    @property
    def mean_difficulty(self) -> float | None:
        """Mean difficulty from 0 to 1; None without judged responses."""
        return self.sum_difficulty / MILLION / self.num_judged if self.num_judged else None

    def squared_error(self, group_size: int) -> float:
        """Return an upper bound of the squared standard error of the mean length.

        Responses of one group share a prompt, so they are not independent. The bound is reached when all
        responses of a group are equally long and the group counts as one response (a design effect of
        ``group_size``). Infinite unless there is more than one group's worth of responses."""
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
    """Why it was dropped; empty for trained work."""
    num_groups: int
    num_trajectories: int
    num_tokens: int
    """Tokens of all its chunks, including those of unfinished responses."""
    responses: ResponseTally = field(default_factory=ResponseTally)
    """Responses that were rolled back after training still count as trained here."""


@dataclass(frozen=True, slots=True)
class DropsView:
    """Dropped work by reason, and trained work for comparison."""

    trained: EndedRow
    dropped: tuple[EndedRow, ...]
    """Reasons that occurred, in the order of ``DropReason``."""
    group_size: int
    """Responses per prompt."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each reason whose dropped responses are longer than the trained ones.

        The means must differ by more than ``MIN_EXCESS`` of the trained mean and by more than ``MIN_ERRORS``
        standard errors, with enough responses of both kinds (``MIN_RESPONSES``, ``MIN_GROUPS``)."""
        found = (favours_short(row, self.trained, self.group_size) for row in self.dropped)
        return tuple(warning for warning in found if warning)


def drops_value(found: DropsView) -> dict[str, Any]:
    """Return dropped and trained work as JSON values: rows with their means, and the warnings."""
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
    """Return a warning that this drop favours short answers; empty when it does not."""
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
        f"{long:,.1f} tokens on average, {theirs.num_responses:,} trained ones {short:,.1f}; that is {excess:,.1f} "
        f"(standard error at most {error:,.1f}) more. {_DOING[dropped.reason]}"
    )


class LedgerInspection(Protocol):
    """Read-only views. Each method reads one moment; only ``groups`` reads each group at its own moment. Each
    raises LedgerUnavailable."""

    async def groups(self, *, max_groups: int = 20) -> GroupsView:
        """Return the oldest open groups: members done, who has the others, what each waits for, since when."""
        ...

    async def versions(self) -> StalenessView: ...

    async def drops(self) -> DropsView: ...

    async def life(self, trajectory: TrajectoryId) -> TrajectoryLife | UnknownTrajectory:
        """Return the history of a trajectory that is in the ledger or among the newest that left it."""
        ...


def queue_stat(name: str, depth: int, limit: int | None, oldest_age_s: float | None) -> QueueStat:
    return QueueStat(name, depth, limit, oldest_age_s, EMPTIED_BY[name])


def staleness_of(tallies: Mapping[str, int]) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """Return the numbers of units by staleness: trained, and dropped by reason."""
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
    """Return the view of dropped work.

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
