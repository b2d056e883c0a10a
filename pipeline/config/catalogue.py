"""Each algorithm's unit, critic and default settings, readable without torch.

The ledger, ``config check`` and the fleet read them. ``name = "gspo"`` alone is GSPO; every single
setting can still be given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.ledger.types import Unit
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Declaration:
    """An algorithm's claim unit and the source of its baseline."""

    name: str
    """As in the configuration."""
    unit: Unit
    """The learner claims one of these at once."""
    has_critic: bool
    """Every training chunk needs values; a value process is started."""
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
"""By name. With dynamic sampling VAPO's unit is a group: the filter reads every accuracy in it."""


_SYMMETRIC: Final = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "dynamic_sampling": False}

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
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
"""Defaults that a name sets in ``[algorithm]``; DAPO's are the section's own. Source: the papers,
else public code. CISPO's paper leaves its upper bound open; ours is 4. KL terms are left to the run
file, since they need another role."""


def declare(name: str, *, dynamic_sampling: bool = False) -> Declaration:
    """Return an algorithm's declaration. Raises ConfigError when no algorithm has this name."""
    found = DECLARATIONS.get(name)
    if found is None:
        known = ", ".join(DECLARATIONS)
        raise ConfigError(f"algorithm.name is {name!r}; expected one of {known}: choose one that exists")
    if name == "vapo" and dynamic_sampling:
        return Declaration(name, Unit.GROUP, has_critic=True, has_group_baseline=False)
    return found
