"""Settings that were given, but that no part of this run reads.

A setting counts as given when a file or ``--set`` has it. A default that a run's resolved file
repeats does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.config.describe import settings
from pipeline.config.learning import DualClipSettings, Importance, Proximal, SampledSettings
from pipeline.config.load import section_of
from pipeline.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class _Rule:
    keys: str
    """Settings, separated by spaces. A name that ends in a dot is a whole section."""
    is_unread: Callable[[RunConfig], bool]
    why: str
    """May contain ``{algorithm}``."""


def _of_algorithm(names: str, is_unread: Callable[[Any], bool], why: str) -> _Rule:
    """Return a rule for settings of ``[algorithm]`` that depends on this section alone. It is asked
    only about settings that the section has."""
    return _Rule(" ".join(f"algorithm.{name}" for name in names.split()), lambda c: is_unread(c.algorithm), why)


def _has_one_ratio(algorithm: SampledSettings) -> bool:
    has_proximal = algorithm.importance is not Importance.BYPASS and algorithm.proximal is Proximal.RECOMPUTE
    return algorithm.num_minibatches == 1 and has_proximal


_CLIPS = " ".join(DualClipSettings.model_fields.keys() - SampledSettings.model_fields.keys())
_UNREFERENCED = "no reference log-probs are computed: kl_coefficient is 0 and reference.always is off"
_NO_ADAPTATION = "adaptive_lambda_alpha is 0, so lambda does not adapt"
_ALL_ONE = "an update is one optimiser step, so all ratios are 1; raise num_minibatches"
_RULES = (
    _Rule("value.", lambda c: not c.has_critic, "{algorithm} has no critic"),
    _of_algorithm(
        "gae_lambda", lambda a: a.adaptive_lambda_alpha > 0.0, "lambda adapts to the length, by adaptive_lambda_alpha"
    ),
    _of_algorithm("adaptive_lambda_floor", lambda a: a.adaptive_lambda_alpha == 0.0, _NO_ADAPTATION),
    _of_algorithm("whiten_min_std", lambda a: not a.whiten, "algorithm.whiten is off"),
    _of_algorithm(_CLIPS, _has_one_ratio, _ALL_ONE),
    _of_algorithm(
        "importance_cap", lambda a: a.importance not in ("tis", "icepop"), "only importance tis and icepop have a cap"
    ),
    _of_algorithm(
        "importance_level", lambda a: a.importance in ("none", "bypass"), "importance none and bypass have no weights"
    ),
    _of_algorithm(
        "rejection_level rejection_upper rejection_lower",
        lambda a: a.rejection == "none",
        "algorithm.rejection is none",
    ),
    _of_algorithm("importance_floor", lambda a: a.importance != "icepop", "only importance icepop has a floor"),
    _Rule("algorithm.kl_estimator", lambda c: not c.needs_reference, _UNREFERENCED),
    _Rule("reference. model.reference_path", lambda c: not c.has_reference, _UNREFERENCED),
    _Rule(
        "guidance.loss_scale guidance.nll_coefficient guidance.max_flagged_share guidance.unflagged_power guidance.clusters",
        lambda c: c.mixes_guidance,
        "algorithm.guidance mix only scales advantages",
    ),
    _Rule(
        "guidance.max_flagged_share",
        lambda c: c.algorithm.name == "nlft-first",
        "nlft-first flags one token of a response",
    ),
    _Rule("guidance.", lambda c: not c.needs_guidance, "{algorithm} reads no guidance, and algorithm.guidance is none"),
    _Rule(
        "guidance.cluster_power guidance.cluster_distance guidance.dissimilar_clusters",
        lambda c: not c.guidance.clusters,
        "guidance.clusters is off",
    ),
    _Rule(
        "reward.overlong_cache_tokens reward.overlong_factor",
        lambda c: "soft" not in c.reward.overlong,
        "reward.overlong is not soft",
    ),
    _Rule(
        "data.response_verifier data.columns.response data.columns.verdict data.columns.judgment",
        lambda c: not c.data.responses,
        "data.responses is empty",
    ),
    _Rule(
        "data.verifier generation.dtype generation.device generation.kv_policy generation.vllm.",
        lambda c: not c.has_sampling,
        "data.responses are read, and there is no evaluation, so nothing is sampled",
    ),
    _Rule(
        "learner.logprob_check_share",
        lambda c: bool(c.data.responses),
        "data.responses have no log-probs of a generator to check",
    ),
    _Rule("evaluation.", lambda c: not c.has_evaluation, "data.evaluation and evaluation.sets are empty"),
    _Rule(
        "evaluation.patience evaluation.keep_best evaluation.main",
        lambda c: c.evaluation.every_updates == 0,
        "evaluation.every_updates is 0, so the run does not evaluate while it trains",
    ),
    _Rule(
        "engines.settings",
        lambda c: not any(one.has_own_engine for one in (c.generation, c.learner, c.reference, c.value)),
        "no engine is named by its import path",
    ),
    _Rule("generation.vllm.", lambda c: c.generation.engine != "vllm", "generation.engine is not vllm"),
    _Rule("reference.vllm.", lambda c: c.reference.backend != "vllm", "reference.backend is not vllm"),
    _Rule("learner.deepspeed.", lambda c: c.learner.backend != "deepspeed", "learner.backend is not deepspeed"),
    _Rule("learner.compile", lambda c: c.learner.backend != "torch", "only backend torch compiles layers"),
    _Rule("value.deepspeed.", lambda c: c.value.backend != "deepspeed", "value.backend is not deepspeed"),
    _Rule(
        "learner.lora.alpha learner.lora.target_modules", lambda c: c.learner.lora.rank == 0, "learner.lora.rank is 0"
    ),
    _Rule(
        "learner.schedule_updates learner.decay_updates learner.final_rate_share",
        lambda c: c.learner.schedule == "constant",
        "learner.schedule is constant",
    ),
    _Rule(
        "learner.decay_updates",
        lambda c: c.learner.schedule != "warmup-stable-decay",
        "only schedule warmup-stable-decay has a decay of separate length",
    ),
    _Rule("learner.betas learner.adam_eps", lambda c: c.learner.optimizer == "adafactor", "adafactor uses neither"),
    _Rule(
        "fleet.min_generators fleet.grow_after_s fleet.shrink_after_s",
        lambda c: c.fleet.max_generators is None,
        "fleet.max_generators is not set, so the number of generators stays",
    ),
    _Rule("sinks.wandb_mode", lambda c: c.sinks.wandb is None, "sinks.wandb is not set"),
    _Rule("sinks.mlflow_experiment", lambda c: c.sinks.mlflow is None, "sinks.mlflow is not set"),
    _Rule("tracing.share", lambda c: c.tracing.otlp is None, "tracing.otlp is not set"),
    _Rule("wire.host wire.advertise_host wire.ports", lambda c: c.wire.transport != "tcp", "wire.transport is ipc"),
)


def unread(config: RunConfig) -> dict[str, str]:
    """Return every given setting that no part of this run reads, with the reason, in the schema's
    order."""
    found: dict[str, str] = {}
    for key in given_keys(config):
        why = next((rule.why for rule in _RULES if _names(rule, key) and rule.is_unread(config)), None)
        if why is not None:
            found[key] = why.format(algorithm=config.algorithm.name)
    return found


def in_words(config: RunConfig) -> list[str]:
    """Return a sentence for each reason, with the given settings that are not read."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, why in unread(config).items():
        keys_by_reason.setdefault(why, []).append(key)
    return [f"set, but not read: {', '.join(keys)} ({why})" for why, keys in keys_by_reason.items()]


def given_keys(config: RunConfig) -> Iterator[str]:
    """Yield the keys that a file or an override gave, in the schema's order."""
    for setting in settings():
        section = section_of(config, setting.section)
        is_given = section is not None and setting.name in section.model_fields_set
        if is_given and getattr(section, setting.name) is not None:
            yield setting.key


def _names(rule: _Rule, key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in rule.keys.split())
