"""The learner bench compares steps that compute the same loss; how fast they are is not tested."""

from __future__ import annotations

import pytest

from ops.bench import learner
from ops.bench.learner import PADDED_SIZES, Shape, measure, speedups

LEAST = Shape("least", hidden=32, layers=1, vocabulary=32, num_samples=6)


def test_all_contenders_compute_the_same_loss_and_are_timed_as_often() -> None:
    result = measure(LEAST, rounds=2)
    assert result["seconds"].keys() == {"packed", *learner.rivals()}
    assert all(len(taken) == 2 for taken in result["seconds"].values())
    assert all(difference < 1e-6 for difference in result["loss_differences"].values())
    assert set(result["micro_batches"].values()) <= set(PADDED_SIZES)
    assert speedups(result).keys() == set(learner.rivals())


def test_steps_with_different_losses_are_not_compared(monkeypatch) -> None:
    class Wrong(learner.PaddedStep):
        def step(self, samples, rule):
            return 2.0 * super().step(samples, rule)

    monkeypatch.setattr(learner, "PaddedStep", Wrong)
    monkeypatch.setattr(learner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="must be equal to be compared"):
        measure(LEAST, rounds=1)
