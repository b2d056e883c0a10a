"""What emulated engines cost and answer, for ``headrace simulate``: the times they sleep for and the lengths they draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.emulated.build import length_law
from ops.emulated.settings import emulation_of
from pipeline.plan.costs import Costs, GeneratorCosts, LearnerCosts, ScorerCosts, WeightsCosts
from pipeline.plan.simulate.run import Responses

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


def costs_and_responses(config: RunConfig) -> tuple[Costs, Responses]:
    return costs(config), responses(config)


def costs(config: RunConfig) -> Costs:
    """Return the costs of the emulation. What the control plane adds has the defaults."""
    settings = emulation_of(config)
    scorer = ScorerCosts(token_s=settings.scoring_token_s)
    return Costs(
        generator=GeneratorCosts(
            slots=config.generation.num_slots,
            decode_base_s=settings.decode_base_s,
            decode_sequence_s=settings.decode_slot_s,
            prefill_token_s=settings.prefill_token_s,
        ),
        learner=LearnerCosts(base_s=settings.step_s, token_s=settings.training_token_s),
        reward=ScorerCosts(),
        reference=scorer,
        value=scorer,
        weights=WeightsCosts(num_bytes=settings.weights_kb << 10, load_s=settings.weights_load_s),
        source="the emulated engines",
    )


def responses(config: RunConfig) -> Responses:
    """Return the run's own draws."""
    law, seed = length_law(emulation_of(config)), config.run.seed
    return Responses(lambda name: law.draw(seed, name), words="the emulated engines' draws")
