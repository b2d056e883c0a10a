"""The difference between the log-probs of engine and learner on the same weights.

For tokens that the engine sampled, d = log p(engine) - log p(learner). The figures are the largest and the mean
absolute value of d, and the k3 estimate of KL(engine || learner), the mean of exp(-d) - 1 + d."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ops.bench.gpu.form import Form, run_config
from ops.bench.gpu.models import write_model
from pipeline.algorithms.batching import TrainingSample
from protocol.ids import TrajectoryId
from workers.engines.build import build_generation_engine, build_training_backend
from workers.engines.generation.seam import GenerationEngine, SampledWindow, SamplingParams, WindowRequest
from workers.engines.model.weights_file import read_weights, write_weights


def mismatch(form: Form, folder: Path) -> dict[str, float]:
    """Sample with the engine, and score the same tokens with the learner."""
    positions = form.prompt_tokens + form.response_tokens
    model = write_model(form.sampled, folder / "model", dtype=torch.float32, positions=positions)
    config = run_config(form, model)
    engine, learner = build_generation_engine(config), build_training_backend(config)
    published = folder / "weights.safetensors"
    write_weights(published, learner.tensors(), dtype=form.dtype)
    engine.load_weights(read_weights(published), 0)
    windows = _sample(form, engine)
    scored = learner.response_logprobs([_training_sample(form, window) for window in windows])
    engine.close()
    apart = np.concatenate([w.behavior_logprobs - s for w, s in zip(windows, scored, strict=True)]).astype(np.float64)
    return {
        "max_difference": float(np.abs(apart).max()),
        "mean_difference": float(np.abs(apart).mean()),
        "kl": float((np.expm1(-apart) + apart).mean()),
    }


def _sample(form: Form, engine: GenerationEngine) -> list[SampledWindow]:
    for number in range(form.num_slots):
        engine.submit(_request(form, number))
    windows: list[SampledWindow] = []
    while engine.stats().num_live:
        windows += engine.advance(8)
    return windows


def _request(form: Form, number: int) -> WindowRequest:
    return WindowRequest(
        trajectory=TrajectoryId("t", 0, number),
        prompt_tokens=_prompt(form, number),
        response_tokens=np.empty(0, np.int32),
        window_tokens=form.response_tokens,
        max_response_tokens=form.response_tokens,
        sampling=SamplingParams(1.0),
        seed=0,
    )


def _prompt(form: Form, number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(3, form.sampled.vocabulary, form.prompt_tokens).astype(np.int32)


def _training_sample(form: Form, window: SampledWindow) -> TrainingSample:
    name, num = window.trajectory, window.tokens.size
    return TrainingSample(
        name=str(name),
        tokens=np.concatenate([_prompt(form, name.member), window.tokens]),
        prompt_length=form.prompt_tokens,
        loss_mask=np.ones(num, np.bool_),
        advantages=np.zeros(num, np.float32),
        behavior_logprobs=window.behavior_logprobs,
        versions=np.zeros(num, np.int32),
    )
