"""Faults that a worker shows by itself, and a slow ledger.

Each sign is a function of the same tracks, and returns what is suspected. A track remembers one
incarnation: its last two readings, how long its main loop and its computation have stood still and
what is usual for them, and its recent refusals and verdicts. Pure: ``now_s`` is monotonic, ``at_s``
wall-clock time. Memory is bounded by the last heartbeats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.state import Worker
from pipeline.process.work import standing_limit_s
from pipeline.runtime.liveness import is_recent
from pipeline.runtime.registry.contract import OTHER_LINKS, FailureReport, WaitingFor
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP, LONGEST_STANDSTILL, STANDSTILL
from pipeline.runtime.registry.waits import LimitKind
from protocol.errors import StepDiffered
from protocol.ids import Incarnation, Role

KNOWN: Final = 5
"""Pieces of progress after which a worker's usual standstills are known."""
_OFTEN, _LONGER = 3, 1.5
"""A standstill is a fault if it is longer than the third longest long one that ended by itself, by this
factor."""
_NO_ANSWER_MS: Final = 1000.0
"""A ledger call this slow, finished or not, explains a standstill."""
_PAUSE_S: Final = 0.05
"""Times of the last piece that differ by less are the same: the clock is read at two moments."""
LOOP_S: Final = 5.0
"""A main loop blocked for this long hangs, unless that is usual for its worker."""
_MOST_LOOPS: Final = 0.3
"""If more than this share of the fleet's loops is blocked, the host is the cause."""
_REFUSALS_S, _VERDICTS_S = 10.0, 60.0
"""Time constants with which refused messages and verdicts fade."""


@dataclass(slots=True)
class _Pauses:
    """Standstills of a process: the current one, and what is usual."""

    still_s: float = 0.0
    num_beats: int = 0
    """Heartbeats that show the current one. A single one comes from a process that was stopped."""
    usual_s: float = 0.0
    long_s: list[float] = field(default_factory=list[float])
    """The longest that were too long but ended by themselves, longest first."""

    def extend(self, still_s: float) -> None:
        self.still_s, self.num_beats = still_s, self.num_beats + 1

    def end(self, limit_s: float) -> None:
        if self.num_beats > 1 and self.still_s > limit_s:
            self.long_s = sorted([*self.long_s, self.still_s], reverse=True)[:_OFTEN]
        elif self.num_beats > 1:
            self.usual_s = max(self.usual_s, self.still_s)
        self.still_s, self.num_beats = 0.0, 0

    @property
    def often_s(self) -> float:
        """What counts as usual because it has happened often."""
        return _LONGER * self.long_s[-1] if len(self.long_s) == _OFTEN else 0.0

    def exceeds(self, limit_s: float) -> bool:
        return self.num_beats > 1 and self.still_s > limit_s


class _Track:
    """One incarnation of a worker. Times of pauses are on its clock."""

    def __init__(self, beat: Worker) -> None:
        self.beat = beat
        self.loop, self.work = _Pauses(), _Pauses()
        self._work_s = 0.0
        self._begun_progress = beat.progress
        self.quarantined_s: float | None = None
        """When it began to refuse the published weights."""
        self.refused: dict[str, float] = {}
        """Recently refused messages, by link."""
        self.verdicts = (0.0, 0.0, 0.0)
        """Recent attempts that gave a verdict, that gave none, and that were late."""
        self.last_right = (0.0, 0.0)
        """Sum of accuracies, and the number of judged responses when it last grew."""

    def read(self, beat: Worker, now_s: float, passed_s: float) -> None:
        before, self.beat = self.beat, beat
        if beat.waiting_for is not WaitingFor.QUARANTINE:
            self.quarantined_s = None
        elif self.quarantined_s is None:
            self.quarantined_s = now_s
        links_before = {link.name: link.refused for link in before.links}
        fading = math.exp(-passed_s / _REFUSALS_S)
        self.refused = {
            link.name: fading * self.refused.get(link.name, 0.0)
            + max(0, link.refused - links_before.get(link.name, link.refused))
            for link in beat.links
            if link.name.partition(">")[2] == beat.who.worker
        }
        if beat.who.role is Role.REWARD:
            self._read_verdicts(before, math.exp(-passed_s / _VERDICTS_S))
        if beat.at_s != before.at_s:
            self._read_loop()
            self._read_work(before)

    def _read_verdicts(self, before: Worker, fading: float) -> None:
        counters = self.beat.counters
        grown = [
            max(0.0, counters.get(name, 0.0) - before.counters.get(name, 0.0)) for name in ("judged", "failed", "late")
        ]
        judged, failed, late = (fading * past + more for past, more in zip(self.verdicts, grown, strict=True))
        self.verdicts = judged, failed, late
        accuracy = counters.get("judged_accuracy", 0.0)
        if accuracy != self.last_right[0]:
            self.last_right = accuracy, counters.get("judged", 0.0)

    def _read_loop(self) -> None:
        beat = self.beat
        lag_s = beat.vitals.loop_lag_ms / 1e3 if beat.vitals is not None else 0.0
        # a loop that turns again reports its late timer once more
        still_s = min(lag_s, beat.at_s - beat.turned_at_s) if beat.turned_at_s else lag_s
        if still_s >= LOOP_S and beat.waiting_for.limit is not LimitKind.START:
            self.loop.extend(still_s)
        else:
            self.loop.end(0.0)

    def _read_work(self, before: Worker) -> None:
        beat = self.beat
        answer_ms = beat.vitals.ledger_rtt_ms if beat.vitals is not None else 0.0
        is_computing = (
            beat.waiting_for is WaitingFor.COMPUTE
            and beat.held > 0
            and beat.moved_at_s > 0.0
            and answer_ms < _NO_ANSWER_MS
        )
        if not is_computing or beat.moved_at_s > before.moved_at_s + _PAUSE_S:
            self.work.end(self.work_limit_s)
        self._work_s = max(self._work_s, beat.work.elapsed_s)
        if is_computing:
            self.work.extend(beat.at_s - beat.moved_at_s)

    @property
    def work_limit_s(self) -> float:
        return max(standing_limit_s(self.work.usual_s, self._work_s), self.work.often_s)

    @property
    def is_known(self) -> bool:
        return self.beat.progress - self._begun_progress >= KNOWN


Tracks = Mapping[str, _Track]
"""By worker."""


class Signs:
    """The signs of one fleet."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._now_s = math.inf
        self._epochs: dict[str, tuple[int, float, float]] = {}
        """Each worker's last epoch, when it was last seen, and when its last heartbeat came."""
        self._reported: frozenset[Incarnation] = frozenset()
        """Failures that are known already."""

    def observe(
        self, now_s: float, at_s: float, beats: Sequence[Worker], failures: Sequence[FailureReport] = ()
    ) -> list[Suspicion]:
        """Take in the last heartbeat of each worker, and the failures that workers reported when they
        left; return what is suspected."""
        passed_s, self._now_s = max(0.0, now_s - self._now_s), now_s
        known, self._tracks = self._tracks, {}
        for beat in beats:
            track = known.get(beat.who.worker)
            if track is None or track.beat.who != beat.who:
                track = _Track(beat)
            self._tracks[beat.who.worker] = track
            track.read(beat, now_s, passed_s)
        signs = (own_reports, quarantines, blocked_loops, mismatches, missing_verdicts, same_verdicts, standing_work)
        return [
            *self._failed(at_s, failures),
            *self._replaced(now_s, at_s, beats),
            *(found for sign in signs for found in sign(self._tracks, now_s, at_s)),
        ]

    def _failed(self, at_s: float, failures: Sequence[FailureReport]) -> list[Suspicion]:
        """Workers that ended with an error of their own. They are not fenced, so a successor's epoch shows
        nothing."""
        new = [one for one in failures if one.who not in self._reported and one.ago_s < TOLD_S]
        self._reported = frozenset(one.who for one in failures)
        return [
            Suspicion(
                one.who.worker,
                _KINDS.get(one.error, "failed"),
                at_s - one.ago_s,
                f"incarnation {one.who.epoch} ended with {one.error}: {one.message}",
                role=str(one.who.role),
                score=1.0,
            )
            for one in new
        ]

    def _replaced(self, now_s: float, at_s: float, beats: Sequence[Worker]) -> list[Suspicion]:
        """Workers that were replaced after a bad end.

        Each registration takes one epoch, and fencing a worker that crashed, froze or hung takes one
        more. So a successor whose epoch is higher by two reveals such an end, however quickly it
        arrived. A worker that drained was not fenced."""
        found = list[Suspicion]()
        for beat in beats:
            epoch, _, beat_s = self._epochs.get(beat.who.worker, (beat.who.epoch, 0.0, 0.0))
            if beat.who.epoch - epoch > 1:
                words = f"incarnation {epoch} ended without a drain and was fenced; {beat.who.epoch} replaced it"
                found.append(_sign(beat, "replaced", at_s - (now_s - beat_s), words))
            self._epochs[beat.who.worker] = beat.who.epoch, now_s, now_s - beat.silent_s
        self._epochs = {worker: seen for worker, seen in self._epochs.items() if now_s - seen[1] <= KEPT_S}
        return found

    def refused_link(self, receiver: str) -> str:
        """Return the link over which nearly all recent refusals of a receiver came, or "": then the link
        or its sender is at fault, not the receiver."""
        track = self._tracks.get(receiver)
        recent = {} if track is None else track.refused
        best = max(recent, key=lambda name: recent[name], default="")
        if not best or best.startswith(OTHER_LINKS) or recent[best] < _FEWEST_REFUSED:
            return ""
        return best if recent[best] >= _MOST_REFUSED * sum(recent.values()) else ""


TOLD_S: Final = 60.0
"""An older failure that an observer reads at its start was already reported by an earlier observer."""
_KINDS: Final = {StepDiffered.__name__: "machine"}
"""Errors with their own kind of incident."""
KEPT_S: Final = 600.0
"""The epoch of a worker that is gone for this long is forgotten."""
_MOST_REFUSED: Final = 0.8
_FEWEST_REFUSED: Final = 2.0


def _sign(beat: Worker, kind: str, since_s: float, sentence: str, score: float = 1.0) -> Suspicion:
    return Suspicion(beat.who.worker, kind, since_s, sentence, role=str(beat.who.role), score=score)


STANDSTILL_S: Final = 8.0
"""Turns of a generator's engine without a token for this long are never a fault."""


def own_reports(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """What workers report: a disk that refuses, an optimiser step refused twice, and an engine that
    stands for longer than its longest standstill so far."""
    for beat in (track.beat for track in tracks.values()):
        if beat.refused:
            yield _sign(beat, "disk", at_s, f"its disk refuses it: {beat.refused}")
        if beat.not_committed:
            yield _sign(beat, "numeric", at_s, beat.not_committed)
        stood_s = beat.counters.get(STANDSTILL, 0.0)
        limit_s = max(STANDSTILL_S, _LONGER * beat.counters.get(LONGEST_STANDSTILL, 0.0))
        if stood_s > limit_s:
            words = f"its engine has returned no token for {stood_s:.0f} s, and no error; the limit is {limit_s:.0f} s"
            yield _sign(beat, "hung", at_s - beat.silent_s - stood_s, words)


QUARANTINED_S: Final = 2.0
"""A version that is replaced while it is read is refused only briefly."""
_MOST_QUARANTINED: Final = 0.5
"""If more than this share of generators finds weights damaged, the learner is at fault."""


def quarantines(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Generators that refuse the published weights, or their learner if most do."""
    since = {
        track: track.quarantined_s
        for track in tracks.values()
        if track.quarantined_s is not None and now_s - track.quarantined_s >= QUARANTINED_S
    }
    num = sum(track.beat.who.role is Role.GENERATOR for track in tracks.values())
    if len(since) > 1 and len(since) > _MOST_QUARANTINED * num:
        beats = [track.beat for track in since]
        names = ", ".join(beat.who.worker for beat in beats)
        sentence = f"{len(since)} generators refuse the weights that it published: {names}"
        evidence = (f"{beats[0].who.worker}: {beats[0].detail}",)
        learner = str(Role.LEARNER)
        return [Suspicion(learner, "quarantine", at_s, sentence, role=learner, score=1.0, evidence=evidence)]
    words = "it refuses the published weights"
    return [
        _sign(track.beat, "quarantine", at_s - (now_s - since_s), f"{words}: {track.beat.detail}")
        for track, since_s in since.items()
    ]


def blocked_loops(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Workers whose main loop is blocked while their heartbeats continue.

    The heartbeat thread measures how late the loop's timer is, and reports the time of its last turn."""
    hung = [track for track in tracks.values() if track.loop.exceeds(track.loop.often_s)]
    if len(hung) > max(1.0, _MOST_LOOPS * len(tracks)):
        return
    for beat, still_s in ((track.beat, track.loop.still_s) for track in hung):
        words = f"its main loop has been blocked for {still_s:.0f} s, while its heartbeats continue"
        since_s = at_s - beat.silent_s - still_s
        yield _sign(beat, "hung", since_s, f"{words}; the limit is {LOOP_S:g} s", still_s / LOOP_S)


def standing_work(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Work that stalls on a worker without peers while its heartbeats continue.

    A heartbeat has the time of the last finished piece of work, such as the layer of a pass. The
    learner has no peers to be compared with, so its own past sets the limit: 6 s, twice its longest
    pause that was not a finding, 1.5 times the third longest that was one, and a tenth of its
    longest task, since a restart costs all of that task. First computations, which may compile, do not
    count, nor does time in which the ledger does not answer."""
    members = Counter(track.beat.who.role for track in tracks.values())
    for track in tracks.values():
        beat, still_s, limit_s = track.beat, track.work.still_s, track.work_limit_s
        if members[beat.who.role] == 1 and track.is_known and track.work.exceeds(limit_s):
            words = f"its computation has made no progress for {still_s:.0f} s, while its heartbeats continue"
            words += f"; the limit is {limit_s:.0f} s, from its own past"
            yield _sign(beat, "hung", at_s - beat.silent_s - still_s, words, still_s / limit_s)


MOST_NATS: Final = 0.3
"""Excess of the gap over the peers', in nats per token, that two healthy engines may have."""
MOST_TIMES: Final = 3.0
"""The same, as a multiple of the peers' gap."""


def mismatches(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Generators whose tokens do not come from the policy, by the learner's check of log-probs.

    The learner reports the mean gap of each generator's newest chunks and that of its peers at the
    same lags (``workers.learner.logprob_check``). A gap must exceed both limits."""
    for counters in (track.beat.counters for track in tracks.values()):
        for name, gap in counters.items():
            worker = name.removeprefix(LOGPROB_GAP)
            usual = counters.get(LOGPROB_USUAL_GAP + worker)
            if worker == name or worker not in tracks or usual is None:
                continue
            if gap - usual > MOST_NATS and gap > MOST_TIMES * usual:
                words = f"its log-probs differ from the learner's by {gap:.2g} nats per token, those of its peers by "
                words += f"{usual:.2g}; the limit is {MOST_NATS:g} more, and {MOST_TIMES:g} times theirs"
                yield _sign(tracks[worker].beat, "mismatch", at_s, words, (gap - usual) / MOST_NATS)


MOST_SHARE: Final = 0.1
"""Share of recent attempts that may yield no verdict."""
FEWEST: Final = 5.0
"""With fewer failed attempts no worker is named."""
SAME_VERDICTS: Final = 512
"""Responses in a row that were all wrong, or all right since the worker's start."""


def missing_verdicts(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Reward workers whose verifiers often give no verdict, because they are late or fail.

    A response without a verdict is retried, and then left out of its group. If many attempts fail,
    the verifier or what it calls is at fault, and training loses these responses."""
    for track in tracks.values():
        judged, failed, late = track.verdicts
        if failed >= FEWEST and failed > MOST_SHARE * (judged + failed):
            share = failed / (judged + failed)
            words = f"{share:.0%} of its newest attempts gave no verdict, {late / failed:.0%} of these for lack of time"
            words += f"; the limit is {MOST_SHARE:.0%}: such responses are left out of their groups"
            yield _sign(track.beat, "verdicts", at_s, words, share / MOST_SHARE)


def same_verdicts(tracks: Tracks, now_s: float, at_s: float) -> Iterable[Suspicion]:
    """Reward workers that find everything wrong, or everything right from the start.

    A model that has learned its task is right all the time, too, but was not from the start."""
    for track in tracks.values():
        if track.beat.who.role is not Role.REWARD:
            continue
        judged = track.beat.counters.get("judged", 0.0)
        accuracy, judged_then = track.last_right
        if judged - judged_then >= SAME_VERDICTS:
            found = f"each of the last {judged - judged_then:,.0f} responses was wrong"
        elif judged >= SAME_VERDICTS and accuracy == judged:
            found = f"each of {judged:,.0f} responses was right"
        else:
            continue
        hint = "look at `headrace samples`, and fix data.verifier or use other prompts"
        yield _sign(track.beat, "verdicts", at_s, f"{found}: {hint}")


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
        now_ms = median(waits_ms)
        if math.isnan(self._usual_ms):
            self._usual_ms = now_ms
        is_slow = now_ms > max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        if passed_s > 0.0:
            share = -math.expm1(-passed_s / (_SLOW_USUAL_S if is_slow else _USUAL_S))
            self._usual_ms += share * (now_ms - self._usual_ms)
        if is_slow:
            self._since_s = now_s if self._since_s is None else self._since_s
            self._last_s, self._num_slow = now_s, self._num_slow + 1
        elif now_s - self._last_s > HOLD_S:
            self._since_s, self._num_slow = None, 0
        if self._since_s is None or now_s - self._since_s < HOLD_S or self._num_slow < _FEWEST_LOOKS:
            return []
        limit_ms = max(SLOW_MS, SLOW_TIMES * self._usual_ms)
        sentence = (
            f"most workers wait {now_ms:.0f} ms or longer for its answer; {self._usual_ms:.1f} ms is usual, and "
            f"{limit_ms:.0f} ms the limit"
        )
        return [Suspicion(LEDGER, "ledger", at_s - (now_s - self._since_s), sentence, score=now_ms / limit_ms)]

    def away(self, now_s: float) -> None:
        self._last_s = now_s

    def explain(self, now_s: float) -> bool:
        """Return whether slow answers may explain other slowness at this moment."""
        return now_s - self._last_s <= FOLLOWS_S
