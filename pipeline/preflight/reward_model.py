"""Checks a reward model's folder by its files alone, without torch, as the reward worker does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.preflight.model_folder import longest_context, read_model_config, tensor_names
from protocol.errors import ConfigError, DataError

_HEADS = ("score.", "classifier.", "classification_head.", "logits_proj.")
"""Names that transformers gives to the heads of its sequence classifiers."""
_NO_LIMIT = 1_000_000_000
"""A tokenizer without a limit has 1e30."""


def check_reward_model(folder: Path) -> dict[str, Any]:
    """Return a one-label classifier's ``config.json``. Raises DataError for another folder."""
    config = read_model_config(folder)
    architectures: list[str] = config.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        what = ", ".join(architectures) or "a model of unnamed architecture"
        raise DataError(
            f"{folder} holds {what}, which does not score texts; set reward.model.path to a sequence classifier with one "
            "label (TRL's RewardTrainer saves such a folder)"
        )
    # An absent setting means two labels.
    labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
    if labels != 1:
        raise DataError(f"{folder} is a sequence classifier with {labels} labels; expected 1, the score")
    if config.get("is_encoder_decoder"):
        raise DataError(
            f"{folder} holds {architectures[0]}, an encoder with a decoder, which cannot score texts of several lengths at "
            "once; set reward.model.path to an encoder or a decoder"
        )
    if not any(name.startswith(_HEADS) for name in tensor_names(folder)):
        raise DataError(
            f"{folder} names itself {architectures[0]}, but its weights have no head ({', '.join(_HEADS)}), so scores would "
            "be random: set reward.model.path to a trained reward model"
        )
    return config


def longest_input(folder: Path, config: dict[str, Any], max_tokens: int | None) -> int | None:
    """Return the most tokens that a reward model reads; None without a limit. ``max_tokens``, the
    setting, may be above the tokenizer's limit. Raises ConfigError: it is above the model's
    positions."""
    positions, because = longest_context(config)
    if max_tokens is not None:
        if positions is not None and max_tokens > positions:
            raise ConfigError(f"reward.model.max_tokens is {max_tokens}, but {folder} {because}; lower it")
        return max_tokens
    limits = [limit for limit in (positions, _tokenizer_limit(folder)) if limit is not None]
    return min(limits, default=None)


def _tokenizer_limit(folder: Path) -> int | None:
    file = folder / "tokenizer_config.json"
    try:
        limit = json.loads(file.read_text(encoding="utf-8")).get("model_max_length") if file.is_file() else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; download or make the folder again") from error
    return int(limit) if isinstance(limit, int | float) and limit < _NO_LIMIT else None
