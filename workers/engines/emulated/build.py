"""Makes emulated engines from a run's configuration, tokenizer and model's ``config.json``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.model_folder import read_model_config
from workers.engines.emulated.generation import EmulatedEngine, EngineCosts
from workers.engines.emulated.journal import SamplingJournal
from workers.engines.emulated.law import LengthLaw, TokenLaw
from workers.engines.emulated.scoring import EmulatedScoring
from workers.engines.emulated.training import EmulatedTraining
from workers.engines.emulated.value import EmulatedValue

if TYPE_CHECKING:
    from pipeline.config.running import EmulationSection
    from pipeline.config.schema import RunConfig
    from pipeline.data.tokenizer import TextTokenizer

_BYTES_PER_WEIGHT = 4


def build_emulated(config: RunConfig, model_path: Path) -> EmulatedEngine:
    """Make the generation engine. Raises DataError for a folder without model or tokenizer."""
    tokenizer = load_text_tokenizer(model_path)
    settings = config.emulation
    time.sleep(settings.load_s)
    positions = read_model_config(model_path, with_weights=False).get("max_position_embeddings")
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
        journal=SamplingJournal(settings.journal / f"{os.getpid()}.journal") if settings.journal else None,
    )


def build_emulated_scoring(config: RunConfig) -> EmulatedScoring:
    """Make the reference worker's engine."""
    time.sleep(config.emulation.load_s)
    return EmulatedScoring(token_s=config.emulation.scoring_token_s)


def build_emulated_training(config: RunConfig) -> EmulatedTraining:
    """Make the learner's backend."""
    settings = config.emulation
    time.sleep(settings.load_s)
    return EmulatedTraining(
        num_weights=num_weights(settings),
        step_s=settings.step_s,
        token_s=settings.training_token_s,
        scoring_token_s=settings.scoring_token_s,
        law=token_law(config, load_text_tokenizer(config.model.path)),
        seed=config.run.seed,
    )


def build_emulated_value(config: RunConfig) -> EmulatedValue:
    """Make the value worker's engine."""
    settings = config.emulation
    time.sleep(settings.load_s)
    return EmulatedValue(
        token_s=settings.scoring_token_s,
        step_s=settings.value_cost * settings.step_s,
        training_token_s=settings.value_cost * settings.training_token_s,
    )


def length_law(settings: EmulationSection) -> LengthLaw:
    """Return how long a run's emulated responses are."""
    return LengthLaw(settings.lengths, settings.median_tokens, settings.tail)


def token_law(config: RunConfig, tokenizer: TextTokenizer) -> TokenLaw:
    """Return the tokens of a run's emulated responses."""
    stops = end_tokens(config.model.path, tokenizer, config.generation.stop_token_ids)
    # the vocabulary is the tokenizer's, which may be the smaller one
    return TokenLaw.of(tokenizer.num_tokens, (stop for stop in stops if stop < tokenizer.num_tokens))


def num_weights(settings: EmulationSection) -> int:
    """Return how many numbers the emulated weights hold."""
    return (settings.weights_kb << 10) // _BYTES_PER_WEIGHT
