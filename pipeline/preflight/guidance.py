"""Guided prompts of a run: how long they can become, and whether the reference can read them.

The longest one consists of the longest sampled prompt, the template and the longest text. During a
run, a guided prompt that does not fit counts as absent guidance, with the reason, so a run is
refused only if no text at all would fit."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.findings import CheckFinding, fine, warn
from pipeline.preflight.model_folder import longest_context, model_digest, read_model_config
from protocol.errors import ConfigError

_NAME = "guidance"


def load_guided_prompts(config: RunConfig) -> GuidedPrompts:
    """Return the guided prompts of a run's reference, with a version that depends on all weights of
    the model, which are read. Raises ConfigError for a template, DataError for a tokenizer or
    model."""
    has_weights = not config.reference.has_own_engine
    digest = model_digest(config.reference_model, with_weights=has_weights)
    return GuidedPrompts(load_text_tokenizer(config.model.path), config.guidance, model_digest=digest)


def longest_guided(config: RunConfig, prompts: GuidedPrompts, max_text_tokens: int | None = None) -> int:
    """Return the tokens of the longest guided prompt with the longest response. ``max_text_tokens``
    is that of ``GuidedPrompts.longest``."""
    return prompts.longest(config.data.max_prompt_tokens, max_text_tokens) + config.generation.max_response_tokens


def longest_read(config: RunConfig, prompts: GuidedPrompts) -> int | None:
    """Return the most tokens that the run's reference reads at once, or None if there is no limit.

    vLLM reserves room beforehand: for the longest guided prompt, within the model's positions."""
    limit, _ = longest_context(read_model_config(config.reference_model, with_weights=False))
    if config.reference.backend != "vllm":
        return limit
    plain = config.data.max_prompt_tokens + config.generation.max_response_tokens
    longest = max(plain, longest_guided(config, prompts))
    # vLLM needs a position for the token that it samples and discards
    return longest if limit is None else max(plain, min(longest, limit - 1))


def longest_scored(config: RunConfig) -> int:
    """Return the tokens of the longest sequence that a run's vLLM reference has room for. Raises
    ConfigError for a template, DataError for a tokenizer."""
    plain = config.data.max_prompt_tokens + config.generation.max_response_tokens
    if not config.needs_guidance:
        return plain
    prompts = GuidedPrompts(load_text_tokenizer(config.model.path), config.guidance)
    return longest_read(config, prompts) or plain


def check_guidance(config: RunConfig, prompts: GuidedPrompts) -> list[CheckFinding]:
    """Return findings about a run's guided passes. Raises ConfigError if the reference has no room
    for a template with even one token of text."""
    model = config.reference_model
    limit, because = longest_context(read_model_config(model, with_weights=False))
    longest, most = longest_guided(config, prompts), config.guidance.max_judgment_tokens
    if limit is not None and limit < longest_guided(config, prompts, 1):
        raise ConfigError(
            f"a guided prompt with a text of one token and the longest response has {longest_guided(config, prompts, 1)} "
            f"tokens, but {model} {because}: shorten guidance.standard_template and guidance.judge_template, or lower "
            "data.max_prompt_tokens or generation.max_response_tokens"
        )
    found = [
        fine(_NAME, f"guidance: passes of at most {longest:,} tokens; one for a right response, two for a wrong one")
    ]
    if limit is not None and limit < longest:
        found.append(
            warn(
                _NAME,
                f"guidance: texts of {most} tokens with the longest prompt and response make {longest:,}, but {model} "
                f"{because}; what does not fit is left out and counted as guidance_absent",
            )
        )
    if lost := prompts.lost_characters():
        found.append(
            warn(
                _NAME,
                f"guidance: the tokenizer has no token for {' '.join(lost)} of the templates: the model reads them without; "
                "write guidance.standard_template and guidance.judge_template in characters that it knows",
            )
        )
    return found
