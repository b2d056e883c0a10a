"""Minder's denoiser, small: a variational autoencoder of windows, with an LSTM on each side, one
model a metric.

The models of all metrics are one batch of matrices, so that they train and run at once, and share
nothing. Hidden size 4, latent size 8, windows of 8 ticks: Minder, section 4 (NSDI 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from ops.bench.watch.baselines import STEP_TICKS, WINDOW_TICKS
from ops.bench.watch.cases import BENIGN, FLEETS, WINDOW_S, Case
from ops.bench.watch.fleets import open_fleet
from ops.bench.watch.levels import Floats, Levels, roles_of

METRICS: Final = (
    "tokens_per_s", "service_ratio", "done", "cpu", "gpu_util", "gpu_power_w", "oldest_age_s", "input_depth",
    "loop_lag_ms", "rss_bytes", "ledger_rtt_ms", "errors", "retries", "version_lag",
)  # fmt: skip
"""Metrics that both fleets have."""
HIDDEN, LATENT = 4, 8
_TRAIN_SIZE, _TRAIN_WINDOWS = 32, 6
_STEPS, _BATCH, _RATE = 800, 128, 0.01
_KL_WEIGHT = 1e-4


class Denoisers(nn.Module):
    """One autoencoder a metric."""

    def __init__(self, num_metrics: int) -> None:
        super().__init__()

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(num_metrics, *shape) / math.sqrt(shape[0]))

        def zeros(size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(num_metrics, 1, size))

        self.encode_input, self.encode_state, self.encode_bias = (
            matrix(1, 4 * HIDDEN),
            matrix(HIDDEN, 4 * HIDDEN),
            zeros(4 * HIDDEN),
        )
        self.decode_input, self.decode_state, self.decode_bias = (
            matrix(LATENT, 4 * HIDDEN),
            matrix(HIDDEN, 4 * HIDDEN),
            zeros(4 * HIDDEN),
        )
        self.mean, self.mean_bias = matrix(HIDDEN, LATENT), zeros(LATENT)
        self.spread, self.spread_bias = matrix(HIDDEN, LATENT), zeros(LATENT)
        self.out, self.out_bias = matrix(HIDDEN, 1), zeros(1)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstructions, latent means and logarithms of variances of [metrics, windows,
        ticks]. In training the latent is sampled."""
        inputs = [windows[:, :, tick : tick + 1] @ self.encode_input for tick in range(windows.shape[2])]
        state = self._lstm(inputs, self.encode_state, self.encode_bias)[-1]
        mean = state @ self.mean + self.mean_bias
        spread = (state @ self.spread + self.spread_bias).clamp(-8.0, 4.0)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * spread) if self.training else mean
        given = latent @ self.decode_input
        states = self._lstm([given] * windows.shape[2], self.decode_state, self.decode_bias)
        return torch.cat([state @ self.out + self.out_bias for state in states], dim=2), mean, spread

    @staticmethod
    def _lstm(inputs: Sequence[Tensor], weights: Tensor, bias: Tensor) -> list[Tensor]:
        hidden = cell = inputs[0].new_zeros(*inputs[0].shape[:2], HIDDEN)
        states: list[Tensor] = []
        for given in inputs:
            gates = given + hidden @ weights + bias
            keep, write, read, new = gates.chunk(4, dim=2)
            cell = torch.sigmoid(keep + 1.0) * cell + torch.sigmoid(write) * torch.tanh(new)
            hidden = torch.sigmoid(read) * torch.tanh(cell)
            states.append(hidden)
        return states


def train(
    num_steps: int = _STEPS, seed: int = 0, num_windows: int = _TRAIN_WINDOWS, ticks: int = WINDOW_S
) -> tuple[Denoisers, float]:
    """Return models trained on benign development windows, and their mean squared error on the
    last hundred batches. Needs half a minute."""
    data = torch.from_numpy(np.concatenate(list(_training_windows(num_windows, ticks)), axis=1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = Denoisers(len(METRICS))
        optimizer = torch.optim.Adam(models.parameters(), lr=_RATE)
        errors: list[float] = []
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))
            batch = data[:, torch.randint(data.shape[1], (_BATCH,))]
            rebuilt, mean, spread = models(batch)
            # the sum over metrics: each model has its own parameters and gradient
            error = (rebuilt - batch).square().mean(dim=(1, 2)).sum()
            divergence = -0.5 * (1.0 + spread - mean.square() - spread.exp()).mean(dim=(1, 2)).sum()
            optimizer.zero_grad()
            (error + _KL_WEIGHT * divergence).backward()
            optimizer.step()
            errors.append(float(error.detach()) / len(METRICS))
    return models.eval(), float(np.mean(errors[-100:]))


def _training_windows(number: int, ticks: int) -> Iterator[Floats]:
    for index in range(number):
        levels = Levels(WINDOW_TICKS, METRICS)
        fleet = open_fleet(Case("dev", FLEETS[index % 2], _TRAIN_SIZE, BENIGN, 1000 + index))
        for tick, frame in enumerate(islice(fleet.frames(), ticks)):
            levels.add(frame)
            if not levels.is_full() or tick % (5 * STEP_TICKS):
                continue
            for places in roles_of(frame).values():
                if len(places) >= 2:
                    window = levels.window(places)
                    low, high = window.min(axis=(0, 1)), window.max(axis=(0, 1))
                    yield ((window - low) / np.maximum(high - low, 1e-9)).transpose(2, 1, 0).astype(np.float32)


class Denoise:
    """Denoises windows of metrics with trained models."""

    def __init__(self, models: Denoisers) -> None:
        self._models = models

    def __call__(self, windows: Floats, metrics: tuple[str, ...]) -> Floats:
        """Return [ticks, workers, metrics] of ``METRICS`` without noise."""
        if metrics != METRICS:
            raise ValueError(f"metrics are {metrics}; these models are of {METRICS}")
        with torch.no_grad():
            rebuilt, _, _ = self._models(
                torch.from_numpy(np.ascontiguousarray(windows.transpose(2, 1, 0), dtype=np.float32))
            )
        return rebuilt.numpy().transpose(2, 1, 0)
