"""The unit of every setting that is a number.

Most names end in their unit (``_s``, ``_tokens``). Tables hold the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BY_ENDING: Final[Mapping[str, str]] = {
    "_s": "seconds",
    "_tokens": "tokens",
    "_chars": "characters",
    "_mb": "MiB",
    "_gb": "GiB",
    "_steps": "optimiser steps",
    "_updates": "updates",
    "_trajectories": "responses",
    "_prompts": "prompts",
    "_port": "port",
}

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "added to a root of squared gradients": ("adam_eps",),
    "1 / token": ("adaptive_lambda_alpha",),
    "times the median": ("spike_factor",),
    "factor": ("adaptive_lambda_floor", "alpha", "gae_lambda", "oversampling", "weight"),
    "factor of the loss": ("loss_scale",),
    "standard deviations": ("advantage_clamp",),
    "factors": ("betas",),
    "reward model's score": ("center",),
    "ratio above 1": ("clip_high",),
    "ratio below 1": ("clip_low",),
    "reward": ("correct", "overlong_factor", "wrong"),
    "exponent": ("bonus_power", "cluster_power", "standard_power", "unflagged_power"),
    "probability": ("min_judge_probability", "standard_threshold"),
    "ratio of probabilities": ("judge_ratio",),
    "share of the response's tokens": ("max_flagged_share",),
    "1 less the cosine": ("cluster_distance",),
    "copies": ("data_parallel_size",),
    "cores": ("cpus",),
    "ratio": ("dual_clip", "importance_cap", "importance_floor", "rejection_lower"),
    "ratio, or nats of k2 and k3": ("rejection_upper",),
    "loss per nat": ("entropy_coefficient", "kl_coefficient", "nll_coefficient", "positive_nll_coefficient"),
    "evaluations": ("patience",),
    "passes": ("epochs",),
    "policy versions": ("eta", "max_generator_lag"),
    "value steps": ("explained_variance_steps", "warmup_steps", "pretrain_steps", "checkpoint_every_steps"),
    "factor per token": ("gamma",),
    "pieces of work": ("canary_pieces",),
    "processes": (
        "generator",
        "max_generators",
        "max_workers",
        "min_generators",
        "processes",
        "ranks",
        "reference",
        "reward",
        "standby",
        "value",
    ),
    "responses": ("group_size", "max_batch", "pass_at", "per_update", "samples_per_prompt"),
    "groups": ("groups_per_update",),
    "messages": ("high_water_mark",),
    "connections": ("num_connections",),
    "newest ones": ("keep", "checkpoint_keep"),
    "of the optimiser": ("learning_rate",),
    "share of the learning rate": ("final_rate_share",),
    "failures": ("max_attempts", "max_data_failures", "max_restarts"),
    "incidents": ("link_alarms",),
    "losses": ("max_repairs",),
    "restarts": ("incident_restarts",),
    "workers": ("max_evictions",),
    "batches": ("max_generation_batches",),
    "L2 norm": ("max_grad_norm",),
    "share of the variance": ("min_explained_variance",),
    "optimiser steps": ("num_minibatches",),
    "requests": ("max_in_flight", "max_requests"),
    "units of each resource": ("resources",),
    "numbers": ("cache_entries",),
    "points": ("scale",),
    "sequences": ("num_slots",),
    "nats": ("parity_tolerance",),
    "columns": ("rank",),
    "any integer": ("seed",),
    "decode steps": ("steps_per_turn",),
    "token ids": ("stop_token_ids",),
    "difficulty": ("max_difficulty", "min_difficulty"),
    "divisor of the logits": ("temperature",),
    "GPUs": ("gpus", "tensor_parallel_size"),
    "threads": ("threads",),
    "tokens": ("top_k",),
    "share of the probability": ("top_p",),
    "share of the largest probability": ("min_p",),
    "factor of the logits": ("repetition_penalty",),
    "logits": ("frequency_penalty", "presence_penalty"),
    "share of the limit": ("watermark",),
    "factor of the learning rate": ("weight_decay",),
    "advantage": ("whiten_min_std",),
}
"""By unit: the settings that have it, by the last part of their key."""
_BY_NAME: Final = {name: unit for unit, names in _NAMES.items() for name in names}

_BY_KEY: Final[Mapping[str, str]] = {
    "tracing.share": "share of trajectories",
    "value.clip_high": "value",
    "value.clip_low": "value",
    "recovery.faults_per_day": "losses of a worker a day",
    "reward.max_in_flight": "responses",
    "learner.logprob_check_share": "share of chunks",
    "supervisor.heartbeats_per_s": "heartbeats a second",
}


def unit_of(key: str) -> str | None:
    """Return a number's unit in words; None for a text, a switch, or a number without an entry."""
    name = key.rpartition(".")[2]
    by_ending = next((unit for ending, unit in _BY_ENDING.items() if name.endswith(ending)), None)
    return _BY_KEY.get(key) or _BY_NAME.get(name) or by_ending


def table_names() -> frozenset[str]:
    """Return the tables' names and keys, so that a test can find names that no setting has."""
    return frozenset({*_BY_NAME, *_BY_KEY})
