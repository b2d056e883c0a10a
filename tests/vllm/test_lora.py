"""vLLM serves the adapter that a learner trains by peft: merged on arrival, and held against the
learner's own log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rules import make_rule

pytest.importorskip("peft", reason="peft is not installed: make vllm")

from pipeline.algorithms.batching import TrainingSample
from pipeline.weights.digest import digest_buffer
from pipeline.weights.tensorfile import Publication
from protocol.errors import ParityFailed
from tests.vllm.cores import POSITIONS, CorePool
from tests.workers.engines.generation_contract import drain, request
from tests.workers.engines.model.test_adapter import bytes_of
from tests.workers.engines.subjects import TORCH, Settings
from tests.workers.engines.tiny import VOCABULARY, make_samples, tiny_model
from workers.engines.generation.vllm.engine import VllmEngine
from workers.engines.model.loading import model_state
from workers.engines.model.weights_file import PublishedWeights, read_weights
from workers.engines.training.publishing import PublishSettings, probe_tokens
from workers.engines.training.torch import TorchTraining

SETTINGS = Settings(learning_rate=2e-2, lora_rank=4)


def sample_of(tokens: np.ndarray, response: int) -> TrainingSample:
    """A sample to be scored, with nothing to train on."""
    zeros = np.zeros(response, np.float32)
    return TrainingSample(
        "t.0.0", tokens.astype(np.int32), tokens.size - response, np.zeros(response, np.bool_), zeros, zeros,
        np.zeros(response, np.int32),
    )  # fmt: skip


def learner(*, tied: bool) -> TorchTraining:
    made = TORCH.make(tiny_model(seed=1, hidden_size=128, tie_word_embeddings=tied), SETTINGS)
    assert isinstance(made, TorchTraining)
    tokens = probe_tokens(VOCABULARY, POSITIONS)
    made.publishing = PublishSettings(probe=sample_of(tokens, tokens.size - 1))
    return made


def base_of(trained: TorchTraining) -> np.ndarray:
    publication = trained.base_publication()
    assert publication is not None
    return bytes_of(publication)


def merged(engine: VllmEngine, arrived: Publication, base: np.ndarray, path: Path) -> PublishedWeights:
    """Merge as a generator does, by its engine; return the version as it is loaded."""
    digest = digest_buffer(base)
    path.write_bytes(bytes_of(engine.merge_weights(bytes_of(arrived), base, digest, dtype="float32")).tobytes())
    return read_weights(path)


@pytest.mark.parametrize("tied", [True, False])
def test_what_vllm_samples_has_the_learners_log_probs_at_every_version(
    cores: CorePool, tmp_path: Path, tied: bool
) -> None:
    trained = learner(tied=tied)
    model = tiny_model(seed=1, hidden_size=128, tie_word_embeddings=tied)
    engine = VllmEngine(
        cores.take(model), model_state(model.config), num_slots=4, vocabulary=VOCABULARY, positions=POSITIONS
    )
    base = base_of(trained)
    probes: list[np.ndarray] = []
    for version in range(3):
        weights = merged(engine, trained.publication(digest_buffer(base)), base, tmp_path / f"{version}")
        assert weights.probe is not None
        engine.load_weights(weights, version)
        asked = request(version)
        engine.submit(asked)
        window = drain(engine)[asked.trajectory]
        sampled = np.concatenate([asked.prompt_tokens, window.tokens])
        (expected,) = trained.response_logprobs([sample_of(sampled, window.tokens.size)])
        np.testing.assert_allclose(window.behavior_logprobs, expected, atol=1e-4)
        probes.append(np.array(weights.probe.logprobs))
        assert trained.step(make_samples(seed=version), make_rule()).applied
    assert np.abs(probes[2] - probes[0]).max() > 0.1, "training moved the policy"


def test_an_adapter_merged_by_another_scale_is_refused_before_a_token_leaves(cores: CorePool, tmp_path: Path) -> None:
    trained = learner(tied=True)
    assert trained.step(make_samples(), make_rule()).applied
    model = tiny_model(seed=1, hidden_size=128)
    engine = VllmEngine(
        cores.take(model), model_state(model.config), num_slots=4, vocabulary=VOCABULARY, positions=POSITIONS
    )
    base, adapter = base_of(trained), trained.adapter()
    assert adapter is not None
    trained.adapter = lambda: replace(adapter, scaling=3.0 * adapter.scaling)
    with pytest.raises(ParityFailed, match="differ from the learner's"):
        engine.load_weights(merged(engine, trained.publication(digest_buffer(base)), base, tmp_path / "0"), 0)
