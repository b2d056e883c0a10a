"""Every learning rule's class by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.algorithms.cispo import Cispo
from pipeline.algorithms.critic_rule import CriticRule
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule
from pipeline.algorithms.grpo import DrGrpo, Grpo
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.ppo import Ppo
from pipeline.algorithms.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from pipeline.algorithms.rloo import Rloo
from pipeline.algorithms.tppo import Tppo
from pipeline.algorithms.vapo import Vapo

_CLASSES: Final[tuple[type[GroupRule | CriticRule], ...]] = (
    Dapo, Grpo, DrGrpo, Rloo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, Gspo, Cispo, Ppo, Vapo, Tppo,
)  # fmt: skip
RULES: Final[Mapping[str, type[GroupRule | CriticRule]]] = {rule.name: rule for rule in _CLASSES}
"""Classes by ``algorithm.name``, with the same names as ``catalogue.DECLARATIONS``."""
