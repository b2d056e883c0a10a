"""Padded matrices of the vectors as packed tensors and training samples, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a [B, T] matrix laid end to end, padding included and masked."""

    mask: Tensor
    """bool [B * T]"""
    row_ids: Tensor
    """int64 [B * T]"""
    num_rows: int
    width: int

    @classmethod
    def of(cls, mask: list[list[int]]) -> Rows:
        """Read a mask matrix."""
        matrix = torch.tensor(mask, dtype=torch.bool)
        rows, width = matrix.shape
        return cls(matrix.reshape(-1), torch.arange(rows).repeat_interleave(width), rows, width)

    def flat(self, matrix: list[list[float]], *, grad: bool = False) -> Tensor:
        """Lay a [B, T] matrix end to end, float64."""
        return torch.tensor(matrix, dtype=torch.float64).reshape(-1).requires_grad_(grad)

    def matrix(self, values: Tensor) -> list[list[Any]]:
        """Return [B * T] values as a [B, T] matrix of Python numbers."""
        return values.detach().reshape(self.num_rows, self.width).tolist()

    def mean(self, values: Tensor) -> float:
        """Average over the mask, as a training backend averages a metric."""
        return float(values.detach().double().where(self.mask, torch.zeros(())).sum() / self.mask.sum().clamp(min=1))

    def samples(self, is_imitated: list[bool] | None = None) -> list[TrainingSample]:
        """Return each row as a sample with its mask, after one token of prompt."""
        masks = self.mask.reshape(self.num_rows, self.width).numpy()
        nothing = np.zeros(self.width, dtype=np.float32)
        return [
            TrainingSample(
                name=str(row),
                tokens=np.zeros(1 + self.width, dtype=np.int32),
                prompt_length=1,
                loss_mask=mask,
                advantages=nothing,
                behavior_logprobs=nothing,
                versions=np.zeros(self.width, dtype=np.int32),
                nll_mask=mask if is_imitated is not None and is_imitated[row] else None,
            )
            for row, mask in enumerate(masks)
        ]

    def weights(self, objective: Rule) -> Tensor:
        """Return the loss weight of each token, 0 off the mask."""
        return torch.from_numpy(np.concatenate(objective.token_weights(self.samples())))


def gradient(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the gradient of ``loss`` by each input; zeros where it does not depend on it."""
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
