"""Emulated engines keep the contracts as far as there is a model behind them. They sample the
tokens that were drawn beforehand, and cost the configured time."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from ops.emulated import OVERRIDES
from ops.emulated.build import generation, training
from ops.emulated.generation import EmulatedEngine, EngineCosts
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.scoring import EmulatedScoring
from ops.emulated.training import EmulatedTraining
from ops.emulated.value import EmulatedValue
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors, view_weights
from pipeline.config.load import load_config
from pipeline.weights.store import write_publication
from protocol.errors import ConfigError, DataError, EngineError, WeightsDamaged, WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason
from tests.rules import make_rule
from tests.workers.engines.generation_contract import GenerationContract, bytes_of, drain, request
from tests.workers.engines.tiny import VOCABULARY, make_samples
from tests.workers.engines.training.through_memory import ThroughMemory, during
from workers.engines.generation.seam import GenerationEngine, SampledWindow, WindowRequest
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueSample

ROOT = Path(__file__).parents[3]
LAW = LengthLaw("lognormal", median_tokens=14.0, tail=0.8)
EMULATED = OVERRIDES[:3]


def weights(version: int) -> Mapping[str, Any]:
    return {TENSOR: make_tensor(f"{version:016x}", 8)}


class TestEmulatedEngine(GenerationContract):
    def bare(
        self,
        *,
        num_slots: int,
        stop: Iterable[int] = (1,),
        kv_policy: Literal["keep", "recompute"] = "keep",
        costs: EngineCosts | None = None,
        lengths: LengthLaw = LAW,
    ) -> GenerationEngine:
        tokens = TokenLaw.of(VOCABULARY, stop)
        return EmulatedEngine(
            num_slots=num_slots, lengths=lengths, tokens=tokens, vocabulary=VOCABULARY, positions=512, costs=costs,
            num_weights=8,
        )  # fmt: skip

    def weights(self, version: int) -> Mapping[str, Any]:
        return weights(version)

    def published(self, version: int) -> np.ndarray:
        return bytes_of(publish_tensors(weights(version).items()))

    def check(self, asked: WindowRequest, window: SampledWindow) -> None:
        """The window is the stretch of the response that was drawn beforehand, and ends where it
        must."""
        super().check(asked, window)
        law, length = TokenLaw.of(VOCABULARY, (1,)), LAW.draw(asked.seed, asked.trajectory)
        begin = asked.response_tokens.size
        end = min(begin + asked.window_tokens, asked.max_response_tokens, length)
        np.testing.assert_array_equal(
            window.tokens, law.tokens(asked.seed, asked.trajectory, begin, end, length=length)
        )
        is_over = FinishReason.LENGTH if end == asked.max_response_tokens else FinishReason.WINDOW
        assert window.finish_reason is (FinishReason.STOP if end == length else is_over)
        assert (window.tokens[-1] == 1) == (end == length)
        assert not (window.tokens[:-1] == 1).any()

    @pytest.mark.parametrize(
        ("window", "limit", "reason", "num"),
        [
            (30, 40, FinishReason.STOP, 9),
            (9, 40, FinishReason.STOP, 9),
            (9, 9, FinishReason.STOP, 9),
            (8, 40, FinishReason.WINDOW, 8),
            (8, 8, FinishReason.LENGTH, 8),
            (30, 8, FinishReason.LENGTH, 8),
        ],
    )
    def test_a_window_ends_by_stop_by_window_or_by_length_and_exactly_there(
        self, start, window: int, limit: int, reason: FinishReason, num: int
    ) -> None:
        engine = start(num_slots=1, lengths=LengthLaw("constant", 9.0, 1.0))
        engine.submit(request(window=window, limit=limit))
        got = drain(engine)[request().trajectory]
        assert (got.finish_reason, got.tokens.size) == (reason, num)

    def test_weights_that_do_not_fit_are_rejected_and_the_old_ones_stay(self, start) -> None:
        engine = start()
        for wrong in ({}, {"other": weights(1)[TENSOR]}, {TENSOR: np.zeros(9, np.float32)}):
            with pytest.raises(WeightsRejected, match="emulated alike"):
                engine.load_weights(wrong, 1)
            assert engine.policy_version == 0

    def test_a_step_takes_a_fixed_time_and_one_for_each_live_slot(self, start, monkeypatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
        costs = EngineCosts(decode_base_s=1.0, decode_slot_s=0.1, prefill_token_s=0.001, weights_load_s=7.0)
        engine = start(num_slots=2, costs=costs, lengths=LengthLaw("constant", 5.0, 1.0))
        assert sum(slept) == pytest.approx(7.0)
        for number in range(3):
            engine.submit(request(number, prompt=[3, 4, 5]))
        drain(engine)
        # two slots for five steps, then the third request alone; two tokens of each prompt are
        # filled in
        assert sum(slept) == pytest.approx(7.0 + 5 * 1.2 + 5 * 1.1 + 3 * 2 * 0.001)
        assert engine.stats().num_decode_steps == 10

    def test_what_the_emulation_itself_takes_is_a_part_of_the_step(self, start, monkeypatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        # a quarter of a second passes after the step's first look
        now = itertools.chain([0.0], itertools.repeat(0.25))
        monkeypatch.setattr(time, "monotonic", lambda: next(now) + sum(slept))
        engine = start(num_slots=1, costs=EngineCosts(decode_base_s=1.0), lengths=LengthLaw("constant", 5.0, 1.0))
        engine.submit(request())
        engine.advance(1)
        assert sum(slept) == pytest.approx(0.75), "a step of 1 s, of which a quarter was over already"


@pytest.mark.parametrize(
    "law", [LengthLaw("lognormal", 900.0, 0.8), LengthLaw("pareto", 900.0, 1.5)], ids=lambda x: x.kind
)
def test_lengths_follow_their_law(law: LengthLaw) -> None:
    drawn = np.array([law.draw(0, TrajectoryId("t", n // 8, n % 8)) for n in range(20_000)])
    for share in (0.1, 0.5, 0.9, 0.99):
        assert np.mean(drawn <= law.quantile(share)) == pytest.approx(share, abs=0.01)
    assert law.quantile(0.5) == pytest.approx(law.median_tokens)


def test_weights_depend_on_every_batch_and_its_order_and_survive_a_checkpoint(tmp_path: Path) -> None:
    one, two = make_samples(4, seed=1), make_samples(4, seed=2)

    def trained(*batches: Any) -> EmulatedTraining:
        backend = EmulatedTraining(num_weights=16)
        for batch in batches:
            assert backend.step(batch, make_rule()).applied
        return backend

    def tensor(backend: EmulatedTraining) -> bytes:
        return dict(backend.tensors())[TENSOR].tobytes()

    states = [
        trained(),
        trained(one),
        trained(one, two),
        trained(two, one),
        trained(one, two, two),
        trained(one[:3], two),
    ]
    assert len({tensor(state) for state in states}) == len(states)
    assert tensor(trained(one, two)) == tensor(states[2])
    states[1].snapshot()(tmp_path)
    resumed = EmulatedTraining(num_weights=16)
    resumed.load(tmp_path)
    resumed.step(two, make_rule())
    assert tensor(resumed) == tensor(states[2])
    with pytest.raises(EngineError, match="0 samples"):
        resumed.step([], make_rule())
    (tmp_path / "emulated.json").write_bytes(b"{")
    with pytest.raises(DataError, match=r"emulated\.json"):
        resumed.load(tmp_path)
    assert tensor(resumed) == tensor(states[2])
    for sample, logprobs in zip(one, resumed.response_logprobs(one), strict=True):
        np.testing.assert_array_equal(logprobs, sample.behavior_logprobs)


def test_emulated_weights_travel_as_a_safetensors_file_and_other_bytes_are_refused(tmp_path: Path) -> None:
    published = publish_tensors(weights(3).items())
    data = np.empty(published.num_bytes, np.uint8)
    write_publication(data, published)
    path = tmp_path / "w.safetensors"
    path.write_bytes(data.tobytes())
    np.testing.assert_array_equal(load_file(path)[TENSOR], weights(3)[TENSOR])
    np.testing.assert_array_equal(view_weights(data)[TENSOR], weights(3)[TENSOR])
    with pytest.raises(WeightsDamaged, match="not a safetensors file"):
        view_weights(np.frombuffer(b"no", np.uint8))


def test_scores_and_values_belong_to_tokens_wherever_a_sequence_is_cut() -> None:
    tokens = np.arange(3, 23, dtype=np.int32)
    for score in (EmulatedScoring().logprobs, EmulatedValue().values):
        whole, early, late = score(
            [ScoringRequest(tokens, 16), ScoringRequest(tokens[:12], 8), ScoringRequest(tokens, 8)]
        )
        assert whole.dtype == np.float32
        np.testing.assert_array_equal(whole, np.concatenate([early, late]))
    assert (EmulatedScoring().logprobs([ScoringRequest(tokens, 16)])[0] < 0).all()


def test_a_value_step_opens_the_gate_and_is_remembered(tmp_path: Path) -> None:
    sample = ValueSample("t.0.0", np.arange(9, dtype=np.int32), 4, np.zeros(5, np.float32), 1.0)
    engine = EmulatedValue()
    assert engine.step([sample]).explained_variance == 1.0
    engine.snapshot()(tmp_path)
    other = EmulatedValue()
    other.load(tmp_path)
    assert other.state == engine.state != EmulatedValue().state
    assert replace(sample, reward=0.0) != sample
    assert engine.step([replace(sample, reward=0.0)]) != other.step([sample])
    assert engine.state != other.state


def test_an_emulated_snapshot_is_of_its_loans_moment_though_a_step_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = ValueSample("t.0.0", np.arange(9, dtype=np.int32), 4, np.zeros(5, np.float32), 1.0)
    policy, critic = EmulatedTraining(num_weights=16), EmulatedValue()
    changes = (lambda: policy.step(make_samples(), make_rule()), lambda: critic.step([sample]))
    fresh = (EmulatedTraining(num_weights=16), EmulatedValue())
    for engine, change, resumed in zip((policy, critic), changes, fresh, strict=True):
        change()
        memory, moment = ThroughMemory(tmp_path / type(engine).__name__), engine.state
        placed, loan = memory.lend(engine)
        during(loan, change, monkeypatch)
        resumed.put_back(memory.read(placed))
        assert resumed.state == moment != engine.state


def test_generators_and_learner_are_emulated_together_or_not_at_all() -> None:
    run_file = [ROOT / "configs/demo.toml"]
    assert load_config(run_file, EMULATED).generation.engine == "ops.emulated.build:generation"
    for half, build in zip(EMULATED[:2], (generation, training), strict=True):
        with pytest.raises(ConfigError, match="set both to emulated ones, or neither"):
            build(load_config(run_file, [half]))


def test_an_emulated_learner_has_no_model_to_adapt() -> None:
    config = load_config([ROOT / "configs/demo.toml"], [*EMULATED, "learner.lora.rank=8"])
    with pytest.raises(ConfigError, match="no model to adapt"):
        training(config)


def test_settings_that_the_emulation_has_not_are_refused() -> None:
    config = load_config([ROOT / "configs/demo.toml"], [*EMULATED, "engines.settings.step_ms=3"])
    with pytest.raises(ConfigError, match=r"(?s)engines\.settings: .*step_ms"):
        training(config)


_PROBE = """
import json, sys
from pathlib import Path
import numpy as np
from pipeline.weights.store import write_publication
from pipeline.config.load import load_config
config = load_config([Path("configs/demo.toml")], json.loads(sys.argv[1]))
import workers.generator.generator, workers.learner.learner, workers.scorers.reference, workers.scorers.value
from pipeline.algorithms import build
from workers.engines import build as engines
build(config)
engine, backend = engines.build_generation_engine(config), engines.build_training_backend(config)
engines.build_scoring_engine(config), engines.build_value_engine(config)
published = backend.publication()
data = np.empty(published.num_bytes, np.uint8)
write_publication(data, published)
engine.load_weights(engine.view_weights(data, Path(sys.argv[2])), 0)
backend.restore_random_state(backend.random_state())
backend.digests(), backend.environment()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("algorithm", ["dapo", "tppo", "vapo"])
def test_emulated_workers_load_no_torch(tmp_path: Path, algorithm: str) -> None:
    settings = [*OVERRIDES, f"algorithm.name={algorithm}", "algorithm.dynamic_sampling=false"]
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(settings), str(tmp_path / "w")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"torch", "transformers"}.isdisjoint(json.loads(done.stdout))
