"""The table of a run file for guidance: judgments, prompts, and the constants of its rules.

Defaults are those of NLFT's public code (Julia-LiuJ/NLFT), which holds them as constants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator

from pipeline.config.base import Fraction, Positive, Section, setting
from pipeline.config.import_path import is_import_path

JUDGMENTS: Final = ("arithmetic", "math", "recorded")
"""Built-in makers of judgments. Another one is an endpoint, or is named by its import path."""
ENDPOINT: Final = "endpoint/"
"""Begins the name of a maker behind HTTP, before a name of ``reward.endpoints``."""


def _known_judgments(name: str) -> str:
    is_endpoint = name.startswith(ENDPOINT) and len(name) > len(ENDPOINT)
    if name and name not in JUDGMENTS and not is_endpoint and not is_import_path(name):
        raise ValueError(
            f"got {name!r:.60}; expected one of {', '.join(JUDGMENTS)}, {ENDPOINT}NAME of reward.endpoints, or "
            "package.module:function of your own: choose one, or leave it out"
        )
    return name


class GuidanceSection(Section):
    """Guidance of single tokens: what is right, and what is wrong, with each response. A run has it
    by its rule (nlft, nlft-first) or by algorithm.guidance: pipeline/algorithms/README.md."""

    judgments: Annotated[str, AfterValidator(_known_judgments)] = setting(
        "",
        "Source of judgments: arithmetic or math, by rules; recorded, from the data's column `judgment`;"
        " endpoint/NAME; or package.module:function of your own. Empty: none, so guidance trains nothing on wrong "
        "responses.",
    )
    max_judgment_tokens: Positive = setting(512, "Longer judgments and gold texts are left out, and counted as absent.")
    standard_template: Path | None = setting(
        None, "File of the prompt with the gold text, with {question} and {gold}. Absent: the built-in one."
    )
    judge_template: Path | None = setting(
        None, "File of the prompt with the judgment, with {question} and {judgment}. Absent: the built-in one."
    )
    standard_threshold: float = setting(
        0.95,
        "tau. Tokens of a right response with a higher standard probability have a weight of 1 to 2.",
        gt=0.0,
        lt=1.0,
    )
    standard_power: float = setting(0.6, "Below tau the weight is (p / tau) to this power.", ge=0.0)
    cluster_power: float = setting(0.3, "The same within a cluster around tokens above tau.", ge=0.0)
    bonus_power: float = setting(5.0, "Above tau the weight is 1 + ((p - tau) / (1 - tau)) to this power.", ge=0.0)
    judge_ratio: float = setting(
        1.5, "A token is flagged if its judge probability exceeds this multiple of the others.", gt=0.0
    )
    min_judge_probability: Fraction = setting(0.01, "Tokens with a lower judge probability are never flagged.")
    max_flagged_share: Fraction = setting(
        0.06, "If a larger share of a wrong response is flagged, only its flagged tokens are trained on."
    )
    unflagged_power: float = setting(
        0.5, "Other tokens of a wrong response are weighted by their standard probability to this power.", ge=0.0
    )
    loss_scale: float = setting(10.0, "The whole loss is multiplied by this.", gt=0.0)
    nll_coefficient: float = setting(1.0, "Weight of an additional plain imitation loss on right responses.", ge=0.0)
    clusters: bool = setting(
        False,
        "Spread the effect of salient tokens to neighbours with similar hidden states: tokens above tau raise the "
        "weights around them, and in nlft flagged tokens spare those around them.",
    )
    cluster_distance: float = setting(
        0.4, "A cluster ends at a token with a larger cosine distance to its mean state.", ge=0.0, le=2.0
    )
    dissimilar_clusters: bool = setting(
        False, "Grow clusters over neighbours that are farther away than cluster_distance, as the public code does."
    )
