"""Rules of sampling: training samples from the distribution whose log-probs the learner computes.

The learner divides all logits by ``generation.temperature``, and computes no more. So temperature
is free in training. Other settings of the distribution are for evaluation alone."""

from __future__ import annotations

from typing import Final

from pipeline.config.evaluating import EvaluationSection
from pipeline.config.running import GenerationSection

_OFF: Final = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Settings that are for evaluation, with the value at which they change nothing."""
_LEAST_OF_VLLM: Final = 0.01
"""vLLM samples at this temperature when a lower one is set, but for 0."""


def check_sampling(generation: GenerationSection, evaluation: EvaluationSection) -> None:
    """Raise ValueError for sampling that the learner's log-probs do not follow, or vLLM changes."""
    for name, off in _OFF.items():
        given = getattr(generation, name)
        if given == off:
            continue
        if name.endswith("penalty"):
            what = "a distribution that depends on how often each token came"
            why = "The learner's log-probs do not depend on it"
        else:
            what = "a truncated distribution"
            why = "The learner computes log-probs of the whole distribution"
        raise ValueError(
            f"generation.{name} is {given:g}, {what}; expected {off} in training. {why}, so its ratios would be wrong. "
            f"Leave it at {off}; evaluation.{name} may be set"
        )
    for what, one in evaluation.named():
        if one.max_response_tokens is not None and one.max_response_tokens > generation.max_response_tokens:
            raise ValueError(
                f"{what}.max_response_tokens is {one.max_response_tokens}, above generation.max_response_tokens "
                f"{generation.max_response_tokens}, for which engines and ledger have room; lower it, or raise "
                "generation.max_response_tokens"
            )
    if generation.engine == "vllm":
        temperatures = {"generation": generation.temperature} | {
            what: one.temperature for what, one in evaluation.named()
        }
        for what, temperature in temperatures.items():
            if 0.0 < temperature < _LEAST_OF_VLLM:
                raise ValueError(
                    f"{what}.temperature is {temperature:g}, and vLLM samples at {_LEAST_OF_VLLM} then; expected at least "
                    f"{_LEAST_OF_VLLM}{', or 0 (greedy)' if what != 'generation' else ''}: raise it"
                )
