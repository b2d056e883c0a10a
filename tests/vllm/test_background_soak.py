"""vLLM's processes in the background for a long time: 100,000 requests with cuts and new weights at
random, and fifty updates of the demo (``make test-long``, ``make test-vllm``)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from tests.vllm.cores import BLOCK, POSITIONS
from tests.workers.engines.tiny import VOCABULARY, tiny_model
from workers.engines.generation.seam import SamplingParams
from workers.engines.generation.vllm.arguments import engine_arguments
from workers.engines.generation.vllm.background import BackgroundCore
from workers.engines.generation.vllm.core import CoreRequest, CoreSample
from workers.engines.model.weights_file import PublishedWeights

NUM_REQUESTS = 100_000
NUM_SLOTS = 64
MAX_TOKENS = 8


def save_version(folder: Path, version: int) -> PublishedWeights:
    """Write random weights of the tiny model, as a learner publishes them."""
    tensors = {name: tensor.detach().clone() for name, tensor in tiny_model(seed=version).named_parameters()}
    path = folder / f"{version % 2}.safetensors"
    save_file(tensors, path)
    return PublishedWeights(tensors, path=path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_requests_that_are_added_and_cut_at_random_while_weights_change_all_end_once(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    extra = {"block_size": BLOCK, "num_gpu_blocks_override": 800}
    arguments = engine_arguments(
        tmp_path, num_slots=NUM_SLOTS, positions=POSITIONS, dtype="float32", on_cpu=True, extra=extra
    )
    core, chance = BackgroundCore(arguments), random.Random(0)
    live: dict[str, tuple[CoreRequest, int]] = {}
    version = num_added = num_ended = num_cut = num_split = 0

    def check(sample: CoreSample) -> None:
        nonlocal num_split
        request, first_version = live.pop(sample.name)
        versions = [span_version for span_version, _ in sample.spans]
        assert 1 <= sample.tokens.size <= request.max_tokens
        assert sample.tokens.size == sample.logprobs.size == sum(size for _, size in sample.spans)
        assert np.isfinite(sample.logprobs).all()
        assert (sample.logprobs <= 0.0).all()
        assert versions == sorted(set(versions))
        assert first_version <= versions[0]
        assert versions[-1] <= version
        if sample.is_over:
            assert sample.tokens.size == request.max_tokens
        num_split += len(versions) > 1

    try:
        core.load(save_version(tmp_path, version), version, recompute=False)
        with ThreadPoolExecutor(1) as other_thread:
            while num_ended < NUM_REQUESTS:
                while len(live) < NUM_SLOTS and num_added < NUM_REQUESTS:
                    prompt = np.array(chance.choices(range(VOCABULARY), k=chance.randint(1, 12)), np.int32)
                    request = CoreRequest(
                        name=str(num_added),
                        context=prompt,
                        num_prompt_tokens=prompt.size,
                        max_tokens=chance.randint(1, MAX_TOKENS),
                        sampling=SamplingParams(1.0),
                        stop_token_ids=(),
                        stream=num_added,
                        salt=str(version),
                    )
                    core.add(request)
                    live[request.name] = (request, version)
                    num_added += 1
                samples = core.step(0.02)
                if chance.random() < 0.1 and live:
                    ended = {sample.name for sample in samples}
                    names = chance.sample(sorted(live.keys() - ended), k=min(5, len(live.keys() - ended)))
                    cut = core.cut(names)
                    samples += cut
                    # those that were cut before their first token have no sample
                    for name in set(names) - {sample.name for sample in cut}:
                        del live[name]
                        num_ended += 1
                    num_cut += len(names)
                for sample in samples:
                    check(sample)
                num_ended += len(samples)
                if chance.random() < 0.01:
                    weights = save_version(tmp_path, version + 1)
                    assert weights.path is not None
                    staged = other_thread.submit(core.stage, weights.path, version + 1)
                    if chance.random() < 0.5:
                        staged.result()
                    core.load(weights, version + 1, recompute=chance.random() < 0.5)
                    version += 1
                    staged.result()
        assert not live
        assert core.live == []
        assert core.step(0.5) == []
    finally:
        core.close()
    assert num_cut > NUM_REQUESTS // 200
    assert version > 20
    assert num_split > 100
