"""Annotated shapes are checked in the tests, and nothing heavy is imported by the light half of the
package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from jaxtyping import TypeCheckError

from pipeline.algorithms.terms.clip import clipped_loss
from pipeline.algorithms.terms.ratio import sequence_ratio
from pipeline.config.learning import ClipSettings


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(TypeCheckError):
        clipped_loss(torch.ones(3), torch.ones(4), ClipSettings())


def test_row_ids_that_are_not_integers_are_refused() -> None:
    ones = torch.ones(3)
    with pytest.raises(TypeCheckError):
        sequence_ratio(ones, ones, ones > 0, ones, 1)


@pytest.mark.parametrize("module", ["pipeline.algorithms", "pipeline.rewards.shaping", "pipeline.algorithms.batching"])
def test_the_roles_without_a_model_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
