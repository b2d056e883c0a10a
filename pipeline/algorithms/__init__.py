"""Learning rules: they turn complete units into training samples and define the loss on them.

``base.Rule`` is the interface. Each rule is one small file that subclasses ``GroupRule``,
``CriticRule`` or ``ResponseRule`` and has its settings, advantages and loss of a token. The terms
that they share are in ``terms``; README.md maps every equation to its function and test.

Neither this package nor ``build`` imports torch, so that roles which only need a rule start fast.
Only training backends import the losses (``loss``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.algorithms.assemble import NonFiniteUnit
from pipeline.algorithms.base import Rule

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

__all__ = ["NonFiniteUnit", "Rule", "build"]


def build(config: RunConfig) -> Rule:
    from pipeline.config.catalogue import rule_class

    return rule_class(config.algorithm.name).from_config(config)
