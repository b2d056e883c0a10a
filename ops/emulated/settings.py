"""Settings of the emulated engines: ``[engines.settings]`` of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from pipeline.config.base import Positive, Section, setting
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


class Emulation(Section):
    """The times that emulated engines sleep for, so that dozens fit on a core.

    Responses are drawn beforehand from (run.seed, trajectory): random tokens, with lengths from the
    distribution below, cut at generation.max_response_tokens. torch is not loaded. Tokenizer and positions are
    those of model.path."""

    lengths: Literal["lognormal", "pareto", "constant"] = setting("lognormal", "Distribution of response lengths.")
    median_tokens: float = setting(256.0, "Median response length, including the stop token.", ge=1.0)
    tail: float = setting(1.0, "lognormal: std of ln(length). pareto: exponent, smaller is heavier.", gt=0.0)
    decode_base_s: float = setting(0.0, "a: a decode step takes a + b * live slots.", ge=0.0)
    decode_slot_s: float = setting(0.0, "b: see decode_base_s.", ge=0.0)
    prefill_token_s: float = setting(0.0, "Time to prefill a context token that no slot has cached.", ge=0.0)
    weights_load_s: float = setting(0.0, "Pause of a generator to load new weights.", ge=0.0)
    load_s: float = setting(0.0, "Time to make an engine, like loading a model.", ge=0.0)
    weights_kb: Positive = setting(4, "Size of the published weights.")
    scoring_token_s: float = setting(
        0.0, "Time to score a token, including context: reference, value, old log-probs.", ge=0.0
    )
    step_s: float = setting(0.0, "Time of an optimiser step of the learner or critic, without its tokens.", ge=0.0)
    training_token_s: float = setting(0.0, "Time of a prompt or response token of such a step.", ge=0.0)
    journal: Path | None = setting(
        None,
        "Folder in which generators record what they sample, for drills that kill them; relative to the run's folder.",
    )
    value_cost: float = setting(1.0, "Cost of a value model's step, relative to the policy's.", ge=0.0)


def emulation_of(config: RunConfig) -> Emulation:
    """Return a run's settings of the emulation. Raises ConfigError for unknown or invalid ones."""
    try:
        return Emulation.model_validate(config.engines.settings)
    except ValidationError as error:
        raise ConfigError(f"engines.settings: {error}; ops/emulated/settings.py lists them") from None
