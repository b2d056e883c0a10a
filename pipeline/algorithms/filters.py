"""Which groups are worth an update: signal, staleness, and the loop that samples until there are enough.

*Consumes* raw accuracies (before any shaping) and policy versions of finished groups. *Produces* verdicts. *Waits for*
nothing: pure state machines; the ledger and the learner own time.

A group is judged only when all its members are finished. Early finishers are short, and short responses differ in accuracy
from long ones, so a baseline over those finished so far would be biased by length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Uid = TypeVar("Uid", bound=Hashable)


def has_signal(accuracies: Sequence[float]) -> bool:
    """Whether a group's members differ in raw accuracy, so that some advantage differs from 0.

    A group of one member has no baseline within itself and always passes. DAPO (2503.14476, eq. 11); raw accuracy, not the
    shaped reward, as in the DAPO recipe: a group that is all right does not come back for its over-long penalties.
    """
    return len(accuracies) == 1 or any(value != accuracies[0] for value in accuracies)


class GroupVerdict(StrEnum):
    """What becomes of a finished group."""

    TRAIN = "train"
    EVICT_STALE = "evict_stale"
    """Its oldest token is too old: the whole group goes, never a part, since a part has another baseline."""
    EVICT_UNINFORMATIVE = "evict_uninformative"
    """All right or all wrong."""


@dataclass(frozen=True, slots=True)
class FinishedMember:
    """One response of a group."""

    first_version: int
    """Policy version of its first token."""
    finish_version: int
    """Policy version when it finished."""
    accuracy: float
    """Raw correctness in [0, 1]."""


@dataclass(frozen=True, slots=True)
class GroupJudgement:
    """A verdict and what it rests on."""

    verdict: GroupVerdict
    ready_version: int
    """When the slowest member finished."""
    age: int
    """``ready_version`` minus the version of the group's oldest token."""


def judge_group(members: Sequence[FinishedMember], *, eta: int) -> GroupJudgement:
    """Judge a group whose members have all finished: first its age, then its signal.

    Args:
        members: All members.
        eta: Largest allowed age in versions.
    """
    ready = max(member.finish_version for member in members)
    age = ready - min(member.first_version for member in members)
    if age > eta:
        return GroupJudgement(GroupVerdict.EVICT_STALE, ready, age)
    if not has_signal([member.accuracy for member in members]):
        return GroupJudgement(GroupVerdict.EVICT_UNINFORMATIVE, ready, age)
    return GroupJudgement(GroupVerdict.TRAIN, ready, age)


class SamplingState(StrEnum):
    """Where a dynamic-sampling loop is."""

    SAMPLING = "sampling"
    """Too few groups with signal; another generation batch is wanted."""
    FULL = "full"
    """There are enough."""
    HOPELESS = "hopeless"
    """As many generation batches as allowed were drawn and there are too few: the data is too easy or too hard."""


@dataclass(slots=True)
class DynamicSampling(Generic[Uid]):
    """The synchronous loop of dynamic sampling: draw generation batches until enough groups have signal.

    The reference that the asynchronous pipeline is checked against: there the ledger drops groups without signal one by one
    and admits others for them, and surplus groups wait for the next update instead of being thrown away.
    Source: DAPO (2503.14476, algorithm 1), loop of the DAPO recipe of verl.
    """

    num_wanted: int
    """Groups in one update."""
    max_generation_batches: int = 0
    """Generation batches after which the loop gives up; 0 for no limit."""
    num_generation_batches: int = 0
    kept: list[Uid] = field(default_factory=list[Uid])
    """Groups with signal, in the order of arrival."""

    def offer(self, groups: Sequence[tuple[Uid, Sequence[float]]]) -> SamplingState:
        """Take one generation batch of (group, raw accuracies of its members) and say what to do next.

        Raises:
            ValueError: The loop is over already.
        """
        if self.state is not SamplingState.SAMPLING:
            raise ValueError(
                f"a generation batch was offered to a loop that is {self.state}; expected sampling: start another"
            )
        self.num_generation_batches += 1
        self.kept.extend(uid for uid, accuracies in groups if has_signal(accuracies))
        return self.state

    @property
    def state(self) -> SamplingState:
        """What to do next."""
        if len(self.kept) >= self.num_wanted:
            return SamplingState.FULL
        if 0 < self.max_generation_batches <= self.num_generation_batches:
            return SamplingState.HOPELESS
        return SamplingState.SAMPLING

    @property
    def batch(self) -> list[Uid]:
        """The groups of the update: the first ``num_wanted`` by arrival; empty until there are enough."""
        return self.kept[: self.num_wanted] if self.state is SamplingState.FULL else []

    @property
    def surplus(self) -> list[Uid]:
        """Groups with signal beyond this update."""
        return self.kept[self.num_wanted :]


@dataclass(slots=True)
class RunningSignal(Generic[Uid]):
    """A filter for groups that finish over several steps: signal among the members finished so far.

    T-PPO's port (volcengine/verl pull request 3728) selects its training set so. The pipeline does not, and has it as a
    reference only: the members that finish first are the shortest, so a prompt is judged by short responses, and the windows of
    long ones are dropped before their scores are known.
    """

    lowest: float = -1.0
    """Score of a wrong answer."""
    highest: float = 1.0
    """Score of a right one."""
    scores: dict[Uid, list[float]] = field(default_factory=dict[Uid, list[float]])
    """Scores of the finished members of each group, over all steps."""

    def observe(self, uid: Uid, finished_scores: Sequence[float]) -> None:
        """Add the scores of a group's members that finished in this step."""
        self.scores.setdefault(uid, []).extend(finished_scores)

    def with_signal(self) -> list[Uid]:
        """Return the groups whose running mean is neither the lowest nor the highest score, in order of first sight."""
        return [uid for uid, scores in self.scores.items() if scores and not self._is_flat(scores)]

    def _is_flat(self, scores: Sequence[float]) -> bool:
        return sum(scores) / len(scores) in (self.lowest, self.highest)
