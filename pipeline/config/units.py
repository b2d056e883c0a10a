"""The unit of every setting that is a number.

*Consumes* a setting's key. *Produces* its unit in words. *Waits for* nothing. Names end in their
unit where they can (``_s``, ``_tokens``); the others stand in a table, by their last part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BY_ENDING: Final[Mapping[str, str]] = {
    "_s": "seconds",
    "_tokens": "tokens",
    "_chars": "characters",
    "_kb": "KiB",
    "_mb": "MiB",
    "_gb": "GiB",
    "_steps": "optimiser steps",
    "_updates": "updates",
    "_trajectories": "responses",
    "_prompts": "prompts",
    "_port": "port",
}

_BY_NAME: Final[Mapping[str, str]] = {
    "adam_eps": "added to a root of squared gradients",
    "adaptive_lambda_alpha": "1 / token",
    "adaptive_lambda_floor": "factor",
    "advantage_clamp": "standard deviations",
    "alpha": "factor",
    "betas": "factors",
    "center": "reward model's score",
    "clip_high": "ratio above 1",
    "clip_low": "ratio below 1",
    "correct": "reward",
    "data_parallel_size": "copies",
    "dual_clip": "ratio",
    "entropy_coefficient": "loss per nat",
    "epochs": "passes",
    "eta": "policy versions",
    "explained_variance_steps": "value steps",
    "gae_lambda": "factor",
    "gamma": "factor per token",
    "generator": "processes",
    "group_size": "responses",
    "groups_per_update": "groups",
    "high_water_mark": "messages",
    "importance_cap": "ratio",
    "importance_floor": "ratio",
    "rejection_lower": "ratio",
    "rejection_upper": "ratio, or nats of k2 and k3",
    "keep": "newest ones",
    "checkpoint_keep": "newest ones",
    "kl_coefficient": "loss per nat",
    "learning_rate": "of AdamW",
    "max_attempts": "failures",
    "max_batch": "responses",
    "max_data_failures": "failures",
    "max_generation_batches": "batches",
    "max_generator_lag": "policy versions",
    "max_grad_norm": "L2 norm",
    "max_restarts": "failures",
    "max_workers": "processes",
    "min_explained_variance": "share of the variance",
    "num_minibatches": "optimiser steps",
    "num_slots": "sequences",
    "oversampling": "factor",
    "overlong_factor": "reward",
    "parity_tolerance": "nats",
    "per_update": "responses",
    "positive_nll_coefficient": "loss per nat",
    "processes": "processes",
    "rank": "columns",
    "ranks": "processes",
    "reference": "processes",
    "reward": "processes",
    "samples_per_prompt": "responses",
    "seed": "any integer",
    "steps_per_turn": "decode steps",
    "stop_token_ids": "token ids",
    "tail": "see its description",
    "temperature": "divisor of the logits",
    "tensor_parallel_size": "GPUs",
    "threads": "threads",
    "top_k": "tokens",
    "top_p": "share of the probability",
    "value": "processes",
    "value_cost": "factor",
    "warmup_steps": "value steps",
    "pretrain_steps": "value steps",
    "checkpoint_every_steps": "value steps",
    "watermark": "share of the limit",
    "weight": "factor",
    "weight_decay": "factor of the learning rate",
    "whiten_min_std": "advantage",
    "wrong": "reward",
}

_BY_KEY: Final[Mapping[str, str]] = {
    "value.clip_high": "value",
    "value.clip_low": "value",
}


def unit_of(key: str) -> str | None:
    """Return the unit of a setting that is a number, None for one that has none here: a text, a
    switch, or an omission.
    """
    name = key.rpartition(".")[2]
    by_ending = next((unit for ending, unit in _BY_ENDING.items() if name.endswith(ending)), None)
    return _BY_KEY.get(key) or _BY_NAME.get(name) or by_ending


def table_names() -> frozenset[str]:
    """Return the names and keys that the tables hold, so that a test can find those that no setting
    has.
    """
    return frozenset({*_BY_NAME, *_BY_KEY})
