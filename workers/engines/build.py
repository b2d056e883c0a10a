"""From a configuration to the engines that it names: what workers call, so that none of them imports torch before it must.

*Consumes* a run's configuration. *Produces* an engine of the named kind. *Waits for* the disk, while a model loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.preflight.versions import installed
from protocol.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.config.learning import RewardModelSection
    from pipeline.config.schema import RunConfig
    from pipeline.weights.tensorfile import Publication
    from workers.engines.generation.seam import GenerationEngine
    from workers.engines.model.adapter import Adapter
    from workers.engines.model.weights_file import ParityProbe
    from workers.engines.scoring.reward_model import TorchRewardModel
    from workers.engines.scoring.seam import ScoringEngine
    from workers.engines.training.seam import TrainingBackend
    from workers.engines.value.seam import ValueEngine


def build_engine(config: RunConfig, model_path: Path) -> GenerationEngine:
    """Make the generation engine that ``generation.engine`` names, around the model in ``model_path``.

    Raises:
        ConfigError: No engine has that name, or its device is not here.
        DataError: The folder does not hold the model.
        EngineError: The engine cannot serve the model.
    """
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
    """Make the run's generation engine on the start model; it serves from its first published weights on."""
    engine = build_engine(config, config.model.path)
    pace = config.emulation
    if config.generation.engine != "emulated" and (pace.decode_base_s or pace.decode_slot_s):
        from workers.engines.emulated.throttled import ThrottledEngine

        return ThrottledEngine(engine, decode_base_s=pace.decode_base_s, decode_slot_s=pace.decode_slot_s)
    return engine


def build_scoring_engine(config: RunConfig) -> ScoringEngine:
    """Make the engine of the frozen reference policy: ``model.reference_path``, or the start model when absent."""
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
    """Make the learner's backend on the start model; with several ranks, that of rank 0, once the others are there."""
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
    """Make the value worker's engine on ``value.path``, or on the start model when absent; with several ranks, that of rank 0,
    once the others are there."""
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


def publish_weights(
    config: RunConfig, tensors: Iterable[tuple[str, Any]], *, probe: ParityProbe | None = None
) -> Publication:
    """Lay out what the run's training backend yields; see :func:`workers.engines.model.weights_file.publish_tensors`."""
    if config.learner.backend == "emulated":
        from workers.engines.emulated import weights

        return weights.publish_tensors(tensors)
    from workers.engines.model import weights_file

    return weights_file.publish_tensors(tensors, dtype=config.weights.dtype, probe=probe)


def publish_base(config: RunConfig, adapter: Adapter) -> Publication:
    """Lay out the weights below an adapter; see :func:`workers.engines.model.adapter.publish_base`."""
    from workers.engines.model import adapter as adapters

    return adapters.publish_base(adapter, dtype=config.weights.dtype)


def publish_adapter(adapter: Adapter, base_digest: str, *, probe: ParityProbe | None = None) -> Publication:
    """Lay out an adapter; see :func:`workers.engines.model.adapter.publish_adapter`."""
    from workers.engines.model import adapter as adapters

    return adapters.publish_adapter(adapter, base_digest, probe=probe)


def merge_weights(config: RunConfig, adapter: np.ndarray, base: np.ndarray, base_digest: str) -> Publication:
    """Lay out what an adapter makes of its base; see :func:`workers.engines.model.adapter.publish_merged`."""
    from workers.engines.model import adapter as adapters

    return adapters.publish_merged(adapter, base, base_digest, dtype=config.weights.dtype)


def view_weights(config: RunConfig, data: np.ndarray, path: Path) -> Mapping[str, Any]:
    """Return a verified version's tensors for the run's generation engine, which may use them where they lie; see
    :func:`workers.engines.model.weights_file.view_weights`."""
    if config.generation.engine == "emulated":
        from workers.engines.emulated import weights

        return weights.view_weights(data)
    from workers.engines.model import weights_file

    return weights_file.view_weights(data, path=path, is_lasting=True)


def take_probe(config: RunConfig, backend: TrainingBackend) -> ParityProbe | None:
    """Return what the learner computes now, for an engine that must show that it computes the same; see
    :func:`workers.engines.training.parity_probe.take_probe`. None for engines that run the learner's own model code, or
    none."""
    if config.generation.engine != "vllm":
        return None
    from workers.engines.training import parity_probe

    return parity_probe.take_probe(config, backend)


def digest_tensors(config: RunConfig, tensors: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    """Digest what the run's training backend yields; see :func:`workers.engines.model.fingerprint.digest_tensors`."""
    if config.learner.backend == "emulated":
        from workers.engines.emulated import weights

        return weights.digest_tensors(tensors)
    from workers.engines.model import fingerprint

    return fingerprint.digest_tensors(tensors)


def describe_environment(config: RunConfig) -> dict[str, str]:
    """Say what the learner's numbers depend on besides data; see
    :func:`workers.engines.model.fingerprint.describe_environment`."""
    if config.learner.backend == "emulated":
        return {"device": "emulated"}
    from workers.engines.model import fingerprint

    told = fingerprint.describe_environment(config.model.device) | {"ranks": str(config.learner.ranks)}
    told |= {"deepspeed": installed("deepspeed") or ""} if config.learner.backend == "deepspeed" else {}
    return told | ({"peft": installed("peft") or ""} if config.learner.lora.rank else {})


def random_state(config: RunConfig) -> dict[str, bytes]:
    """Return the learner's random streams; see :func:`workers.engines.model.fingerprint.random_state`."""
    if config.learner.backend == "emulated":
        return {}
    from workers.engines.model import fingerprint

    return fingerprint.random_state()


def restore_random_state(states: Mapping[str, bytes]) -> None:
    """Put random streams back, if there are any; see :func:`workers.engines.model.fingerprint.restore_random_state`."""
    if states:
        from workers.engines.model import fingerprint

        fingerprint.restore_random_state(states)
