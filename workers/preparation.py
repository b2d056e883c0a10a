"""What workers import, and the slow parts that a standby makes beforehand: engines with their
models, and prompts.

The built-in engines are tried with a short forward pass; a custom generation engine is not. The
worker that the standby becomes creates everything that needs an incarnation: mailboxes, links,
verifier processes.

Parts are made one after another: libraries that load models change the default tensor type of the
whole process, so parallel loads would disturb each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.guidance import load_guided_prompts
from pipeline.process import work
from pipeline.runtime.process_setup import threads_of
from protocol.errors import EngineError
from protocol.headrace import importing
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

ROLES = {
    Role.ENVIRONMENT: "workers.scorers.environment",
    Role.GENERATOR: "workers.generator.generator",
    Role.LEARNER: "workers.learner.learner",
    Role.OBSERVER: "workers.observer.observer",
    Role.REFERENCE: "workers.scorers.reference",
    Role.REWARD: "workers.scorers.reward",
    Role.VALUE: "workers.scorers.value",
}


def imports(config: RunConfig, roles: Collection[Role] = tuple(ROLES)) -> Iterator[str]:
    """Yield the modules that workers of these roles import for a configuration, except vLLM's."""
    yield from (module for role, module in ROLES.items() if role in roles)
    if Role.GENERATOR in roles and config.has_sampling and config.generation.engine == "local":
        yield "workers.engines.generation.local.engine"
    if Role.LEARNER in roles and config.learner.backend == "torch":
        yield "workers.engines.training.torch"
    if Role.REFERENCE in roles and config.has_reference and config.reference.backend == "torch":
        yield "workers.engines.scoring.torch"
    if Role.VALUE in roles and config.declaration.has_critic and config.value.backend == "torch":
        yield "workers.engines.value.torch"
    if Role.REWARD in roles and config.reward.model is not None:
        yield "workers.engines.scoring.torch"


_TRIAL = TrajectoryId("e999999999999999", 0, 0)
"""An evaluation that no run has."""
_TRIAL_TOKENS = 2
_MAX_TRIAL_STEPS = 100


def import_all(config: RunConfig, roles: Sequence[Role]) -> None:
    with importing():
        for module in imports(config, roles):
            importlib.import_module(module)


def prepare(config: RunConfig, roles: Sequence[Role]) -> dict[str, Any]:
    """Make and try the parts of these roles' workers, by the names under which actors take them.

    The end of each part is a piece of work (``pipeline.process.work``). Raises EngineError when an
    engine fails its trial, and whatever making a part raises."""
    parts: dict[str, Any] = {}
    for name, make in _makers(config, roles).items():
        parts[name] = make()
        work.step()
    return parts


def _makers(config: RunConfig, roles: Sequence[Role]) -> dict[str, Callable[[], Any]]:
    makers: dict[str, Callable[[], Any]] = {}
    if Role.GENERATOR in roles or Role.LEARNER in roles:
        makers["prompts"] = lambda: PromptSource(config, load_text_tokenizer(config.model.path))
    if Role.GENERATOR in roles:
        makers["generation"] = lambda: build_generation_engine(config)
    if Role.REFERENCE in roles:
        makers["reference"] = lambda: _tried_reference(config)
        if config.needs_guidance:
            makers["guided prompts"] = lambda: load_guided_prompts(config)
    if Role.REWARD in roles and (model := config.reward.model) is not None:
        makers["reward model"] = lambda: build_reward_model(model)
    if Role.VALUE in roles:
        makers["value"] = lambda: _tried_value(config)
    if Role.LEARNER in roles:
        makers["training"] = lambda: build_training_backend(config)
    return makers


def _tried_reference(config: RunConfig) -> ScoringEngine:
    engine = build_scoring_engine(config)
    check_finite("the reference", engine.logprobs([_scored()])[0])
    return engine


def _tried_value(config: RunConfig) -> ValueEngine:
    engine = build_value_engine(config)
    check_finite("the value model", engine.values([_scored()])[0])
    return engine


def try_generation(engine: GenerationEngine, config: RunConfig) -> None:
    """Sample two tokens. Raises EngineError when none arrive or their log-probs are not finite."""
    if config.generation.has_own_engine or not config.has_sampling:
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
            check_finite("the generation engine", windows[0].behavior_logprobs)
            return
    raise EngineError(f"the generation engine sampled nothing in {_MAX_TRIAL_STEPS} steps")


def give_threads(config: RunConfig, role: Role) -> None:
    """Give torch this role's number of threads, if torch is loaded: each engine has set its own."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads_of(config, role))


def _scored() -> ScoringRequest:
    return ScoringRequest(np.zeros(1 + _TRIAL_TOKENS, np.int32), _TRIAL_TOKENS)


def check_finite(what: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise EngineError(f"{what} computes numbers that are not finite: {values.tolist()}")
