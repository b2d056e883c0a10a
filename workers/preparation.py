"""The parts that a standby makes beforehand, and the trial of each: one short forward pass.

Made are the slow ones: models on their engines, and prompts. Mailboxes, links, verifier processes
and all that needs an incarnation are made by the worker that the standby becomes.

An emulated engine computes nothing, so there is nothing to try."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.guidance import load_guided_prompts
from pipeline.runtime.threads import threads_of
from protocol.errors import EngineError
from protocol.ids import Role, TrajectoryId
from workers.engines.build import (
    build_generation_engine,
    build_reward_model,
    build_scoring_engine,
    build_training_backend,
    build_value_engine,
)
from workers.engines.generation.seam import GenerationEngine, SamplingParams, WindowRequest
from workers.engines.scoring.seam import ScoringEngine, ScoringRequest
from workers.engines.value.seam import ValueEngine
from workers.imported import imports

_TRIAL = TrajectoryId("e999999999999999", 0, 0)
"""No run has such an evaluation."""
_TRIAL_TOKENS = 2
_MAX_TRIAL_STEPS = 100


def prepare(config: RunConfig, roles: Sequence[Role]) -> dict[str, Any]:
    """Import what workers of these roles import, make their parts, and try them; return the parts
    by the names under which actors take them.

    Raises EngineError when an engine fails its trial, and what making a part raises."""
    for module in imports(config, roles):
        importlib.import_module(module)
    parts: dict[str, Any] = {}
    if Role.GENERATOR in roles or Role.LEARNER in roles:
        parts["prompts"] = PromptSource(config, load_text_tokenizer(config.model.path))
    if Role.GENERATOR in roles:
        parts["generation"] = build_generation_engine(config)
    if Role.REFERENCE in roles:
        parts["reference"] = engine = build_scoring_engine(config)
        _finite("the reference", _logprobs(engine))
        if config.needs_guidance:
            parts["guided prompts"] = load_guided_prompts(config)
    if Role.REWARD in roles and config.reward.model is not None:
        parts["reward model"] = build_reward_model(config.reward.model)
    if Role.VALUE in roles:
        parts["value"] = engine = build_value_engine(config)
        _finite("the value model", _values(engine))
    if Role.LEARNER in roles:
        parts["training"] = build_training_backend(config)
    return parts


def try_generation(engine: GenerationEngine, config: RunConfig) -> None:
    """Sample two tokens with the weights that an engine has. Raises EngineError when their
    log-probs are not finite, or none come."""
    if config.generation.engine == "emulated" or not config.has_sampling:
        return
    request = WindowRequest(
        trajectory=_TRIAL,
        prompt_tokens=np.zeros(1, np.int32),
        response_tokens=np.zeros(0, np.int32),
        window_tokens=_TRIAL_TOKENS,
        max_response_tokens=_TRIAL_TOKENS,
        sampling=SamplingParams(temperature=1.0),
        seed=0,
    )
    engine.submit(request)
    for _ in range(_MAX_TRIAL_STEPS):
        if windows := engine.advance(1):
            _finite("the generation engine", windows[0].behavior_logprobs)
            return
    raise EngineError(f"the generation engine sampled nothing in {_MAX_TRIAL_STEPS} steps")


def give_threads(config: RunConfig, role: Role) -> None:
    """Give torch the threads of this role, where torch is loaded: each engine has set its own."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads_of(config, role))


def _logprobs(engine: ScoringEngine) -> np.ndarray:
    return engine.logprobs([_scored()])[0]


def _values(engine: ValueEngine) -> np.ndarray:
    return engine.values([_scored()])[0]


def _scored() -> ScoringRequest:
    return ScoringRequest(np.zeros(1 + _TRIAL_TOKENS, np.int32), _TRIAL_TOKENS)


def _finite(what: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise EngineError(f"{what} computes numbers that are not finite: {values.tolist()}")
