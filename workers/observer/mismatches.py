"""Generators whose tokens are not the policy's, by the learner's check of log-probs. Pure; time is
an argument.

The learner computes the log-probs of a share of all chunks again. It reports the mean gap of a
generator's newest ones, and that of its peers at the same lags (``workers.learner.logprob_check``).
A gap is too large beyond both limits: in nats above the peers', and as a multiple of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.incidents.book import Suspicion
from pipeline.runtime.registry.contract import Heartbeat
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.ids import Role

MOST_NATS: Final = 0.3
"""Gap above the peers', in nats a token, that two healthy engines may have."""
MOST_TIMES: Final = 3.0
"""The same as a multiple of the peers' gap."""


class Mismatches:
    """Remembers since when each generator differs. The learner's report bounds its memory."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def look(self, now_s: float, at_s: float, beats: Sequence[Heartbeat]) -> list[Suspicion]:
        """Return the generators whose gaps are too large at this moment.

        Args:
            now_s: monotonic seconds.
            at_s: the same moment by the wall clock.
            beats: the last heartbeat of each worker."""
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
        f"its log-probs differ from the learner's by {gap:.2g} nats a token, those of its peers by {usual:.2g}; "
        f"the limit is {MOST_NATS:g} more, and {MOST_TIMES:g} times theirs"
    )
    score = (gap - usual) / MOST_NATS
    return Suspicion(worker, "mismatch", since_s, sentence, role=str(Role.GENERATOR), score=score)
