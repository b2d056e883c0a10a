"""Faults that show without comparing workers: own reports, failures, refused messages, epochs,
log-prob gaps, verdicts, and the pace of the ledger.

Pure: ``observe(now_s, at_s, beats)`` gets monotonic seconds, the same moment on the wall clock, and
the last heartbeat of each worker, and returns what is suspected. Memory is bounded by these
heartbeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.state import Worker
from pipeline.runtime.liveness import is_recent
from pipeline.runtime.registry.contract import OTHER_LINKS, FailureReport, WaitingFor
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP, LONGEST_STANDSTILL, STANDSTILL
from protocol.errors import StepDiffered
from protocol.ids import Incarnation, Role

QUARANTINED_S: Final = 2.0
"""A version that is replaced while it is read is refused only briefly."""
STANDSTILL_S: Final = 8.0
"""Turns of a generator's engine without a token for this long are never a fault."""
_LONGER: Final = 1.5
"""A standstill is a fault if it exceeds the longest that ended by itself by this factor."""
_MOST: Final = 0.5
"""If more than this share of generators finds weights damaged, the learner is at fault."""


class OwnReports:
    """What workers report about themselves: a disk that refuses, damaged weights, an engine without
    tokens, an optimiser step that was refused twice.

    Weights that most generators find damaged are the learner's fault. An engine may pause for 8 s,
    and for half again as long as its longest pause so far."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def observe(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        refusing = [beat for beat in beats if beat.waiting_for is WaitingFor.QUARANTINE]
        self._since_s = {beat.who.worker: self._since_s.get(beat.who.worker, now_s) for beat in refusing}
        lasting = [beat for beat in refusing if now_s - self._since_s[beat.who.worker] >= QUARANTINED_S]
        found = [
            _reported(beat, "disk", at_s, f"its disk refuses it: {beat.refused}") for beat in beats if beat.refused
        ]
        found += [_reported(beat, "numeric", at_s, beat.not_committed) for beat in beats if beat.not_committed]
        found += [_without_tokens(beat, at_s) for beat in beats if beat.counters.get(STANDSTILL, 0.0) > _limit_s(beat)]
        num = sum(beat.who.role is Role.GENERATOR for beat in beats)
        if len(lasting) > 1 and len(lasting) > _MOST * num:
            return [*found, _published_damaged(lasting, at_s)]
        for beat in lasting:
            since_s = at_s - (now_s - self._since_s[beat.who.worker])
            found.append(_reported(beat, "quarantine", since_s, f"it refuses the published weights: {beat.detail}"))
        return found


def _reported(beat: Worker, kind: str, since_s: float, sentence: str) -> Suspicion:
    return Suspicion(beat.who.worker, kind, since_s, sentence, role=str(beat.who.role), score=1.0)


def _limit_s(beat: Worker) -> float:
    return max(STANDSTILL_S, _LONGER * beat.counters.get(LONGEST_STANDSTILL, 0.0))


def _without_tokens(beat: Worker, at_s: float) -> Suspicion:
    stood_s = beat.counters[STANDSTILL]
    sentence = (
        f"its engine has returned no token for {stood_s:.0f} s, and no error; the limit is {_limit_s(beat):.0f} s"
    )
    return _reported(beat, "hung", at_s - beat.silent_s - stood_s, sentence)


def _published_damaged(beats: Sequence[Worker], at_s: float) -> Suspicion:
    names = ", ".join(beat.who.worker for beat in beats)
    sentence = f"{len(beats)} generators refuse the weights that it published: {names}"
    evidence = (f"{beats[0].who.worker}: {beats[0].detail}",)
    return Suspicion(
        str(Role.LEARNER), "quarantine", at_s, sentence, role=str(Role.LEARNER), score=1.0, evidence=evidence
    )


_KINDS: Final = {StepDiffered.__name__: "machine"}
"""Errors with their own kind of incident."""
TOLD_S: Final = 60.0
"""An older failure that an observer reads at its start was already reported by an earlier observer."""


class Failures:
    """Workers that ended with an error, as they reported when they left.

    Such a worker is not fenced, so its successor's epoch shows nothing."""

    def __init__(self) -> None:
        self._reported: frozenset[Incarnation] = frozenset()

    def observe(self, at_s: float, failures: Sequence[FailureReport]) -> list[Suspicion]:
        new = [one for one in failures if one.who not in self._reported and one.ago_s < TOLD_S]
        self._reported = frozenset(one.who for one in failures)
        return [_failed(one, at_s) for one in new]


def _failed(one: FailureReport, at_s: float) -> Suspicion:
    sentence = f"incarnation {one.who.epoch} ended with {one.error}: {one.message}"
    kind = _KINDS.get(one.error, "failed")
    return Suspicion(one.who.worker, kind, at_s - one.ago_s, sentence, role=str(one.who.role), score=1.0)


MOST_NATS: Final = 0.3
"""Excess of the gap over the peers', in nats per token, that two healthy engines may have."""
MOST_TIMES: Final = 3.0
"""The same, as a multiple of the peers' gap."""


class Mismatches:
    """Generators whose tokens do not come from the policy, by the learner's check of log-probs.

    The learner reports the mean gap of each generator's newest chunks and that of its peers at the
    same lags (``workers.learner.logprob_check``). A gap must exceed both limits: in nats above the
    peers', and as a multiple of theirs."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def observe(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        there = {beat.who.worker for beat in beats}
        found = dict[str, tuple[float, float]]()
        for beat in beats:
            for name, gap in beat.counters.items():
                worker = name.removeprefix(LOGPROB_GAP)
                usual = beat.counters.get(LOGPROB_USUAL_GAP + worker)
                if worker == name or worker not in there or usual is None:
                    continue
                if gap - usual > MOST_NATS and gap > MOST_TIMES * usual:
                    found[worker] = gap, usual
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in found}
        return [_mismatched(worker, *found[worker], at_s - (now_s - self._since_s[worker])) for worker in found]


def _mismatched(worker: str, gap: float, usual: float, since_s: float) -> Suspicion:
    sentence = (
        f"its log-probs differ from the learner's by {gap:.2g} nats per token, those of its peers by {usual:.2g}; "
        f"the limit is {MOST_NATS:g} more, and {MOST_TIMES:g} times theirs"
    )
    score = (gap - usual) / MOST_NATS
    return Suspicion(worker, "mismatch", since_s, sentence, role=str(Role.GENERATOR), score=score)


_MEMORY_S: Final = 10.0
_MOST_SHARE: Final = 0.8
_FEWEST: Final = 2.0


class Refusals:
    """Over which link recently refused messages came; old ones fade within ten seconds.

    If refusals come from a single sender, the link or its sender is at fault, not the receiver."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._recent: dict[str, float] = {}
        self._now_s = math.nan

    def observe(self, now_s: float, beats: Sequence[Worker]) -> None:
        fading = math.exp(-(now_s - self._now_s) / _MEMORY_S) if now_s > self._now_s else 1.0
        self._now_s = now_s
        counts = {
            link.name: link.refused
            for beat in beats
            for link in beat.links
            if link.name.partition(">")[2] == beat.who.worker
        }
        self._recent = {
            name: fading * self._recent.get(name, 0.0) + max(0, count - self._counts.get(name, count))
            for name, count in counts.items()
        }
        self._counts = counts

    def link_to(self, receiver: str) -> str:
        """Return the link over which nearly all recent refusals of a receiver came, or ""."""
        of = {name: recent for name, recent in self._recent.items() if name.partition(">")[2] == receiver}
        best = max(of, key=lambda name: of[name], default="")
        if not best or best.startswith(OTHER_LINKS) or of[best] < _FEWEST:
            return ""
        return best if of[best] >= _MOST_SHARE * sum(of.values()) else ""


KEPT_S = 600.0
"""A worker that is gone for this long is forgotten."""


@dataclass(slots=True)
class _LastEpoch:
    epoch: int
    seen_s: float
    beat_s: float


class Replacements:
    """Workers that were replaced after a bad end, found by their successors' epochs.

    Each registration takes one epoch, and fencing a worker that crashed, froze or hung takes one
    more. So a successor whose epoch is higher by two reveals such an end, however quickly it
    arrived. A worker that drained was not fenced: its successor has the next epoch."""

    def __init__(self) -> None:
        self._seen: dict[str, _LastEpoch] = {}

    def observe(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        found: list[Suspicion] = []
        for beat in beats:
            worker, epoch = beat.who.worker, beat.who.epoch
            before = self._seen.get(worker)
            if before is not None and epoch - before.epoch > 1:
                since_s = at_s - (now_s - before.beat_s)
                found.append(_replaced(beat, before.epoch, since_s))
            self._seen[worker] = _LastEpoch(epoch, now_s, now_s - beat.silent_s)
        for worker, seen in list(self._seen.items()):
            if now_s - seen.seen_s > KEPT_S:
                del self._seen[worker]
        return found


def _replaced(beat: Worker, epoch: int, since_s: float) -> Suspicion:
    return Suspicion(
        component=beat.who.worker,
        kind="replaced",
        since_s=since_s,
        sentence=f"incarnation {epoch} ended without a drain and was fenced; {beat.who.epoch} replaced it",
        role=str(beat.who.role),
        score=1.0,
    )


MOST_SHARE: Final = 0.1
"""Share of recent attempts that may yield no verdict."""
FEWEST: Final = 5.0
"""With fewer failed attempts no worker is named."""
_VERDICT_MEMORY_S: Final = 60.0
SAME_VERDICTS: Final = 512
"""Responses in a row that were all wrong, or all right since the worker's start."""


class MissingVerdicts:
    """Reward workers whose verifiers often give no verdict, because they are late or fail.

    A response without a verdict is retried, and then left out of its group. If many attempts fail,
    the verifier or what it calls is at fault, and training loses these responses. Attempts fade
    within a minute."""

    def __init__(self) -> None:
        self._counts: dict[Incarnation, tuple[float, float, float]] = {}
        self._recent: dict[Incarnation, tuple[float, float, float]] = {}
        self._since_s: dict[Incarnation, float] = {}
        self._now_s = math.nan

    def observe(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        fading = math.exp(-(now_s - self._now_s) / _VERDICT_MEMORY_S) if now_s > self._now_s else 1.0
        self._now_s = now_s
        counts = {beat.who: _counts(beat) for beat in beats if beat.who.role is Role.REWARD}
        recent = dict[Incarnation, tuple[float, float, float]]()
        for who, now in counts.items():
            before, old = self._counts.get(who, now), self._recent.get(who, (0.0, 0.0, 0.0))
            grown = [max(0.0, new - last) for new, last in zip(now, before, strict=True)]
            judged, failed, late = (fading * past + more for past, more in zip(old, grown, strict=True))
            recent[who] = judged, failed, late
        self._counts, self._recent = counts, recent
        bad = {who: one for who, one in recent.items() if one[1] >= FEWEST and one[1] > MOST_SHARE * (one[0] + one[1])}
        self._since_s = {who: self._since_s.get(who, at_s) for who in bad}
        return [_missing(who, *bad[who], self._since_s[who]) for who in bad]


class SameVerdicts:
    """Reward workers that find everything wrong, or everything right from the start.

    A model that has learned its task is right all the time, too, but was not from the start."""

    def __init__(self) -> None:
        self._last_right: dict[Incarnation, tuple[float, float]] = {}
        """Sum of accuracies, and the number of judged responses when it last grew."""
        self._since_s: dict[Incarnation, float] = {}

    def observe(self, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        found: dict[Incarnation, str] = {}
        last_right: dict[Incarnation, tuple[float, float]] = {}
        for beat in beats:
            if beat.who.role is not Role.REWARD:
                continue
            judged, accuracy = (beat.counters.get(name, 0.0) for name in ("judged", "judged_accuracy"))
            before = self._last_right.get(beat.who, (0.0, 0.0))
            last_right[beat.who] = before = before if accuracy == before[0] else (accuracy, judged)
            if judged - before[1] >= SAME_VERDICTS:
                found[beat.who] = f"each of the last {judged - before[1]:,.0f} responses was wrong"
            elif judged >= SAME_VERDICTS and accuracy == judged:
                found[beat.who] = f"each of {judged:,.0f} responses was right"
        self._last_right = last_right
        self._since_s = {who: self._since_s.get(who, at_s) for who in found}
        hint = "look at `headrace samples`, and fix data.verifier or use other prompts"
        return [
            Suspicion(who.worker, "verdicts", self._since_s[who], f"{words}: {hint}", role=str(Role.REWARD), score=1.0)
            for who, words in found.items()
        ]


def _counts(beat: Worker) -> tuple[float, float, float]:
    judged, failed, late = (beat.counters.get(name, 0.0) for name in ("judged", "failed", "late"))
    return judged, failed, late


def _missing(who: Incarnation, judged: float, failed: float, late: float, since_s: float) -> Suspicion:
    share = failed / (judged + failed)
    sentence = (
        f"{share:.0%} of its newest attempts gave no verdict, {late / failed:.0%} of these for lack of time; the limit is "
        f"{MOST_SHARE:.0%}: such responses are left out of their groups"
    )
    return Suspicion(who.worker, "verdicts", since_s, sentence, role=str(Role.REWARD), score=share / MOST_SHARE)


LEDGER: Final = "ledger"
SLOW_MS: Final = 40.0
"""A faster answer is never slow."""
SLOW_TIMES: Final = 4.0
"""An answer is slow if it takes this many times as long as usual."""
HOLD_S: Final = 3.0
"""Answers must be slow for this long before the ledger is named."""
FOLLOWS_S: Final = 10.0
"""For this long after the last slow answers, averages elsewhere still contain them."""
_FEWEST_LOOKS: Final = 3
_FEWEST_WORKERS: Final = 3
_USUAL_S, _SLOW_USUAL_S = 60.0, 1800.0
"""Time constants for updating the usual answer time, normally and while answers are slow."""


class LedgerPace:
    """The usual and the current answer time of the ledger.

    One worker's long wait is its own. If the median wait is several times the usual one, the ledger
    or the way to it is slow. Other slowness follows from that: heartbeats come late, so clocks seem
    to differ, and writes take longer."""

    def __init__(self) -> None:
        self._usual_ms = math.nan
        self._now_ms = math.nan
        self._time_s = math.nan
        self._since_s: float | None = None
        """Since when answers are slow, on the reader's clock."""
        self._last_s = -math.inf
        self._num_slow = 0

    def observe(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        waits_ms = [
            beat.vitals.ledger_rtt_ms
            for beat in beats
            if beat.vitals is not None and beat.vitals.ledger_rtt_ms > 0.0 and is_recent(beat.silent_s)
        ]
        passed_s = now_s - self._time_s
        self._time_s = now_s
        if len(waits_ms) < _FEWEST_WORKERS:
            return []
        self._now_ms = median(waits_ms)
        if math.isnan(self._usual_ms):
            self._usual_ms = self._now_ms
        is_slow = self._now_ms > max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        if passed_s > 0.0:
            share = -math.expm1(-passed_s / (_SLOW_USUAL_S if is_slow else _USUAL_S))
            self._usual_ms += share * (self._now_ms - self._usual_ms)
        if not is_slow:
            if now_s - self._last_s > HOLD_S:
                self._since_s, self._num_slow = None, 0
        else:
            self._since_s = now_s if self._since_s is None else self._since_s
            self._last_s, self._num_slow = now_s, self._num_slow + 1
        if self._since_s is None or now_s - self._since_s < HOLD_S or self._num_slow < _FEWEST_LOOKS:
            return []
        sentence = (
            f"most workers wait {self._now_ms:.0f} ms or longer for its answer; "
            f"{self._usual_ms:.1f} ms is usual, and {max(SLOW_MS, SLOW_TIMES * self._usual_ms):.0f} ms the limit"
        )
        score = self._now_ms / max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        return [Suspicion(LEDGER, "ledger", at_s - (now_s - self._since_s), sentence, score=score)]

    def away(self, now_s: float) -> None:
        self._last_s = now_s

    def explain(self, now_s: float) -> bool:
        """Return whether slow answers may explain other slowness at this moment."""
        return now_s - self._last_s <= FOLLOWS_S
