# pyright: reportMissingImports=false
"""Tokens a second of the generation engine, against vLLM's offline ``LLM.generate`` without log-probs.

Each has a process and the device for itself. On a CPU, seconds are processor seconds.

The engine's and the learner's log-probs are compared on the same weights. For tokens that the engine sampled,
d = log p(engine) - log p(learner): the largest and the mean absolute value of d, and the k3 estimate of
KL(engine || learner), the mean of exp(-d) - 1 + d."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ops.bench.gpu.form import Form, Found, run_config
from ops.bench.gpu.learning import sample_of, seconds_of
from ops.bench.gpu.models import write_model
from ops.bench.sampling_work import Work, run_engine
from workers.engines.build import build_generation_engine, build_training_backend
from workers.engines.model.loading import resolve_dtype
from workers.engines.model.weights_file import read_weights, write_weights

MISMATCH = "log-probs, engine against learner"


def make_work(form: Form, seed: int = 0) -> Work:
    """Draw prompts of the form's length, and heavy-tailed response lengths up to the form's longest."""
    rng = np.random.default_rng(seed)
    law = rng.lognormal(np.log(form.response_tokens / 4), 0.8, form.num_sequences)
    lengths = np.clip(law, 2, form.response_tokens).astype(np.int64)
    prompts = rng.integers(3, form.sampled.vocabulary, (form.num_sequences, form.prompt_tokens)).astype(np.int32)
    return Work(list(prompts), lengths)


def offline(form: Form, folder: Path) -> Found:
    """Measure vLLM's own ``LLM.generate``."""
    what = "vLLM's offline generate"
    if form.engine != "vllm":
        yield what, "vllm is not installed"
        return
    from vllm import LLM, SamplingParams

    from workers.engines.generation.vllm.arguments import EXTENSION, arguments_of

    model = _write(form, folder)
    arguments = arguments_of(run_config(form, model), model, on_cpu=not form.on_gpu)
    assert arguments.pop("worker_extension_cls") == EXTENSION
    llm = LLM(**arguments)

    def sample(work: Work) -> int:
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in work.lengths.tolist()
        ]
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    yield what, _speed(form, sample)


def engine(form: Form, folder: Path) -> Found:
    """Measure Headrace's engine with whole responses, and in windows; then its log-probs."""
    config = run_config(form, _write(form, folder))
    engine = build_generation_engine(config)
    learner = build_training_backend(config)
    published = folder / "weights.safetensors"
    write_weights(published, learner.tensors(), dtype=form.dtype)
    engine.load_weights(read_weights(published), 0)
    turn = 0
    for what, window in (
        ("whole responses", form.response_tokens),
        ("windows of a quarter", form.response_tokens // 4),
    ):

        def sample(work: Work, window: int = window) -> int:
            nonlocal turn
            turn += 1
            return sum(one.tokens.size for one in run_engine(engine, work, turn, window))

        yield f"Headrace's {form.engine} engine, {what}", _speed(form, sample)
    prompts = make_work(form).prompts[: form.num_slots]
    whole = Work(prompts, np.full(len(prompts), form.response_tokens))
    windows = run_engine(engine, whole, 0, form.response_tokens)
    scored = learner.response_logprobs([
        sample_of(str(one.trajectory), np.concatenate([prompts[one.trajectory.member], one.tokens]), form.prompt_tokens,
                  one.behavior_logprobs, 0.0)
        for one in windows
    ])  # fmt: skip
    engine.close()
    apart = np.concatenate([w.behavior_logprobs - s for w, s in zip(windows, scored, strict=True)]).astype(np.float64)
    most, mean, kl = np.abs(apart).max(), np.abs(apart).mean(), (np.expm1(-apart) + apart).mean()
    yield MISMATCH, {"max_difference": float(most), "mean_difference": float(mean), "kl": float(kl)}


def _write(form: Form, folder: Path) -> Path:
    positions = form.prompt_tokens + form.response_tokens
    return write_model(form.sampled, folder / "model", dtype=resolve_dtype(form.dtype), positions=positions)


def _speed(form: Form, sample: Callable[[Work], int]) -> dict[str, float]:
    """Return the tokens a second of one round, after a few requests that do not count."""
    work, totals = make_work(form), list[int]()
    sample(Work(work.prompts[:8], work.lengths[:8]))
    took = seconds_of(form, lambda: totals.append(sample(work)))
    return {"seconds": took, "tokens_per_s": totals[0] / took}
