"""Model-FLOPs utilisation of the learner: the operations of a step over those that the device can do in that time.

The peak is the vendor's figure for dense bf16 if the device is known. Otherwise, and on a CPU, it is the
measured rate of a large matrix product. All samples have the same length, so that packing does not matter."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ops.bench.gpu.form import Form, run_config
from ops.bench.gpu.models import Shape, write_model
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.objective import Objective
from workers.engines.build import build_training_backend
from workers.engines.model.loading import resolve_dtype

ROUNDS = 3
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations a second of SXM boards, by the vendor's data sheets. A device matches if its name contains
the key."""


def learner(form: Form, folder: Path) -> dict[str, float]:
    """Return the utilisation and tokens a second of each of the form's models, and the peak."""
    peak = peak_flops(form)
    figures = {"peak_tflops": peak / 1e12}
    for shape in form.learned:
        seconds = _step_seconds(form, shape, folder / shape.name)
        num = _num_samples(form)
        figures[f"mfu_{shape.name}"] = shape.step_flops(form.prompt_tokens, form.response_tokens, num) / seconds / peak
        figures[f"tokens_per_s_{shape.name}"] = num * (form.prompt_tokens + form.response_tokens) / seconds
    return figures


def peak_flops(form: Form) -> float:
    """Return the operations a second that the device can do."""
    if form.on_gpu:
        name = torch.cuda.get_device_name()
        known = [value for key, value in PEAKS.items() if key in name]
        if known:
            return known[0]
    size = 8192 if form.on_gpu else 1024
    left = torch.randn(size, size, device=form.device, dtype=resolve_dtype(form.dtype))
    seconds: list[float] = []
    for _ in range(10):
        _wait(form)
        started = time.perf_counter()
        torch.mm(left, left)
        _wait(form)
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(seconds)


def _step_seconds(form: Form, shape: Shape, folder: Path) -> float:
    positions = form.prompt_tokens + form.response_tokens
    write_model(shape, folder, dtype=torch.float32, positions=positions)
    config = run_config(form, folder, micro_batch_tokens="auto" if form.on_gpu else 1 << 12)
    # no engine is beside it here
    alone = config.generation.model_copy(update={"device": "cpu"})
    backend = build_training_backend(config.model_copy(update={"generation": alone}))
    samples = make_samples(form, shape)
    seconds: list[float] = []
    for number in range(1 + ROUNDS):
        _wait(form)
        started = time.perf_counter()
        result = backend.step(samples, Objective())
        _wait(form)
        if not result.applied:
            raise RuntimeError(f"a step of the random {shape.name} model was not finite: loss {result.loss}")
        if number:
            seconds.append(time.perf_counter() - started)
    return median(seconds)


def make_samples(form: Form, shape: Shape) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    response = form.response_tokens
    old = np.full(response, -np.log(shape.vocabulary), np.float32)
    return [
        TrainingSample(
            name=f"t.{number}.0",
            tokens=rng.integers(3, shape.vocabulary, form.prompt_tokens + response).astype(np.int32),
            prompt_length=form.prompt_tokens,
            loss_mask=np.ones(response, np.bool_),
            advantages=np.full(response, rng.normal(), np.float32),
            behavior_logprobs=old,
            versions=np.zeros(response, np.int32),
            old_logprobs=old,
        )
        for number in range(_num_samples(form))
    ]


def _num_samples(form: Form) -> int:
    return form.learner_tokens // (form.prompt_tokens + form.response_tokens)


def _wait(form: Form) -> None:
    if form.on_gpu:
        torch.cuda.synchronize()
