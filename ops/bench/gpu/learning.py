"""A step of the learner, against the loops that a reader would write, and TRL; and the publishing of a version.

MFU (model-FLOPs utilisation) is the operations of a step over those that the device can do in that time. The peak is
the vendor's figure for dense bf16 if the card is known. Otherwise, and on a CPU, it is the measured rate of a large
matrix product. All samples have the same length, so that packing does not matter."""

from __future__ import annotations

import gc
import re
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ops.bench.gpu.form import Form, Found, run_config
from ops.bench.gpu.models import Shape, make_model, write_model
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.dapo import Dapo
from pipeline.config.schema import RunConfig
from pipeline.weights.store import WeightsStore, weights_folder
from workers.engines.build import build_training_backend
from workers.engines.model.loading import resolve_dtype

ROUNDS = 2
PEAKS = {
    "B200": 2250e12, "GH200": 990e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
    "L40S": 362e12, "A100": 312e12, "A10": 125e12, "L4": 121e12,
}  # fmt: skip
"""Dense bf16 operations a second, by the vendor's data sheets; the first that is a word of the device's name."""
_SIZES = (16, 8, 4, 2, 1)
"""Sequences of a rival's micro-batch: the largest that fits."""
_CLIP = (0.8, 1.28)


def learner(shape: Shape, form: Form, folder: Path) -> Found:
    backend = build_training_backend(_alone(form, shape, folder))
    samples = make_samples(form, shape)

    def step() -> float:
        result = backend.step(samples, Dapo.of())
        if not result.applied:
            raise RuntimeError(f"a step of the random {shape.name} model was not finite: loss {result.loss}")
        return result.loss

    figures = timed(form, shape, step)
    there = backend.environment()
    of_step = {"micro_batch": float(there["micro_batch_tokens"]), "compiled": float(there.get("layers") == "compiled")}
    yield f"Headrace's learner, {shape.name}", figures | of_step


def rivals(shape: Shape, form: Form, folder: Path) -> Found:
    """Measure the plain loop, TRL's step, and the loop compiled; each at the largest micro-batch that fits."""
    samples = make_samples(form, shape)

    def loop(size: int) -> Callable[[], float]:
        return PlainLoop(form, shape, samples, size).step

    def compiled(size: int) -> Callable[[], float]:
        return PlainLoop(form, shape, samples, size, compiled=True).step

    def trl(size: int) -> Callable[[], float]:
        from ops.bench.trl_step import TrlStep

        step = TrlStep(make_model(shape, dtype=torch.float32, positions=_length(form)), size)
        return lambda: step.step(samples, Dapo.of())

    yield _fitting(f"plain transformers loop, {shape.name}", form, shape, loop)
    if find_spec("trl") is None:
        yield f"TRL's GRPO step, {shape.name}", "trl is not installed"
    else:
        yield _fitting(f"TRL's GRPO step, {shape.name}", form, shape, trl)
    yield _fitting(f"the same loop compiled, {shape.name}", form, shape, compiled)


class PlainLoop:
    """The step as a reader would write it with transformers: attention by ``sdpa``, logits of responses only, a
    sequence at a time. Compiled are the layers, one by one, and the loss."""

    def __init__(
        self, form: Form, shape: Shape, samples: Sequence[TrainingSample], size: int, *, compiled: bool = False
    ) -> None:
        self._form, self._size = form, size
        model: Any = make_model(shape, dtype=torch.float32, positions=_length(form))
        model.config._attn_implementation = "sdpa"
        self._model, self._loss = model.train(), torch.compile(_loss) if compiled else _loss
        for layer in model.model.layers if compiled else ():
            layer.compile()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
        self._tokens = torch.stack([torch.from_numpy(one.tokens) for one in samples]).long().to(form.device)
        self._advantages = torch.tensor([float(one.advantages[0]) for one in samples], device=form.device)
        self._old = float(samples[0].behavior_logprobs[0])

    def step(self) -> float:
        """Do one optimiser step; return the loss, the mean over all response tokens."""
        model, prompt = self._model, self._form.prompt_tokens
        total = torch.zeros((), device=self._form.device)
        for start in range(0, len(self._tokens), self._size):
            rows = self._tokens[start : start + self._size]
            with torch.autocast(self._form.device, torch.bfloat16, enabled=self._form.on_gpu):
                hidden = model.model(rows, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
                cut = hidden.detach().requires_grad_(True)
                for row, advantage in enumerate(self._advantages[start : start + self._size]):
                    loss = self._loss(cut[row], model.lm_head.weight, rows[row, prompt:], advantage, self._old)
                    loss = loss / self._tokens[:, prompt:].numel()
                    loss.backward()
                    total += loss.detach()
            hidden.backward(cut.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)


def _loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, advantage: torch.Tensor, old: float
) -> torch.Tensor:
    logits = hidden @ head.t()
    logprobs = torch.gather(logits, 1, targets[:, None])[:, 0].float() - torch.logsumexp(logits.float(), -1)
    ratio = torch.exp(logprobs - old)
    return -torch.min(ratio * advantage, ratio.clamp(*_CLIP) * advantage).sum()


def publishing(shape: Shape, form: Form, folder: Path) -> Found:
    """Measure how long the learner waits until a version is laid out, written and digested."""
    config = _alone(form, shape, folder)
    backend, place, settings = (
        build_training_backend(config),
        weights_folder(folder, shared_memory=True),
        config.weights,
    )
    most = settings.max_part_mb << 20
    store = WeightsStore(place, keep=settings.keep, max_part_bytes=most, instead=folder / "weights")
    # until every file is rewritten rather than new: fresh pages are no steady state
    seconds = [
        seconds_of(form, lambda version=version: store.publish(version, backend.publication(None)))
        for version in range(settings.keep + 2 + ROUNDS)
    ]
    store.close()
    shutil.rmtree(place, ignore_errors=True)
    yield f"publishing, {shape.name}: the learner's wait", {"seconds": median(seconds[-ROUNDS:])}


def timed(form: Form, shape: Shape, step: Callable[[], object]) -> dict[str, float]:
    """Return the median seconds of some steps after a first one, and what they come to."""
    if form.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [seconds_of(form, step) for _ in range(1 + ROUNDS)]
    took, num = median(seconds[1:]), _num_samples(form)
    flops = shape.step_flops(form.prompt_tokens, form.response_tokens, num)
    most = (
        torch.cuda.max_memory_allocated() if form.on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    )
    rate, mfu = num * _length(form) / took, flops / took / peak_flops(form)
    return {"seconds": took, "first_s": seconds[0], "tokens_per_s": rate, "mfu": mfu, "peak_gib": most / 2**30}


def peak_flops(form: Form, name: str | None = None) -> float:
    """Return the operations a second that the device can do."""
    if form.on_gpu or name:
        name = name or torch.cuda.get_device_name()
        known = [value for key, value in PEAKS.items() if re.search(rf"\b{key}\b", name) and "MIG" not in name]
        if known:
            return known[0]
    size = 8192 if form.on_gpu else 1024
    left = torch.randn(size, size, device=form.device, dtype=resolve_dtype(form.dtype))
    return 2.0 * size**3 / min(seconds_of(form, lambda: torch.mm(left, left)) for _ in range(10))


def make_samples(form: Form, shape: Shape) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    old = np.full(form.response_tokens, -np.log(shape.vocabulary), np.float32)
    tokens = rng.integers(3, shape.vocabulary, (_num_samples(form), _length(form)), np.int32)
    return [sample_of(f"t.{number}.0", row, form.prompt_tokens, old, rng.normal()) for number, row in enumerate(tokens)]


def sample_of(name: str, tokens: np.ndarray, prompt_length: int, old: np.ndarray, advantage: float) -> TrainingSample:
    """Return a sample of ``tokens``, whose response had the log-probs ``old``."""
    num = old.size
    return TrainingSample(
        name=name, tokens=tokens, prompt_length=prompt_length, loss_mask=np.ones(num, np.bool_),
        advantages=np.full(num, advantage, np.float32), behavior_logprobs=old, versions=np.zeros(num, np.int32),
        old_logprobs=old,
    )  # fmt: skip


def _alone(form: Form, shape: Shape, folder: Path) -> RunConfig:
    """Write a model and return the configuration of a learner on it that has the device for itself."""
    dtype = resolve_dtype(form.dtype)
    config = run_config(form, write_model(shape, folder / "model", dtype=dtype, positions=_length(form)))
    return config.model_copy(update={"generation": config.generation.model_copy(update={"device": "cpu"})})


def _fitting(
    what: str, form: Form, shape: Shape, make: Callable[[int], Callable[[], object]]
) -> tuple[str, dict[str, float] | str]:
    reason = ""
    for size in _SIZES:
        try:
            return what, timed(form, shape, make(size)) | {"sequences": float(size)}
        except torch.OutOfMemoryError as error:
            reason = f"out of memory with one sequence: {error}"
        except Exception as error:  # noqa: BLE001  a rival that cannot run here is a line of the table
            return what, f"{type(error).__name__}: {error}"
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    return what, reason


def _length(form: Form) -> int:
    return form.prompt_tokens + form.response_tokens


def _num_samples(form: Form) -> int:
    return form.learner_tokens // _length(form)


def seconds_of(form: Form, compute: Callable[[], object]) -> float:
    """Return the seconds of a call; on a CPU this process's, which others on the machine do not stretch."""
    clock = time.perf_counter if form.on_gpu else time.process_time
    began = clock()
    compute()
    if form.on_gpu:
        torch.cuda.synchronize()
    return clock() - began
