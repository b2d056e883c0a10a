"""Makes emulated engines from a run's configuration, tokenizer and model's ``config.json``.

A run file names these functions, with settings of ``ops.emulated.settings``:

    generation.engine = "ops.emulated.build:generation"
    learner.backend = "ops.emulated.build:training"
    reference.backend = "ops.emulated.build:scoring"
    value.backend = "ops.emulated.build:value"
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ops.emulated.generation import EmulatedEngine, EngineCosts
from ops.emulated.journal import SamplingJournal
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.scoring import EmulatedScoring
from ops.emulated.settings import Emulation, emulation_of
from ops.emulated.training import EmulatedTraining
from ops.emulated.value import EmulatedValue
from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.data.tokenizer import TextTokenizer

SIMULATED = "ops.emulated.simulated:costs_and_responses"
"""Where ``headrace simulate`` finds the costs and responses of these engines."""

_BYTES_PER_WEIGHT = 4


_MODULE = __name__


def generation(config: RunConfig) -> EmulatedEngine:
    """Make the generation engine. Raises ConfigError, or DataError for a folder without model or tokenizer."""
    _check_together(config)
    tokenizer = load_text_tokenizer(config.model.path)
    settings = emulation_of(config)
    time.sleep(settings.load_s)
    positions = read_model_config(config.model.path, with_weights=False).get("max_position_embeddings")
    return EmulatedEngine(
        num_slots=config.generation.num_slots,
        lengths=length_law(settings),
        tokens=token_law(config, tokenizer),
        vocabulary=tokenizer.num_tokens,
        positions=positions if isinstance(positions, int) else None,
        costs=EngineCosts(
            settings.decode_base_s, settings.decode_slot_s, settings.prefill_token_s, settings.weights_load_s
        ),
        num_weights=num_weights(settings),
        journal=SamplingJournal(config.run_dir / settings.journal / f"{os.getpid()}.journal")
        if settings.journal
        else None,
    )


def scoring(config: RunConfig) -> EmulatedScoring:
    settings = emulation_of(config)
    time.sleep(settings.load_s)
    return EmulatedScoring(token_s=settings.scoring_token_s)


def training(config: RunConfig) -> EmulatedTraining:
    """Make the learner's backend. Raises ConfigError for a generator that is not emulated, or LoRA."""
    _check_together(config)
    if config.learner.lora.rank:
        raise ConfigError(
            f"learner.lora.rank is {config.learner.lora.rank}, but an emulated learner has no model to adapt; set it to 0"
        )
    settings = emulation_of(config)
    time.sleep(settings.load_s)
    return EmulatedTraining(
        num_weights=num_weights(settings),
        step_s=settings.step_s,
        token_s=settings.training_token_s,
        scoring_token_s=settings.scoring_token_s,
        law=token_law(config, load_text_tokenizer(config.model.path)),
        seed=config.run.seed,
    )


def value(config: RunConfig) -> EmulatedValue:
    settings = emulation_of(config)
    time.sleep(settings.load_s)
    return EmulatedValue(
        token_s=settings.scoring_token_s,
        step_s=settings.value_cost * settings.step_s,
        training_token_s=settings.value_cost * settings.training_token_s,
    )


def length_law(settings: Emulation) -> LengthLaw:
    """Return the distribution of a run's emulated response lengths."""
    return LengthLaw(settings.lengths, settings.median_tokens, settings.tail)


def token_law(config: RunConfig, tokenizer: TextTokenizer) -> TokenLaw:
    """Return the tokens of a run's emulated responses."""
    stops = end_tokens(config.model.path, tokenizer, config.generation.stop_token_ids)
    # the tokenizer may have fewer tokens than the model
    return TokenLaw.of(tokenizer.num_tokens, (stop for stop in stops if stop < tokenizer.num_tokens))


def num_weights(settings: Emulation) -> int:
    """Return how many numbers the emulated weights have."""
    return (settings.weights_kb << 10) // _BYTES_PER_WEIGHT


def _check_together(config: RunConfig) -> None:
    engine, backend = config.generation.engine, config.learner.backend
    if (engine == f"{_MODULE}:generation") != (backend == f"{_MODULE}:training"):
        raise ConfigError(
            f"generation.engine is {engine} and learner.backend is {backend}, but generators take the learner's weights; "
            "set both to emulated ones, or neither"
        )
