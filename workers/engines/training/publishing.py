"""How a torch backend, in one process or on ranks, publishes weights and describes itself for the
update log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.schema import RunConfig
from pipeline.preflight.model_folder import read_model_config
from pipeline.preflight.packages import installed
from workers.engines.model import adapter as adapters
from workers.engines.model import weights_file

if TYPE_CHECKING:
    from pipeline.training.live_states import StateLoan
    from pipeline.weights.tensorfile import Publication
    from workers.engines.model.adapter import Adapter


PROBE_TOKENS = 48


def probe_tokens(vocabulary: int, longest: int) -> np.ndarray:
    """Return int32 [PROBE_TOKENS or ``longest``] token ids."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocabulary, size=min(PROBE_TOKENS, longest)).astype(np.int32)


def probe_sample(config: RunConfig) -> TrainingSample:
    folder = read_model_config(config.model.path)
    vocabulary = folder.get("vocab_size") or folder["text_config"]["vocab_size"]
    tokens = probe_tokens(int(vocabulary), config.data.max_prompt_tokens + config.generation.max_response_tokens)
    num_scored = tokens.size - 1
    zeros = np.zeros(num_scored, np.float32)
    return TrainingSample(
        name="probe",
        tokens=tokens,
        prompt_length=1,
        loss_mask=np.ones(num_scored, bool),
        advantages=zeros,
        behavior_logprobs=zeros,
        versions=np.zeros(num_scored, np.int32),
    )


@dataclass(frozen=True, slots=True)
class PublishSettings:
    dtype: str = "float32"
    """Floating-point weights are published as ``float32`` or ``bfloat16``."""
    probe: TrainingSample | None = None
    """Scored with every version, for engines that must prove that they compute the same."""
    digests: bool = True
    """Whether every version is digested as it is written, for the update log."""
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """More that the numbers depend on: the number of ranks, versions of some libraries."""


def publish_settings(config: RunConfig) -> PublishSettings:
    """Return how a run publishes. Only vLLM has its own model code, so only it needs a probe."""
    environment = {"ranks": str(config.learner.ranks)}
    environment |= {"deepspeed": installed("deepspeed") or ""} if config.learner.backend == "deepspeed" else {}
    environment |= {"peft": installed("peft") or ""} if config.learner.lora.rank else {}
    return PublishSettings(
        dtype=config.types.weights,
        probe=probe_sample(config) if config.generation.engine == "vllm" else None,
        digests=config.replay.record,
        device=config.model.device,
        environment=environment,
    )


class TorchPublishing(ABC):
    publishing = PublishSettings()

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]: ...

    def adapter(self) -> Adapter | None:
        """Return the adapter, possibly the live one, or None if all weights are trained."""
        return None

    def base_publication(self) -> Publication | None:
        adapter = self.adapter()
        return None if adapter is None else adapters.publish_base(adapter, dtype=self.publishing.dtype)

    def publication(self, base_digest: str | None = None) -> Publication:
        probe, adapter = self._probe(), self.adapter()
        found = dict[str, bytes]() if self.publishing.digests and adapter is None else None
        if adapter is None or base_digest is None:
            made = weights_file.publish_tensors(self.tensors(), dtype=self.publishing.dtype, probe=probe, digests=found)
        else:
            made = adapters.publish_adapter(adapter, base_digest, probe=probe)
        digests = (lambda: found or {}) if adapter is None else adapter.digests
        return replace(made, begin=self.lend, digests=digests if self.publishing.digests else None)

    def lend(self, loan: StateLoan) -> None:  # noqa: B027 -- copies need no loan
        """Let the weights' next change wait for ``loan``, unless ``tensors`` are copies."""

    def digests(self) -> dict[str, bytes]:
        adapter = self.adapter()
        return weights_file.digest_tensors(self.tensors()) if adapter is None else adapter.digests()

    def environment(self) -> dict[str, str]:
        return weights_file.describe_environment(self.publishing.device) | dict(self.publishing.environment)

    def random_state(self) -> dict[str, bytes]:
        return weights_file.random_state()

    def restore_random_state(self, states: Mapping[str, bytes]) -> None:
        if states:
            weights_file.restore_random_state(states)

    def _probe(self) -> weights_file.ParityProbe | None:
        sample = self.publishing.probe
        if sample is None:
            return None
        (logprobs,) = self.response_logprobs([sample])
        return weights_file.ParityProbe(sample.tokens, logprobs.astype(np.float32))
