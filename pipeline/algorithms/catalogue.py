"""What each algorithm is made of, for everything that must know without loading torch: the ledger, ``config check``, the fleet.

*Consumes* an algorithm's name, and the one setting that changes its unit. *Produces* a Declaration. *Waits for* nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.replay.buffer import Unit
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Declaration:
    """What an algorithm claims, and where its baseline comes from."""

    name: str
    """As in the configuration."""
    unit: Unit
    """What the learner claims at once."""
    has_critic: bool
    """Every training chunk needs values, and a value process is started."""
    has_group_baseline: bool
    """Advantages compare the members of a group, so a group has at least two."""


_GROUP_BASED: Final = ("dapo", "grpo", "dr-grpo", "rloo", "reinforce++-baseline", "gspo", "cispo")

DECLARATIONS: Final[Mapping[str, Declaration]] = {
    **{name: Declaration(name, Unit.GROUP, has_critic=False, has_group_baseline=True) for name in _GROUP_BASED},
    "reinforce++": Declaration("reinforce++", Unit.GROUP, has_critic=False, has_group_baseline=False),
    "ppo": Declaration("ppo", Unit.TRAJECTORY, has_critic=True, has_group_baseline=False),
    "vapo": Declaration("vapo", Unit.TRAJECTORY, has_critic=True, has_group_baseline=False),
    "tppo": Declaration("tppo", Unit.CHUNK, has_critic=True, has_group_baseline=False),
}
"""By name. VAPO's unit is a group instead when dynamic sampling is on: the filter needs every member's accuracy."""


def declare(name: str, *, dynamic_sampling: bool = False) -> Declaration:
    """Return what an algorithm is made of.

    Raises:
        ConfigError: No algorithm has this name.
    """
    found = DECLARATIONS.get(name)
    if found is None:
        raise ConfigError(
            f"algorithm.name is {name!r}; expected one of {', '.join(DECLARATIONS)}: choose one that exists"
        )
    if name == "vapo" and dynamic_sampling:
        return Declaration(name, Unit.GROUP, has_critic=True, has_group_baseline=False)
    return found


def declaration(config: RunConfig) -> Declaration:
    """Return what a run's algorithm is made of. Raises ConfigError when no algorithm has its name."""
    return declare(config.algorithm.name, dynamic_sampling=config.algorithm.dynamic_sampling)
