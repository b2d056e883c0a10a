# pyright: reportMissingImports=false
"""Tokens a second of the generation engine, against the fastest way to sample the same without Headrace.

On a GPU each of two processes has the device for itself: one runs vLLM's offline ``LLM.generate`` without
log-probs, the other Headrace's engine. On a CPU both take turns in one process, by processor time
(``ops.bench.vllm_overhead``). Without vLLM the local engine is compared with transformers' ``generate``
(``ops.bench.engine``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from ops.bench.gpu.form import Form, run_config
from ops.bench.gpu.models import write_model
from ops.bench.sampling_work import SHAPES, Work, run_engine

ROUNDS = 3
_ROUNDS_ON_CPU = 9
"""Each takes a third of a second."""


def make_work(form: Form, seed: int = 0) -> Work:
    """Draw prompts of the form's length, and heavy-tailed response lengths up to the form's longest."""
    rng = np.random.default_rng(seed)
    law = rng.lognormal(np.log(form.response_tokens / 4), 0.8, form.num_sequences)
    lengths = np.clip(law, 2, form.response_tokens).astype(np.int64)
    prompts = rng.integers(3, form.sampled.vocabulary, (form.num_sequences, form.prompt_tokens)).astype(np.int32)
    return Work(list(prompts), lengths)


def offline(form: Form, folder: Path) -> dict[str, float]:
    """Measure vLLM's own ``LLM.generate`` on a GPU."""
    from vllm import LLM, SamplingParams

    from workers.engines.generation.vllm.arguments import EXTENSION, arguments_of

    model = _write(form, folder)
    arguments = arguments_of(run_config(form, model), model, on_cpu=False)
    assert arguments.pop("worker_extension_cls") == EXTENSION
    llm = LLM(**arguments)
    work = make_work(form)
    prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts]
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in work.lengths.tolist()
    ]

    def sample() -> int:
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return {"tokens_per_s": _speed(sample)}


def engine(form: Form, folder: Path) -> dict[str, float]:
    """Measure Headrace's engine; on a CPU, its rival too."""
    if not form.on_gpu:
        return _on_cpu(form, folder)
    from workers.engines.build import build_generation_engine
    from workers.engines.model.loading import load_model, resolve_device, resolve_dtype

    model = _write(form, folder)
    engine = build_generation_engine(run_config(form, model))
    weights = load_model(model, resolve_dtype(form.dtype), resolve_device("cpu"))
    engine.load_weights(dict(weights.named_parameters()), 0)
    work, turn = make_work(form), 0

    def sample() -> int:
        nonlocal turn
        turn += 1
        return run_engine(engine, work, turn, form.response_tokens)

    speed = _speed(sample)
    engine.close()
    return {"tokens_per_s": speed}


def _on_cpu(form: Form, folder: Path) -> dict[str, float]:
    if form.engine == "vllm":
        from ops.bench.vllm_overhead import measure

        speeds = measure(SHAPES[0], _ROUNDS_ON_CPU, folder / "model")["tokens_per_s"]
        return {"tokens_per_s": speeds["engine"], "baseline_tokens_per_s": speeds["offline"]}
    from ops.bench.engine import ENGINE, GENERATE
    from ops.bench.engine import measure as measure_local

    result = measure_local(SHAPES[0], _ROUNDS_ON_CPU)
    seconds = {name: median(taken) for name, taken in result["seconds"].items()}
    fastest = min(taken for name, taken in seconds.items() if name.startswith(GENERATE))
    return {
        "tokens_per_s": result["num_tokens"] / seconds[ENGINE],
        "baseline_tokens_per_s": result["num_tokens"] / fastest,
    }


def _write(form: Form, folder: Path) -> Path:
    from workers.engines.model.loading import resolve_dtype

    positions = form.prompt_tokens + form.response_tokens
    return write_model(form.sampled, folder / "model", dtype=resolve_dtype(form.dtype), positions=positions)


def _speed(sample: Callable[[], int]) -> float:
    """Return the median tokens a second of some rounds; the first does not count."""
    sample()
    speeds: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        num_tokens = sample()
        speeds.append(num_tokens / (time.perf_counter() - started))
    return median(speeds)
