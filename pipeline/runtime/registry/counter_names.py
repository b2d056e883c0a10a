"""Names of counters in heartbeats that several parts read."""

from __future__ import annotations

from typing import Final

LOGPROB_GAP: Final = "logprob_gap:"
"""Begin of counters of the learner: a generator's name follows. Mean of |log p of the learner - log
p of the generator| over the tokens of its newest checked chunks, in nats."""
JUDGMENTS_ABSENT: Final = "judgments_absent_"
"""Begin of counters of a reward worker: the reason follows. Wrong responses without a judgment."""
LOGPROB_USUAL_GAP: Final = "logprob_usual_gap:"
"""The same of other generators' chunks, at the same lags in versions."""
STANDSTILL: Final = "standstill_s"
"""Counter of a generator: seconds of the newest turns of its engine without a token, in a row."""
LONGEST_STANDSTILL: Final = "longest_standstill_s"
"""The longest such time that tokens have ended."""
