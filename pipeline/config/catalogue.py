"""Looks up learning rules by name, and what each declares: unit, critic and needs.

Built-in rules are imported by path (``package.module:Class``), just like a user's own. The
ledger, ``config check`` and the fleet read these declarations, so the files of rules must not
import torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, cast

from pydantic import AfterValidator

from pipeline.config.import_path import import_own, is_import_path
from pipeline.config.other_names import EMULATED
from pipeline.ledger.types import Unit
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Declaration:
    """What the rest of the system must know about a learning rule."""

    unit: Unit = Unit.GROUP
    """What the learner claims at a time."""
    has_critic: bool = False
    """Every training chunk needs values, so a value process is started."""
    has_group_baseline: bool = True
    """Advantages compare the members of a group, so a group has at least two."""
    needs_reference: bool = False
    """``prepare`` reads reference log-probs, even if the loss has no KL term."""
    needs_guidance: bool = False
    """``prepare`` reads the guidance of each response."""
    filtered_unit: Unit | None = None
    """The unit when dynamic sampling is on, if it differs."""

    def filtered(self, dynamic_sampling: bool) -> Declaration:
        """Return the declaration with dynamic sampling on or off."""
        return replace(self, unit=self.filtered_unit) if dynamic_sampling and self.filtered_unit else self


BUILT_IN: Final[Mapping[str, str]] = {
    "dapo": "pipeline.algorithms.dapo:Dapo",
    "grpo": "pipeline.algorithms.grpo:Grpo",
    "dr-grpo": "pipeline.algorithms.grpo:DrGrpo",
    "rloo": "pipeline.algorithms.rloo:Rloo",
    "reinforce++": "pipeline.algorithms.reinforce:ReinforcePlusPlus",
    "reinforce++-baseline": "pipeline.algorithms.reinforce:ReinforcePlusPlusBaseline",
    "gspo": "pipeline.algorithms.gspo:Gspo",
    "cispo": "pipeline.algorithms.cispo:Cispo",
    "ppo": "pipeline.algorithms.ppo:Ppo",
    "vapo": "pipeline.algorithms.vapo:Vapo",
    "tppo": "pipeline.algorithms.tppo:Tppo",
    "nlft": "pipeline.algorithms.nlft:Nlft",
    "nlft-first": "pipeline.algorithms.nlft:NlftFirst",
    "sft": "pipeline.algorithms.sft:Sft",
    "rft": "pipeline.algorithms.sft:Rft",
}
"""Import paths of the built-in rules by short name. Any other rule is named by its import path."""


def _known_engine(*built_in: str) -> AfterValidator:
    def check(name: str) -> str:
        if name == "emulated":
            raise ValueError(EMULATED)
        return _known(name, built_in)

    return AfterValidator(check)


GenerationEngineName = Annotated[str, _known_engine("local", "vllm")]
ScoringBackendName = Annotated[str, _known_engine("torch", "vllm")]
TrainingBackendName = Annotated[str, _known_engine("torch", "fsdp2", "deepspeed", "pipeline")]
ValueBackendName = Annotated[str, _known_engine("torch", "fsdp2", "deepspeed")]
"""Any other engine is named by the import path of its factory function."""


def _known(name: str, built_in: tuple[str, ...]) -> str:
    if name not in built_in and not is_import_path(name):
        raise ValueError(f"expected one of {', '.join(built_in)}, or package.module:function of your own")
    return name


@cache
def rule_class(name: str) -> Any:
    """Return a rule's class by its short name or import path. Raises ConfigError if it does not
    exist or is not a rule class with a declaration."""
    if name not in BUILT_IN and not is_import_path(name):
        known = ", ".join(BUILT_IN)
        raise ConfigError(
            f"algorithm.name is {name!r}; expected one of {known}, or package.module:Class of your own: choose one"
        )
    found = import_own("algorithm.name", BUILT_IN.get(name, name))
    wanted = (
        "expected a subclass of GroupRule, CriticRule or ResponseRule with a declaration, see "
        "pipeline/algorithms/README.md"
    )
    if not inspect.isclass(found) or not callable(getattr(found, "from_config", None)):
        raise ConfigError(f"algorithm.name {name!r} is {found!r}; {wanted}")
    if not isinstance(getattr(found, "declaration", None), Declaration):
        raise ConfigError(f"algorithm.name {name!r} has no declaration; {wanted}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(cast("Any", found).__abstractmethods__))
        raise ConfigError(f"algorithm.name {name!r} lacks {missing}; {wanted}")
    return found


def declare(name: str, *, dynamic_sampling: bool = False) -> Declaration:
    """Return an algorithm's declaration. Raises ConfigError as :func:`rule_class` does."""
    return rule_class(name).declaration.filtered(dynamic_sampling)
