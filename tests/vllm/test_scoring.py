"""vLLM as the frozen reference keeps the scoring contract, to 1e-5 nats of transformers' own
forward in fp32."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from transformers import PreTrainedModel

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError, EngineDied, EngineError
from tests.workers.engines.scoring_contract import ScoringContract
from tests.workers.engines.tiny import VOCABULARY, make_samples, tiny_model
from workers.engines.build import build_scoring_engine
from workers.engines.generation.vllm.arguments import scoring_arguments
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.scoring.torch import build_scoring
from workers.engines.scoring.vllm import VllmScoring

# the default is zeroed first
SMALL_CACHE = "reference.vllm.engine_args={block_size=32,num_gpu_blocks_override=100}"


def run_config(model: Path, *overrides: str) -> RunConfig:
    run = model.parent / "run.toml"
    run.write_text(f'model.path = "{model}"\ndata.train = ["x.jsonl"]\n')
    settings = (
        "reference.backend=vllm",
        "reference.always=true",
        SMALL_CACHE,
        "data.max_prompt_tokens=64",
        "generation.window_tokens=64",
        "generation.max_response_tokens=192",
    )
    return load_config([run], (*settings, *overrides))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scoring")


class TestVllmScoring(ScoringContract):
    # of a prompt that is above it vLLM scores a part at a time
    budgets: ClassVar[tuple[int, ...]] = (64, 4096)
    made: ClassVar[dict[str, VllmScoring]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def make_engine(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> VllmScoring:
        """Make an engine once for each model and settings: it takes seconds, and its weights never
        change."""
        key = hashlib.sha256(f"{model.config.to_json_string()}/{temperature}/{micro_batch_tokens}".encode()).hexdigest()
        if key not in self.made:
            model.save_pretrained(self.folder / key)
            config = run_config(self.folder / key, f"reference.micro_batch_tokens={micro_batch_tokens}")
            arguments = scoring_arguments(config, self.folder / key, on_cpu=True)
            self.made[key] = VllmScoring(arguments, vocabulary=VOCABULARY, temperature=temperature)
        return self.made[key]

    def test_a_sequence_of_every_position_is_scored_and_a_longer_one_refused(self) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256)
        tokens = np.random.default_rng(0).integers(2, VOCABULARY, 257).astype(np.int32)
        assert engine.logprobs([ScoringRequest(tokens[:256], 255)])[0].shape == (255,)
        with pytest.raises(EngineError, match="has 257 tokens, the reference scores at most 256"):
            engine.logprobs([ScoringRequest(tokens, 255)])

    def test_a_dead_engine_is_told_from_a_bad_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.make_engine(tiny_model(), temperature=1.0, micro_batch_tokens=256)

        def fail(self: object) -> None:
            raise RuntimeError("the device fell off the bus")

        with monkeypatch.context() as broken:
            broken.setattr(type(engine._engine), "step", fail)
            with pytest.raises(EngineDied, match="fell off the bus"):
                engine.logprobs([ScoringRequest(np.array([2, 3], np.int32), 1)])
        engine._engine.abort_request(["0"])


def test_a_run_s_vllm_reference_agrees_with_its_torch_reference(folder: Path) -> None:
    path = folder / "run-model"
    tiny_model(seed=7).save_pretrained(path)
    config = run_config(path, "generation.temperature=0.8")
    requests = [ScoringRequest(s.tokens, s.response_length) for s in make_samples()]
    ours, theirs = build_scoring_engine(config).logprobs(requests), build_scoring(config, path).logprobs(requests)
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_a_model_that_vllm_does_not_load_is_refused_with_its_reason(folder: Path) -> None:
    path = folder / "no-weights"
    tiny_model().save_pretrained(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"vLLM does not start with .*no-weights"):
        build_scoring_engine(run_config(path))
