"""Learning rules: they turn complete units into training samples and define the loss on them.

``base.Algorithm`` is the interface. Each algorithm is one small file that subclasses ``GroupRule``,
``CriticRule`` or ``ResponseRule`` and declares its unit and defaults. Equations shared by several
algorithms have a file each; README.md maps every equation to its function and test.

Neither this package nor ``build`` imports torch, so that roles which only need a rule start fast.
Only training backends import the losses (``loss``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.algorithms.base import Algorithm, NonFiniteUnit

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

__all__ = ["Algorithm", "NonFiniteUnit", "build"]


def build(config: RunConfig) -> Algorithm:
    from pipeline.config.catalogue import rule_class

    return rule_class(config.algorithm.name).from_config(config)
