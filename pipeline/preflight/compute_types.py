"""Decides in which number type a run computes, where ``model.dtype`` is ``auto``.

bfloat16 halves the bytes that an engine reads for each token, and processors with instructions for it multiply
several times as fast; without them it takes several times as long. Small models gain nothing. So the policy scores
the first training prompts in both types, in a process of its own (``workers.engines.compute_types``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.config.base import NumberType
from pipeline.config.schema import RunConfig
from pipeline.preflight.ask import ask
from pipeline.preflight.memory_needs import count_weights, is_cpu
from pipeline.preflight.passed import PassedCheck
from pipeline.runtime.machine import Machine

FEWEST_WEIGHTS: Final = 10_000_000
"""On a CPU, models of fewer are computed in float32: casts and calls take what products save."""
LEAST_GAIN: Final = 1.25
"""float32's time over bfloat16's from which bfloat16 is taken."""
MOST_GAP: Final = 0.1
"""Largest mean difference of log-probs, in nats a token, with which bfloat16 is taken."""

_MODULE: Final = "workers.engines.compute_types"
_SECTIONS: Final = frozenset({"model", "data"})
_ASK_S = 120.0


class Measured(msgspec.Struct, frozen=True):
    """What ``workers.engines.compute_types`` found."""

    gain: float = 0.0
    """float32's seconds over bfloat16's, for the same tokens on a CPU."""
    gap: float | None = None
    """Mean absolute difference of the tokens' log-probs, in nats; None if the model is too large to be tried whole."""
    gpu_has_units: bool | None = None
    """Whether the GPU has units for bfloat16, which always pays there; None on a CPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    dtype: NumberType
    why: str

    @property
    def words(self) -> str:
        return f"types: {self.dtype} ({self.why}); model.dtype fixes it"


ON_A_CARD: Final = Decision("bfloat16", "as on a GPU that has units for it")
"""What a plan for a GPU assumes."""


def with_types(config: RunConfig, decision: Decision | None) -> RunConfig:
    """Return a configuration with a number type in place of every ``auto``."""
    if decision is not None:
        config = _updated(config, "model", decision.dtype)
    types = config.types
    config = _updated(config, "generation", types.generator)
    return _updated(_updated(config, "value", types.value), "weights", types.weights)


def decide(config: RunConfig, machine: Machine, *, asks_again: bool = False) -> Decision | None:
    """Decide what ``auto`` means on this machine; None if ``model.dtype`` says it. ``asks_again`` repeats a
    measurement that was made before."""
    if config.model.dtype != "auto":
        return None
    if config.learner.has_own_engine:
        return Decision("float32", "learner.backend is an engine of your own")
    if is_cpu(config.model.device):
        if not machine.has_bfloat16:
            return Decision("float32", "this processor has no instructions for bfloat16")
        number = count_weights(config.model.path)
        if number < FEWEST_WEIGHTS:
            return Decision("float32", f"with {number:,} weights bfloat16 is not faster on a CPU")
    remembered = PassedCheck(_MODULE, config, _SECTIONS)
    notes = None if asks_again else remembered.notes()
    if notes is None:
        try:
            answer = ask(_MODULE, config, timeout_s=_ASK_S)
        except TimeoutError as error:
            return Decision("float32", f"bfloat16 was not measured: {error}")
        if answer.refusal is not None:
            return Decision("float32", f"bfloat16 was not measured: {answer.refusal.splitlines()[-1]}")
        notes = answer.notes
        remembered.remember(notes)
    return judge(msgspec.json.decode(notes.splitlines()[-1], type=Measured))


def judge(measured: Measured) -> Decision:
    if measured.gpu_has_units is not None:
        if measured.gpu_has_units:
            return Decision("bfloat16", "this GPU has units for it")
        return Decision("float32", "this GPU has no units for bfloat16")
    speed = f"float32 takes {measured.gain:.1f} times as long here"
    if measured.gain < LEAST_GAIN:
        return Decision("float32", f"bfloat16 is not faster here: {speed}")
    if measured.gap is None:
        return Decision("bfloat16", f"{speed}; log-probs were not compared, as the model is large")
    near = f"log-probs of the first prompts differ by {measured.gap:.3f} nats a token"
    if measured.gap > MOST_GAP:
        return Decision("float32", f"{speed}, but {near}, more than {MOST_GAP:g}")
    return Decision("bfloat16", f"{speed}, and {near}")


def _updated(config: RunConfig, section: str, dtype: NumberType) -> RunConfig:
    of_section: Any = getattr(config, section)
    return config.model_copy(update={section: of_section.model_copy(update={"dtype": dtype})})
