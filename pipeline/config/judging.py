"""Settings of rewards beside the verifier: functions with names and weights."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from pipeline.config.base import Section, setting

TAKEN_PARTS = frozenset({"correct", "model", "overlong"})
"""Parts of every reward that have their names already: ``pipeline.rewards.verifier``."""


def _part_name(name: str) -> str:
    if re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) is None or name in TAKEN_PARTS:
        raise ValueError(
            f"a reward's name is {name!r:.60}; expected small letters, digits and _, at most 40, and none of "
            f"{', '.join(sorted(TAKEN_PARTS))}, which every run has: choose another name"
        )
    return name


PartName = Annotated[str, AfterValidator(_part_name)]
"""A part of the reward, as it is shown in history, report and status."""


class RewardFunctionSection(Section):
    """A further reward, which is a part of that name. Give as many as you like. They change the
    reward of training responses; accuracy stays the verifier's, and evaluation calls none."""

    verifier: str = Field(
        description="Import path of your function, TRL's or verl's, or a verifier's name. Its numbers may be any."
    )
    whole_group: bool = setting(
        False, "Call it once a group, with the responses of all members, when all have ended: a relative judge."
    )
    weight: float = setting(1.0, "The part is weight * (the function's number). Not 0.")

    @model_validator(mode="after")
    def _counts(self) -> RewardFunctionSection:
        if self.weight == 0.0:
            raise ValueError("weight is 0, so it would be computed for nothing; remove the function, or weigh it")
        return self
