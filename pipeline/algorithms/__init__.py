"""Learning rules: from complete units to training samples, and the loss that they are trained with.

``base.Algorithm`` is the seam. One algorithm is one small file, in the frame ``group_rule`` or
``critic_rule``, which declares itself too. Shared equations are one file each; README.md leads from
equation to function to test.

Importing this package does not import torch, nor does ``build``: the losses are in ``loss``, which
training backends alone import. So roles that only need a rule stay light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.algorithms.base import Algorithm, NonFiniteUnit

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

__all__ = ["Algorithm", "NonFiniteUnit", "build"]


def build(config: RunConfig) -> Algorithm:
    """Make the algorithm that a run's configuration names."""
    from pipeline.config.catalogue import rule_class

    return rule_class(config.algorithm.name).from_config(config)
