"""Engine and learner on the same weights: the difference of their log-probs, and the cost of a
weight update.

The mismatch is of tokens that the engine sampled: d = log p(engine) - log p(learner). The figures
are its largest and mean absolute value, and the k3 estimate of KL(engine || learner), the mean of
exp(-d) - 1 + d. The pause is the time within ``load_weights`` while all slots decode, after the
weights were staged. Its bar is one decode step and a copy of the weights at half of the device's
rate of copying memory."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ops.bench.gpu.form import Form
from ops.bench.gpu.models import write_model
from ops.bench.gpu.settings import run_config
from pipeline.algorithms.batching import TrainingSample
from protocol.ids import TrajectoryId
from workers.engines.build import build_generation_engine, build_training_backend
from workers.engines.generation.seam import GenerationEngine, SampledWindow, SamplingParams, WindowRequest
from workers.engines.model.weights_file import read_weights, write_weights

SWAPS = 5
STEPS = 16
_COPY_BYTES = 1 << 28


def weights(form: Form, folder: Path) -> dict[str, float]:
    """Measure mismatch and pause."""
    positions = form.prompt_tokens + form.response_tokens
    model = write_model(form.sampled, folder / "model", dtype=torch.float32, positions=positions)
    config = run_config(form, model)
    engine, learner = build_generation_engine(config), build_training_backend(config)
    published = folder / "weights.safetensors"
    write_weights(published, learner.tensors(), dtype=form.dtype)
    engine.load_weights(read_weights(published), 0)
    figures = swap(form, engine, published)
    windows = _sample(form, engine)
    scored = learner.response_logprobs([_training_sample(form, window) for window in windows])
    engine.close()
    apart = np.concatenate([w.behavior_logprobs - s for w, s in zip(windows, scored, strict=True)]).astype(np.float64)
    return figures | {
        "max_difference": float(np.abs(apart).max()),
        "mean_difference": float(np.abs(apart).mean()),
        "kl": float((np.expm1(-apart) + apart).mean()),
    }


def swap(form: Form, engine: GenerationEngine, published: Path) -> dict[str, float]:
    """Swap weights in flight, some steps apart; return the median pause, decode step, and the parts
    of the bar."""
    for number in range(form.num_slots):
        engine.submit(_request(form, 1, number))
    # prompts are filled in
    engine.advance(STEPS)
    pauses: list[float] = []
    decoding_s, num_steps = 0.0, 0
    for version in range(1, SWAPS + 1):
        weights = read_weights(published)
        started, steps_before = time.perf_counter(), engine.stats().num_decode_steps
        engine.advance(STEPS)
        decoding_s += time.perf_counter() - started
        num_steps += engine.stats().num_decode_steps - steps_before
        engine.stage_weights(weights, version)
        started = time.perf_counter()
        engine.load_weights(weights, version)
        pauses.append(time.perf_counter() - started)
    engine.cut()
    return {
        "pause_s": median(pauses),
        "decode_step_s": decoding_s / max(1, num_steps),
        "weights_bytes": float(published.stat().st_size),
        "copy_bytes_per_s": copy_rate(form),
    }


def copy_rate(form: Form) -> float:
    """Return bytes a second that the device copies within its memory, the best of some rounds."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=form.device)
    target = torch.empty_like(source)
    rates: list[float] = []
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        if form.on_gpu:
            torch.cuda.synchronize()
        rates.append(_COPY_BYTES / (time.perf_counter() - started))
    return max(rates)


def _sample(form: Form, engine: GenerationEngine) -> list[SampledWindow]:
    for number in range(form.num_slots):
        engine.submit(_request(form, 2, number))
    windows: list[SampledWindow] = []
    while engine.stats().num_live:
        windows += engine.advance(8)
    return windows


def _request(form: Form, group: int, number: int) -> WindowRequest:
    return WindowRequest(
        trajectory=TrajectoryId("t", group, number),
        prompt_tokens=_prompt(form, group, number),
        response_tokens=np.empty(0, np.int32),
        window_tokens=form.response_tokens,
        max_response_tokens=form.response_tokens,
        sampling=SamplingParams(1.0),
        seed=0,
    )


def _prompt(form: Form, group: int, number: int) -> np.ndarray:
    rng = np.random.default_rng((group, number))
    return rng.integers(3, form.sampled.vocabulary, form.prompt_tokens).astype(np.int32)


def _training_sample(form: Form, window: SampledWindow) -> TrainingSample:
    name, num = window.trajectory, window.tokens.size
    return TrainingSample(
        name=str(name),
        tokens=np.concatenate([_prompt(form, name.group, name.member), window.tokens]),
        prompt_length=form.prompt_tokens,
        loss_mask=np.ones(num, np.bool_),
        advantages=np.zeros(num, np.float32),
        behavior_logprobs=window.behavior_logprobs,
        versions=np.zeros(num, np.int32),
    )
