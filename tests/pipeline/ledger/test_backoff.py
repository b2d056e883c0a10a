"""Requests are rare, and yet in time."""

from __future__ import annotations

from pipeline.ledger.pacing import Backoff


def test_each_refusal_doubles_the_pause_up_to_a_limit_and_news_ends_it() -> None:
    backoff = Backoff(least_s=0.02, most_s=0.1)
    assert backoff.may_ask(0.0)
    now, pauses = 100.0, []
    for _ in range(5):
        told = backoff.refused(now)
        pause = next(k / 1000 for k in range(200) if backoff.may_ask(now + k / 1000 + 1e-9))
        assert told == pause
        pauses.append(pause)
        now += pause
    assert pauses == [0.02, 0.04, 0.08, 0.1, 0.1]
    backoff.refused(now)
    backoff.reset()
    assert backoff.may_ask(now)
    backoff.refused(now)
    assert not backoff.may_ask(now + 0.019)
    assert backoff.may_ask(now + 0.021)
