"""Builds the engines that a configuration names, and imports torch only when it must."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.learning import RewardModelSection
    from pipeline.config.schema import RunConfig
    from workers.engines.generation.seam import GenerationEngine
    from workers.engines.scoring.reward_model import TorchRewardModel
    from workers.engines.scoring.seam import ScoringEngine
    from workers.engines.training.seam import TrainingBackend
    from workers.engines.value.seam import ValueEngine


def build_engine(config: RunConfig, model_path: Path) -> GenerationEngine:
    """Make the generation engine that ``generation.engine`` names, around ``model_path``'s model.

    Raises ConfigError (unknown name, no such device), DataError (no model there) or EngineError
    (the engine cannot serve the model)."""
    match config.generation.engine:
        case "local":
            from workers.engines.generation.local.build import build_local

            return build_local(config, model_path)
        case "vllm":
            from workers.engines.generation.vllm.build import build_vllm

            return build_vllm(config, model_path)
        case "emulated":
            from workers.engines.emulated.build import build_emulated

            return build_emulated(config, model_path)
        case other:
            raise ConfigError(
                f"generation.engine is {other!r}, expected local, vllm or emulated; correct the configuration"
            )


def build_generation_engine(config: RunConfig) -> GenerationEngine:
    """Make the run's generation engine on the start model, which it serves until the first swap. A
    run of recorded responses has a model for its evaluation alone, and without one none."""
    if not config.data.responses:
        return _build_sampling(config)
    from workers.engines.generation.recorded import RecordedEngine

    return RecordedEngine(config.generation.num_slots, _build_sampling(config) if config.has_sampling else None)


def _build_sampling(config: RunConfig) -> GenerationEngine:
    engine = build_engine(config, config.model.path)
    pace = config.emulation
    if config.generation.engine != "emulated" and (pace.decode_base_s or pace.decode_slot_s):
        from workers.engines.emulated.throttled import throttled

        return throttled(engine, decode_base_s=pace.decode_base_s, decode_slot_s=pace.decode_slot_s)
    return engine


def start_weights(config: RunConfig) -> Mapping[str, Any]:
    """Return the start model's weights by name, as a learner publishes its first version. Raises
    ConfigError for an emulated engine, which has no model."""
    if not config.has_sampling:
        return {}
    if config.generation.engine == "emulated":
        raise ConfigError("generation.engine is emulated, which has no model whose responses could be looked at")
    import torch

    from workers.engines.model.loading import load_model, resolve_dtype
    from workers.engines.model.weights_file import PublishedWeights

    model = load_model(config.model.path, resolve_dtype(config.weights.dtype), torch.device("cpu"))
    return PublishedWeights({name: parameter.detach() for name, parameter in model.named_parameters()})


def build_scoring_engine(config: RunConfig) -> ScoringEngine:
    """Make the reference's engine: of ``model.reference_path``, or the start model when absent."""
    if config.reference.backend == "emulated":
        from workers.engines.emulated.build import build_emulated_scoring

        return build_emulated_scoring(config)
    model_path = config.reference_model
    if config.reference.backend == "vllm":
        from workers.engines.scoring.vllm import build_vllm_scoring

        return build_vllm_scoring(config, model_path)
    from workers.engines.scoring.torch import build_scoring

    return build_scoring(config, model_path)


def build_reward_model(config: RewardModelSection) -> TorchRewardModel:
    """Load the reward model that a run's responses are read by."""
    from workers.engines.scoring.reward_model import build_reward

    return build_reward(config)


def build_training_backend(config: RunConfig) -> TrainingBackend:
    """Make the learner's backend on the start model; of ranks, rank 0's once all are there."""
    match config.learner.backend:
        case "emulated":
            from workers.engines.emulated.build import build_emulated_training

            return build_emulated_training(config)
        case "fsdp2" | "deepspeed":
            from workers.engines.training.ranks.build import ranked_training

            return ranked_training(config)[1]
        case "torch":
            from workers.engines.training.torch import build_training

            return build_training(config, config.model.path)


def build_value_engine(config: RunConfig) -> ValueEngine:
    """Make the value worker's engine on ``value.path`` or the start model; of ranks, rank 0's."""
    match config.value.backend:
        case "emulated":
            from workers.engines.emulated.build import build_emulated_value

            return build_emulated_value(config)
        case "fsdp2" | "deepspeed":
            from workers.engines.training.ranks.build import ranked_value

            return ranked_value(config)[1]
        case "torch":
            from workers.engines.value.torch import build_value

            return build_value(config, config.value.path or config.model.path)
