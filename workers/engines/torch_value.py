"""The value model in plain torch: a backbone with a scalar head, packed sequences, AdamW.

*Consumes* token sequences to value, and finished responses to learn from. *Produces* values of the states before each response
token, optimiser steps and checkpoints. *Waits for* nothing.

    G_t = gamma^(T - t) R                                              Monte-Carlo targets (lambda_critic = 1, the default)
    loss = 1/n sum_i 1/T_i sum_t max((V - G)^2, (clip(V, V_old - c_low, V_old + c_high) - G)^2) / 2

over the n finished responses of the whole batch (VAPO and T-PPO; T-PPO's port divides by unfinished rows too, which makes the
step smaller when few responses finish: here there are only finished ones). Master weights are fp32 whatever the compute type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.value_loss import clipped_value_loss
from pipeline.algorithms.value_targets import explained_variance, lambda_targets, monte_carlo_targets
from pipeline.batching import plan_micro_batches
from protocol.errors import EngineError
from workers.engines.attention import PACKED_ATTENTION
from workers.engines.models import load_value_model, resolve_device, value_head
from workers.engines.optimizer import GuardedAdamW, OptimizerSettings
from workers.engines.packed import PackedTokens, hidden_packed, prepare_packed
from workers.engines.scoring import ScoringRequest
from workers.engines.training_state import put_model, read_model, read_training_state, snapshot_model
from workers.engines.value import ValueSample, ValueStepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class ValueSettings:
    """How responses go through the value model, and what it is regressed on."""

    micro_batch_tokens: int
    """Prompt and response tokens of one forward; a longer sequence is a forward of its own."""
    gamma: float = 1.0
    """Discount a token."""
    gae_lambda: float = 1.0
    """Of the targets; 1 is Monte-Carlo."""
    clip_low: float = 0.5
    """A value counts as fallen by at most this from the stored one. T-PPO: 0.5."""
    clip_high: float = 0.6
    """... and as risen by at most this. T-PPO: 0.6."""
    autocast: torch.dtype | None = None
    """Type to compute in where it is safe; the weights' own when absent."""


class TorchValue:
    """A value model and its optimiser behind :class:`workers.engines.value.ValueEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ValueSettings,
        optimizer: OptimizerSettings,
        *,
        tokenizer_from: Path | None = None,
    ) -> None:
        """Serve and train ``model``.

        Args:
            model: A token classifier with one output that can be packed; it becomes this engine's own.
            settings: How it is used.
            optimizer: How it is stepped.
            tokenizer_from: Folder whose tokenizer files are copied into every checkpoint.

        Raises:
            EngineError: The model's sequences cannot be packed, or it has no scalar head.
        """
        self._model = prepare_packed(model).eval()  # without dropout: values of one version are the same numbers twice
        self._head = value_head(model)
        self._settings = settings
        self._tokenizer_from = tokenizer_from
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = GuardedAdamW(self._parameters, optimizer)

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        return self._optimizer.num_steps

    @torch.no_grad()
    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return, for each request in order, float32 [num_scored]: V of the state before each token of the tail.

        Raises:
            EngineError: A request has no token before its tail, or the device has no memory for a micro-batch.
        """
        results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(requests)
        for micro in plan_micro_batches([r.tokens.size for r in requests], self._settings.micro_batch_tokens):
            num_scored = [requests[index].num_scored for index in micro]
            with self._memory_errors():
                values = self._forward([requests[index].tokens for index in micro], num_scored)
            tails = np.split(values.to("cpu", torch.float32).numpy(), np.cumsum(num_scored)[:-1])
            for index, tail in zip(micro, tails, strict=True):
                results[index] = tail
        return results

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Do one optimiser step on the whole of ``samples``; nothing changes when loss or gradient is not finite.

        Raises:
            EngineError: There is no sample, one is not consistent, or the device has no memory for a micro-batch.
        """
        if not samples:
            raise EngineError("a value step was asked for on 0 responses; skip it")
        for sample in samples:
            _check(sample)
        try:
            with self._memory_errors():
                totals = self._accumulate(samples)
                step = self._optimizer.step(totals.loss)
        finally:
            self._optimizer.clear()
        return ValueStepResult(
            applied=step.applied,
            loss=totals.loss,
            explained_variance=explained_variance(totals.values, totals.returns, totals.weights),
            clip_fraction=totals.clip_fraction,
            value_mean=float(totals.weights @ totals.values),
            target_mean=float(totals.weights @ totals.returns),
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            num_tokens=sum(int(sample.tokens.size) for sample in samples),
        )

    def snapshot(self) -> Callable[[Path], None]:
        """Copy what an exact resume needs. What is returned writes ``folder/model`` in Hugging Face format and the optimiser
        beside it; it raises OSError, and may run on another thread while this engine goes on."""
        write_model = snapshot_model(self._model, self._tokenizer_from)
        write_optimizer = self._optimizer.snapshot()

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder)
            write_optimizer(folder)

        return write

    def load(self, folder: Path) -> None:
        """Take back what a snapshot wrote: the next step is the one that would have been. Raises DataError naming the file,
        with nothing changed."""
        state = read_training_state(folder)
        weights = read_model(self._model, folder)
        optimizer = self._optimizer.read(folder)
        put_model(self._model, weights)
        self._optimizer.restore(optimizer, state)

    # -- the regression ------------------------------------------------------------------------------------------------

    def _accumulate(self, samples: Sequence[ValueSample]) -> _Totals:
        """Add the gradient of the whole batch's loss to the parameters' ``grad``."""
        settings = self._settings
        lengths = [sample.response_length for sample in samples]
        returns = [monte_carlo_targets(s.reward, s.response_length, gamma=settings.gamma) for s in samples]
        targets = [
            lambda_targets(s.reward, s.old_values, gamma=settings.gamma, lam=settings.gae_lambda) for s in samples
        ]
        values: list[np.ndarray] = [np.empty(0)] * len(samples)
        loss = torch.zeros((), dtype=torch.float64, device=self._model.device)
        clipped = torch.zeros_like(loss)
        for micro in plan_micro_batches([sample.tokens.size for sample in samples], settings.micro_batch_tokens):
            num_scored = [lengths[index] for index in micro]
            new = self._forward([samples[index].tokens for index in micro], num_scored)

            def like(arrays: Sequence[np.ndarray], new: torch.Tensor = new) -> torch.Tensor:
                return torch.from_numpy(np.concatenate(arrays)).to(new)

            token = clipped_value_loss(
                new,
                like([samples[index].old_values for index in micro]),
                like([targets[index] for index in micro]),
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
            weight = like([_token_weights(lengths[index], len(samples)) for index in micro])
            part = (token.loss * weight).sum()
            part.backward()
            loss += part.detach()
            clipped += (token.clipped * weight).sum()
            tails = np.split(new.detach().to("cpu", torch.float64).numpy(), np.cumsum(num_scored)[:-1])
            for index, tail in zip(micro, tails, strict=True):
                values[index] = tail
        return _Totals(
            loss=float(loss),
            clip_fraction=float(clipped),
            values=np.concatenate(values),
            returns=np.concatenate(returns),
            weights=np.concatenate([_token_weights(length, len(samples)) for length in lengths]),
        )

    def _forward(self, sequences: Sequence[np.ndarray], num_scored: Sequence[int]) -> torch.Tensor:
        """Return V of the state before each scored token, end to end: [M], float32 (float64 for a float64 model)."""
        device = self._model.device
        batch = PackedTokens.of(sequences, num_scored, device)
        context: AbstractContextManager[object] = nullcontext()
        if self._settings.autocast is not None:
            context = torch.autocast(device.type, dtype=self._settings.autocast)
        with context:
            hidden = hidden_packed(self._model, batch)
            values = self._head(hidden.index_select(0, batch.positions)).squeeze(-1)
        return values if values.dtype == torch.float64 else values.float()

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Let a device that is full be the setting that fills it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"no device memory for micro-batches of {self._settings.micro_batch_tokens} tokens: {error}; "
                "lower value.micro_batch_tokens"
            ) from error


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of a whole batch. T is the number of its response tokens."""

    loss: float
    clip_fraction: float
    values: np.ndarray
    """float64 [T]"""
    returns: np.ndarray
    """float64 [T]: Monte-Carlo, whatever the targets of the loss are"""
    weights: np.ndarray
    """float64 [T]; they sum to 1."""


def build_value(config: RunConfig, model_path: Path) -> TorchValue:
    """Make the value engine of a run, starting from the folder ``model_path``.

    Raises:
        DataError: The folder holds neither a causal language model nor a value model.
        ConfigError: The device is not here.
    """
    value = config.value
    device = resolve_device(value.device)
    if device.type == "cpu":
        torch.set_num_threads(value.threads)
    return TorchValue(
        load_value_model(model_path, torch.float32, device, PACKED_ATTENTION),
        ValueSettings(
            micro_batch_tokens=value.micro_batch_tokens,
            gamma=config.algorithm.gamma,
            gae_lambda=value.gae_lambda,
            clip_low=value.clip_low,
            clip_high=value.clip_high,
            autocast=torch.bfloat16 if value.dtype == "bfloat16" else None,
        ),
        OptimizerSettings(
            learning_rate=value.learning_rate,
            warmup_steps=value.warmup_steps,
            weight_decay=value.weight_decay,
            betas=value.betas,
            eps=value.adam_eps,
            max_grad_norm=value.max_grad_norm,
        ),
        tokenizer_from=model_path,
    )


def _token_weights(length: int, num_samples: int) -> np.ndarray:
    """Return float64 [length]: each response weighs 1 / num_samples, each of its tokens the same."""
    return np.full(length, 1.0 / (length * num_samples))


def _check(sample: ValueSample) -> None:
    length = sample.response_length
    if not 1 <= sample.prompt_length < sample.tokens.size:
        raise EngineError(
            f"response {sample.name} has {sample.tokens.size} tokens, of which {sample.prompt_length} are prompt; expected at "
            "least 1 prompt and 1 response token"
        )
    if sample.old_values.shape != (length,):
        raise EngineError(
            f"response {sample.name} has old_values of shape {sample.old_values.shape}; expected ({length},), one a response "
            "token"
        )
