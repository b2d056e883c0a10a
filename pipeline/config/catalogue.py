"""What each algorithm is made of, for everything that must know without loading torch: the ledger,
``config check``, the fleet.

*Consumes* an algorithm's name, and the one setting that changes its unit. *Produces* a Declaration,
and the settings that the name stands for: ``name = "gspo"`` alone is GSPO, and every single setting
can still be given. *Waits for* nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.ledger.contract import Unit
from protocol.errors import ConfigError


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
"""By name. VAPO's unit is a group instead when dynamic sampling is on: the filter needs every
member's accuracy.
"""


_SYMMETRIC: Final = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "dynamic_sampling": False}

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    # the defaults of the algorithm section
    "dapo": {},
    "grpo": _SYMMETRIC | {"loss_aggregation": "seq-mean-token-mean"},
    "dr-grpo": _SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum-norm", "normalize_std": False},
    "rloo": _SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum"},
    "reinforce++": _SYMMETRIC,
    "reinforce++-baseline": _SYMMETRIC,
    "gspo": _SYMMETRIC
    | {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "seq-mean-token-mean"},
    "cispo": _SYMMETRIC | {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "ppo": _SYMMETRIC,
    "vapo": {"dynamic_sampling": False, "adaptive_lambda_alpha": 0.05, "positive_nll_coefficient": 0.1},
    "tppo": {
        "dynamic_sampling": False,
        "adaptive_lambda_alpha": 0.05,
        "adaptive_lambda_floor": 0.95,
        "advantage_clamp": 10.0,
        "positive_nll_coefficient": 0.1,
    },
}
"""What a name puts under the settings given in ``[algorithm]``: from the papers or, where they are
silent, from public code. CISPO's upper bound, which its paper leaves open, is ours. KL terms are
left to the run file: they need another role."""


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
