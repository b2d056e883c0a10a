# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The scoring engine on vLLM: a frozen model scores prompts; the one token that vLLM also samples
is discarded.

The caller's thread steps vLLM until all are scored, ``max_num_batched_tokens`` at a time. The
weights are the folder's own and never change. Nothing is cached: a cached prefix has no log-probs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoConfig

from pipeline.preflight.vllm import check_versions
from pipeline.process import work
from protocol.errors import ConfigError, EngineDied, EngineError
from workers.engines.generation.vllm.arguments import scoring_arguments
from workers.engines.generation.vllm.build import prepare_environment
from workers.engines.model.loading import resolve_device
from workers.engines.scoring.seam import ScoringRequest, check_requests

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


class VllmScoring:
    def __init__(self, arguments: Mapping[str, Any], *, vocabulary: int, temperature: float) -> None:
        """Raises ConfigError for a temperature not above 0, or not 1 if vLLM scores this model only
        at 1."""
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}, expected above 0; score greedy sampling at 1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._vocabulary = vocabulary
        # leave room for the token that vLLM samples
        self._longest = int(arguments["max_model_len"]) - 1
        scales = all(self._engine.collective_rpc("headrace_begin", args=(temperature,)))
        if not scales and temperature != 1.0:
            raise ConfigError(
                f"generation.temperature is {temperature}, but vLLM scores {arguments['model']} at temperature 1 only; set "
                "reference.backend to torch"
            )

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Raises as :func:`check_requests`, EngineError for too long a sequence, EngineDied."""
        check_requests(requests, self._vocabulary)
        longest = max((request.tokens.size for request in requests), default=0)
        if longest > self._longest:
            raise EngineError(
                f"a sequence has {longest} tokens, the reference scores at most {self._longest}, the sum of "
                "data.max_prompt_tokens and generation.max_response_tokens; raise one of them"
            )
        params = scoring_params()
        for number, request in enumerate(requests):
            self._engine.add_request(str(number), {"prompt_token_ids": request.tokens.tolist()}, params)
        scored: dict[int, np.ndarray] = {}
        try:
            while self._engine.has_unfinished_requests():
                finished = self._engine.step()
                work.step(len(finished) / len(requests))
                for output in finished:
                    scored[int(output.request_id)] = np.asarray(output.prompt_logprobs.logprobs, np.float32)
        except Exception as error:
            raise EngineDied(f"vLLM failed in scoring: {type(error).__name__}: {error}") from error
        return [scored[number][-request.num_scored :] for number, request in enumerate(requests)]


def scoring_params() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def build_vllm_scoring(config: RunConfig, model_path: Path) -> VllmScoring:
    """Raises ConfigError when vLLM refuses."""
    check_versions()
    on_cpu = resolve_device(config.reference.device).type == "cpu"
    prepare_environment(config.reference.threads, config.reference.vllm.kv_cache_gb, on_cpu=on_cpu)
    hf_config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    try:
        return VllmScoring(
            scoring_arguments(config, model_path, on_cpu=on_cpu),
            vocabulary=int(hf_config.get_text_config().vocab_size),
            temperature=config.training_temperature,
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"vLLM does not start with {model_path}: {type(error).__name__}: {error}; change the model, [reference.vllm], or "
            "set reference.backend to torch"
        ) from error
