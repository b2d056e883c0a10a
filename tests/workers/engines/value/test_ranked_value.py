"""The value engine on shares is plain torch's, up to the order of adding; run on two ranks by
test_two_ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from protocol.errors import EngineError
from tests.workers.engines.subjects import RANKED, SPLIT, Subject, forget_followers, make_ranked_value, make_torch_value
from tests.workers.engines.tiny import ragged, tiny_model
from tests.workers.engines.training.through_memory import ThroughMemory, during
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueEngine, ValueSample

SAME = 1e-5
"""Largest difference of a weight to plain torch's after a few steps of 1e-3, from another order of
adding in float32."""


@pytest.fixture(params=[*RANKED, *SPLIT], ids=lambda subject: subject.name)
def ranked(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield request.param
    forget_followers()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    tiny_model().save_pretrained(folder)
    return folder


def samples(seed: int, num: int = 9) -> list[ValueSample]:
    rng = np.random.default_rng(seed)
    return [
        ValueSample(
            f"t.{number}.0",
            tokens,
            tokens.size - response,
            rng.normal(size=response).astype(np.float32),
            float(rng.normal()),
        )
        for number, (tokens, response) in enumerate(ragged(rng, num, longest=40))
    ]


def weights(engine: ValueEngine, folder: Path) -> dict[str, np.ndarray]:
    engine.snapshot()(folder)
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model" / "model.safetensors").items()}


def test_values_and_steps_agree_with_plain_torch_and_checkpoints_go_both_ways(
    ranked: Subject, start: Path, tmp_path: Path
) -> None:
    plain, shared = make_torch_value(start), make_ranked_value(ranked, start)
    requests = [ScoringRequest(sample.tokens, sample.response_length) for sample in samples(7)]
    for seed in range(3):
        for expected, got in zip(plain.values(requests), shared.values(requests), strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, atol=1e-4)
        expected_step, got_step = plain.step(samples(seed)), shared.step(samples(seed))
        assert got_step.applied
        for name in ("loss", "grad_norm", "explained_variance", "clip_fraction", "value_mean", "target_mean"):
            assert getattr(got_step, name) == pytest.approx(getattr(expected_step, name), rel=1e-3, abs=1e-5), name
        assert got_step.learning_rate == expected_step.learning_rate
        assert got_step.num_tokens == expected_step.num_tokens
    shares, whole = weights(shared, tmp_path / "shared"), weights(plain, tmp_path / "plain")
    assert shares.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(shares[name], value, rtol=0, atol=SAME, err_msg=name)
    other = make_ranked_value(ranked, start)
    other.load(tmp_path / "plain")
    plain.load(tmp_path / "shared")
    other.step(samples(3))
    plain.step(samples(3))
    after = weights(other, tmp_path / "other")
    for name, value in weights(plain, tmp_path / "again").items():
        np.testing.assert_allclose(after[name], value, rtol=0, atol=2 * SAME, err_msg=name)


def test_a_snapshot_of_shares_is_of_its_loans_moment_though_a_step_comes_at_once(
    ranked: Subject, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, memory = make_ranked_value(ranked, start), ThroughMemory(tmp_path / "memory")
    engine.step(samples(0))
    moment = weights(engine, tmp_path / "moment")
    placed, loan = memory.lend(engine)
    stepped = during(loan, lambda: engine.step(samples(1)), monkeypatch)
    resumed = make_ranked_value(ranked, start)
    resumed.put_back(memory.read(placed))
    for name, value in weights(resumed, tmp_path / "resumed").items():
        np.testing.assert_array_equal(value, moment[name], err_msg=name)
    assert resumed.step(samples(1)) == stepped


def test_a_response_that_is_not_finite_changes_nothing_on_any_rank(
    ranked: Subject, start: Path, tmp_path: Path
) -> None:
    engine = make_ranked_value(ranked, start)
    engine.step(samples(0))
    before = weights(engine, tmp_path / "before")
    bad = samples(1)
    bad[4].old_values[0] = np.nan
    assert not engine.step(bad).applied
    after = weights(engine, tmp_path / "after")
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_what_cannot_be_valued_is_refused_before_other_ranks_are_told(ranked: Subject, start: Path) -> None:
    engine = make_ranked_value(ranked, start)
    with pytest.raises(EngineError, match="at least one token must precede"):
        engine.values([ScoringRequest(np.arange(4, dtype=np.int32), 4)])
    with pytest.raises(EngineError, match="0 responses"):
        engine.step([])
    assert engine.values([]) == []
