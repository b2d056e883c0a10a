"""Learning rules: from complete units to training samples, and the loss that they are trained with.

``base.Algorithm`` is the seam; one algorithm is one small file (``dapo``). What they share is one file an equation; README.md
beside this leads from equation to function to test.

Importing this package does not import torch, so that the roles that only need a reward rule stay light; ``build`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.algorithms.base import Algorithm, NonFiniteUnit
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

__all__ = ["Algorithm", "NonFiniteUnit", "build"]


def build(config: RunConfig) -> Algorithm:
    """Make the algorithm that a run's configuration names.

    Raises:
        ConfigError: No algorithm has this name.
    """
    name: str = config.algorithm.name
    if name == "dapo":
        from pipeline.algorithms.dapo import Dapo

        return Dapo.from_config(config)
    raise ConfigError(f"algorithm.name is {name!r}; expected dapo: choose one that exists")
