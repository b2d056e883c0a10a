"""The rows of the table of learning from guidance: each is a rule with its guide and its judge.

All rows of a seed have the same questions and start model; rows that are given responses have the
same ones. A row names what it adds to ``start.toml``, so a fleet can repeat it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

NAME: Final = "nlft"
"""Of the table."""
START: Final = Path(__file__).parent / "start.toml"
SIZES: Final = (25, 50, 100, 200)
"""Responses that a run learns from."""
RATES: Final = (2e-4, 5e-4, 1e-3)
"""Learning rates to choose from."""
BATCH: Final = 8
"""Responses of one optimiser step, and the size of a group."""
JUDGED: Final = (0.1, 0.3, 0.5)
"""Shares of wrong responses about which the judge is wrong."""
CHOOSING_SEEDS: Final = 2
"""Seeds, from 0, whose validation chooses a row's learning rate at a size."""
PLAIN: Final = 50
"""Responses where a row is run at one size alone."""

Cell = tuple[str, int]
"""A row's name, and a size."""


class GuideKind(StrEnum):
    """Where guided columns come from."""

    NONE = "none"
    FROZEN = "frozen"
    """From the start model, once: as a reference worker makes them."""
    LIVE = "live"
    """From the policy as it is at each step."""
    ORACLE = "oracle"
    """From the verifier's index of the first error."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    overrides: tuple[str, ...]
    """Of start.toml, with the rule."""
    guide: GuideKind = GuideKind.NONE
    misjudged: float = 0.0
    """Share of the wrong responses about which the judge is wrong."""
    only_right: bool = False
    """Learns from the right responses alone: epochs are over these."""
    only_sound: bool = False
    """Leaves out responses whose answer is right and whose working is not: two errors cancel."""
    samples_anew: bool = False
    """Samples groups of BATCH with the policy as it learns, as many responses in all as others are
    given."""
    sizes: tuple[int, ...] = SIZES
    rate_of: str = ""
    """The row whose learning rates this one has; empty: chosen by its own validation."""


_GRPO: Final = ('algorithm.name="grpo"', f"algorithm.group_size={BATCH}", "algorithm.groups_per_update=1",
                'algorithm.importance="none"')  # fmt: skip
_NLFT: Final = ('algorithm.name="nlft"',)
_FIRST: Final = ('algorithm.name="nlft-first"',)
SFT, RFT, PUBLISHED, FIRST, ORACLE = (
    "SFT on all", "SFT on correct", "NLFT as published", "first-error form", "the verifier's own index",
)  # fmt: skip
SOUND_RFT, SOUND_ORACLE = "SFT on correct working", "the index, lucky answers left out"
GRPO, GUIDED_GRPO = "GRPO", "GRPO with guidance"

ROWS: Final = (
    Row(SFT, ('algorithm.name="sft"',)),
    Row(RFT, ('algorithm.name="rft"',), only_right=True),
    Row(SOUND_RFT, ('algorithm.name="rft"',), only_right=True, only_sound=True),
    Row(PUBLISHED, _NLFT, GuideKind.FROZEN),
    Row(FIRST, _FIRST, GuideKind.FROZEN),
    Row(ORACLE, _FIRST, GuideKind.ORACLE),
    Row(SOUND_ORACLE, _FIRST, GuideKind.ORACLE, only_sound=True),
    Row(GRPO, _GRPO, samples_anew=True),
    Row(GUIDED_GRPO, (*_GRPO, 'algorithm.guidance="mix"'), GuideKind.FROZEN, samples_anew=True),
    Row(f"{PUBLISHED}, live guidance", _NLFT, GuideKind.LIVE, sizes=(PLAIN,), rate_of=PUBLISHED),
    Row(f"{FIRST}, live guidance", _FIRST, GuideKind.LIVE, sizes=(PLAIN,), rate_of=FIRST),
    *(
        Row(f"{name}, judge wrong in {share:.0%}", overrides, GuideKind.FROZEN, share, sizes=(PLAIN,), rate_of=name)
        for name, overrides in ((PUBLISHED, _NLFT), (FIRST, _FIRST))
        for share in JUDGED
    ),
)
