"""Learning rules with given settings, for tests of losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pipeline.algorithms.base import Rule
from pipeline.algorithms.cispo import Cispo
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.nlft import Nlft, NlftFirst
from pipeline.algorithms.sft import Sft

LOSSES: Final[tuple[type[Rule], ...]] = (Dapo, Gspo, Cispo, Nlft, NlftFirst, Sft)
"""A rule for each loss of a token."""
DAPO_BOUNDS: Final = {"clip_low": 0.2, "clip_high": 0.28}


def make_rule(
    kind: type[Any] = Dapo,
    *,
    norm_length: float = 1.0,
    proximal_version: int = 0,
    window_tokens: int = 512,
    constants: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return a rule with DAPO's bounds, where it has bounds, and these settings, as far as it has
    them. ``constants``: of guidance."""
    there = {name: value for name, value in (DAPO_BOUNDS | settings).items() if name in kind.Settings.model_fields}
    rule = kind.of(**there)
    guidance = rule.guidance.model_copy(update=constants or {})
    return replace(
        rule,
        norm_length=norm_length,
        proximal_version=proximal_version,
        window_tokens=window_tokens,
        guidance=guidance,
    )


def with_settings(rule: Rule, kind: type[Rule] | None = None, **changes: Any) -> Any:
    """Return the rule, or one of another ``kind``, with other settings."""
    held = {name: getattr(rule.settings, name) for name in rule.settings.model_fields_set}
    held |= {name: getattr(rule, name) for name in ("norm_length", "proximal_version", "window_tokens")}
    held |= {"constants": rule.guidance.model_dump(exclude_unset=True)}
    return make_rule(kind or type(rule), **(held | changes))
