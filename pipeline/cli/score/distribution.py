"""Distributions of scores, for ``headrace score``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.rewards.functions import absent_reason
from pipeline.rewards.verifier import Response, VerifierFailure
from protocol.trajectory import Guidance, RewardScore

_MAX_EXAMPLES = 5
_MAX_GROUPS = 50
_MAX_CHARS, _MAX_VALUE_CHARS = 8_000, 80
"""Most characters of an example, and of a value of the ``--by`` column."""
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    mean: float
    min: float
    p10: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    value: str
    num_responses: int
    num_failed: int
    accuracy: float | None
    """Mean over the responses with a verdict; None if there are none."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    path: str
    verifier: str | None
    """None if each line names its verifier."""
    num_responses: int
    """Readable lines, scored or failed."""
    num_scored: int
    accuracy: float | None
    """Mean over the responses with a verdict; None if there are none."""
    num_correct: int
    num_partial: int
    """Accuracy between 0 and 1."""
    num_not_judged: int
    """Counted as wrong because they were not judged within their time limits."""
    num_masked: int
    """Left out of the loss by over-long filtering."""
    reward: Quantiles | None
    parts: dict[str, float]
    """Mean of each part of the reward, over all scored responses."""
    length_unit: str
    """tokens if every line has num_tokens, else characters."""
    correct_lengths: Quantiles | None
    other_lengths: Quantiles | None
    failures: dict[str, int]
    """Responses without a verdict, by kind."""
    failure_examples: list[str]
    """``file:line: error``, the first few."""
    num_bad_lines: int
    bad_lines: list[str]
    """``file:line: problem``, the first few."""
    groups: list[GroupAccuracy]
    num_judgments: int = 0
    """Wrong responses with a judgment."""
    judgments_absent: dict[str, int] = field(default_factory=dict[str, int])
    """Wrong responses without one, by reason."""
    judgment_examples: list[str] = field(default_factory=list[str])
    """``file:line: judgment``, the first few; then reasons why others are absent."""

    @property
    def num_failed(self) -> int:
        return self.num_responses - self.num_scored

    @property
    def all_judged(self) -> bool:
        """Whether every line held a response and got its verdict in time."""
        return not (self.num_failed or self.num_not_judged or self.num_bad_lines)


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Summarise numbers by nearest-rank quantiles, each of which is one of them. None for no
    numbers."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return Quantiles(sum(ordered) / len(ordered), *(float(ordered[round(q * last)]) for q in _QUANTILES))


class ScoreTally:
    """Accumulates the scores of a file while it is read. ``by`` names a column of
    ``Response.extra``."""

    def __init__(self, path: str, verifier: str | None, by: str | None) -> None:
        self._path, self._verifier, self._by = path, verifier, by
        self._accuracies: list[float] = []
        self._rewards: list[float] = []
        self._lengths: list[tuple[bool, int, int]] = []
        self._parts: Counter[str] = Counter()
        self._num_masked = self._num_not_judged = self._num_bad_lines = 0
        self._failures: Counter[str] = Counter()
        self._failure_examples: list[str] = []
        self._bad_lines: list[str] = []
        self._groups: dict[str, list[float | None]] = {}
        self._num_judgments = 0
        self._absent: Counter[str] = Counter()
        self._judgments: list[str] = []
        self._reasons: list[str] = []

    def add_score(self, response: Response, score: RewardScore, *, judged: bool = True) -> None:
        """Count a scored response. One that was not ``judged`` in time is wrong."""
        self._num_not_judged += not judged
        self._accuracies.append(score.accuracy)
        self._rewards.append(score.reward)
        self._lengths.append((score.accuracy == 1.0, response.num_tokens, len(response.response_text)))
        self._num_masked += score.masked
        for name, value in score.parts.items():
            self._parts[name] += value  # pyright: ignore[reportArgumentType]  a Counter sums floats as well
        if self._by is not None:
            self._group(response).append(score.accuracy)

    def add_failure(self, line: int, response: Response, failure: VerifierFailure) -> None:
        self._failures[str(failure.kind)] += 1
        if len(self._failure_examples) < _MAX_EXAMPLES:
            self._failure_examples.append(f"{self._path}:{line}: {failure.error.strip()[-_MAX_CHARS:]}")
        if self._by is not None:
            self._group(response).append(None)

    def add_bad_line(self, line: int, problem: str) -> None:
        self._num_bad_lines += 1
        if len(self._bad_lines) < _MAX_EXAMPLES:
            self._bad_lines.append(f"{self._path}:{line}: {problem[:_MAX_CHARS]}")

    def add_judgment(self, line: int, guidance: Guidance) -> None:
        """Count the judgment of a response, or its absence. A right response has neither."""
        self._num_judgments += bool(guidance.judge_text)
        if guidance.absent:
            self._absent[absent_reason(guidance)] += 1
        for text, examples in ((guidance.judge_text, self._judgments), (guidance.absent, self._reasons)):
            if text and len(examples) < _MAX_EXAMPLES:
                examples.append(f"{self._path}:{line}: {text[:_MAX_CHARS]}")

    def report(self) -> ScoreReport:
        num_scored = len(self._accuracies)
        has_tokens = num_scored > 0 and all(tokens > 0 for _, tokens, _ in self._lengths)
        lengths = [(correct, tokens if has_tokens else characters) for correct, tokens, characters in self._lengths]
        return ScoreReport(
            path=self._path,
            verifier=self._verifier,
            num_responses=num_scored + self._failures.total(),
            num_scored=num_scored,
            accuracy=_mean(self._accuracies),
            num_correct=self._accuracies.count(1.0),
            num_partial=sum(0.0 < accuracy < 1.0 for accuracy in self._accuracies),
            num_not_judged=self._num_not_judged,
            num_masked=self._num_masked,
            reward=quantiles(self._rewards),
            parts={name: total / num_scored for name, total in self._parts.items()},
            length_unit="tokens" if has_tokens else "characters",
            correct_lengths=quantiles([length for correct, length in lengths if correct]),
            other_lengths=quantiles([length for correct, length in lengths if not correct]),
            failures=dict(self._failures),
            failure_examples=self._failure_examples,
            num_bad_lines=self._num_bad_lines,
            bad_lines=self._bad_lines,
            groups=[_accuracy(value, found) for value, found in sorted(self._groups.items())],
            num_judgments=self._num_judgments,
            judgments_absent=dict(self._absent),
            judgment_examples=[*self._judgments, *self._reasons],
        )

    def _group(self, response: Response) -> list[float | None]:
        value = str(response.extra.get(self._by or "", "(absent)"))[:_MAX_VALUE_CHARS]
        if value not in self._groups and len(self._groups) >= _MAX_GROUPS:
            value = "(others)"
        return self._groups.setdefault(value, [])


def _accuracy(value: str, found: Sequence[float | None]) -> GroupAccuracy:
    """``found`` has None for each response without a verdict."""
    judged = [accuracy for accuracy in found if accuracy is not None]
    return GroupAccuracy(value, len(found), len(found) - len(judged), _mean(judged))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
