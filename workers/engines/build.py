"""Builds the engines that a configuration names, and imports torch only if needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config.import_path import import_own
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.config.training import RewardModelSection
    from workers.engines.generation.seam import GenerationEngine
    from workers.engines.scoring.seam import ScoringEngine
    from workers.engines.scoring.torch import TorchRewardModel
    from workers.engines.training.seam import TrainingBackend
    from workers.engines.value.seam import ValueEngine


def build_engine(config: RunConfig) -> GenerationEngine:
    """Build the generation engine that ``generation.engine`` names, around the start model.

    Raises ConfigError (nothing at the import path, no such device), DataError (no model there) or
    EngineError (the engine cannot serve the model)."""
    match config.generation.engine:
        case "local":
            from workers.engines.generation.local.engine import build_local

            return build_local(config, config.model.path)
        case "vllm":
            from workers.engines.generation.vllm.build import build_vllm

            return build_vllm(config, config.model.path)
        case own:
            return _make_own("generation.engine", own, config)


def build_generation_engine(config: RunConfig) -> GenerationEngine:
    """Build the run's generation engine on the start model, which it serves until the first swap.

    A run of recorded responses uses a model only for evaluation, and has none without it."""
    if not config.data.responses:
        return build_engine(config)
    from workers.engines.generation.recorded import RecordedEngine

    return RecordedEngine(config.generation.num_slots, build_engine(config) if config.has_sampling else None)


def start_weights(config: RunConfig) -> Mapping[str, Any]:
    """Return the start model's weights by name, as a learner publishes its first version.

    Raises ConfigError for a custom learner backend, which alone knows its weights."""
    if not config.has_sampling:
        return {}
    if config.learner.has_own_engine:
        raise ConfigError(
            f"learner.backend is {config.learner.backend}, and only that code knows its first weights; expected torch, fsdp2, "
            "deepspeed or pipeline"
        )
    import torch

    from workers.engines.model.loading import load_model, resolve_dtype
    from workers.engines.model.weights_file import PublishedWeights

    model = load_model(config.model.path, resolve_dtype(config.types.weights), torch.device("cpu"))
    return PublishedWeights({name: parameter.detach() for name, parameter in model.named_parameters()})


def build_scoring_engine(config: RunConfig) -> ScoringEngine:
    match config.reference.backend:
        case "torch":
            from workers.engines.scoring.torch import build_scoring

            return build_scoring(config, config.reference_model)
        case "vllm":
            from workers.engines.scoring.vllm import build_vllm_scoring

            return build_vllm_scoring(config, config.reference_model)
        case own:
            return _make_own("reference.backend", own, config)


def build_reward_model(config: RewardModelSection) -> TorchRewardModel:
    from workers.engines.scoring.torch import build_reward

    return build_reward(config)


def build_training_backend(config: RunConfig) -> TrainingBackend:
    """Build the learner's backend on the start model; with ranks, rank 0's, once all have joined."""
    match config.learner.backend:
        case "fsdp2" | "deepspeed" | "pipeline":
            from workers.engines.training.ranks.build import ranked_training

            return ranked_training(config)[1]
        case "torch":
            from workers.engines.training.torch import build_training

            return build_training(config, config.model.path)
        case own:
            return _make_own("learner.backend", own, config)


def build_value_engine(config: RunConfig) -> ValueEngine:
    """Build the value worker's engine on ``value.path`` or the start model; with ranks, rank 0's."""
    match config.value.backend:
        case "fsdp2" | "deepspeed":
            from workers.engines.training.ranks.build import ranked_value

            return ranked_value(config)[1]
        case "torch":
            from workers.engines.value.torch import build_value

            return build_value(config, config.value.path or config.model.path)
        case own:
            return _make_own("value.backend", own, config)


def _make_own(setting: str, path: str, config: RunConfig) -> Any:
    """Call the function at an import path with the configuration. Raises ConfigError if there is
    none."""
    make = import_own(setting, path)
    if not callable(make):
        raise ConfigError(
            f"{setting} {path!r} is {make!r}; expected a function of the configuration that returns an engine"
        )
    return make(config)
