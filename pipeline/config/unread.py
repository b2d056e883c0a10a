"""Settings that were given, but that no part of this run reads.

A setting counts as given when a file or ``--set`` has it. A default that a run's resolved file
repeats does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.config.describe import settings
from pipeline.config.load import section_of
from pipeline.config.schema import RunConfig
from pipeline.ledger.contract import Unit

_NORMALISING = frozenset({"dapo", "grpo", "dr-grpo", "gspo", "cispo"})


@dataclass(frozen=True, slots=True)
class _Rule:
    keys: str
    """Settings, with spaces between; a name that ends in a dot is a whole section."""
    is_unread: Callable[[RunConfig], bool]
    why: str
    """May contain ``{algorithm}``."""


def _has_one_ratio(config: RunConfig) -> bool:
    algorithm = config.algorithm
    has_proximal = algorithm.importance != "bypass" and algorithm.proximal == "recompute"
    return algorithm.num_minibatches == 1 and has_proximal


_RULES = (
    _Rule(
        "algorithm.gamma", lambda c: not c.has_critic and c.algorithm.name != "reinforce++", "{algorithm} has no critic"
    ),
    _Rule(
        "algorithm.gae_lambda algorithm.adaptive_lambda_alpha algorithm.adaptive_lambda_floor algorithm.whiten "
        "algorithm.whiten_min_std algorithm.advantage_clamp value.",
        lambda c: not c.has_critic,
        "{algorithm} has no critic",
    ),
    _Rule(
        "algorithm.gae_lambda",
        lambda c: c.algorithm.adaptive_lambda_alpha > 0.0,
        "lambda adapts to the length, by adaptive_lambda_alpha",
    ),
    _Rule(
        "algorithm.adaptive_lambda_floor",
        lambda c: c.algorithm.adaptive_lambda_alpha == 0.0,
        "adaptive_lambda_alpha is 0, so lambda does not adapt",
    ),
    _Rule("algorithm.whiten_min_std", lambda c: not c.algorithm.whiten, "algorithm.whiten is off"),
    _Rule(
        "algorithm.tail_drop_tokens",
        lambda c: c.declaration.unit is not Unit.CHUNK,
        "{algorithm} claims no unfinished windows",
    ),
    _Rule(
        "algorithm.normalize_std",
        lambda c: c.algorithm.name not in _NORMALISING,
        "{algorithm} does not divide by a group's std",
    ),
    _Rule("algorithm.dual_clip", lambda c: c.algorithm.surrogate != "clip", "only surrogate clip has a dual clip"),
    _Rule(
        "algorithm.clip_low algorithm.clip_high algorithm.dual_clip",
        _has_one_ratio,
        "an update is one optimiser step, so all ratios are 1; raise num_minibatches",
    ),
    _Rule(
        "algorithm.importance_cap",
        lambda c: c.algorithm.importance not in ("tis", "icepop"),
        "only importance tis and icepop have a cap",
    ),
    _Rule(
        "algorithm.importance_level",
        lambda c: c.algorithm.importance in ("none", "bypass"),
        "importance none and bypass have no weights",
    ),
    _Rule(
        "algorithm.rejection_level algorithm.rejection_upper algorithm.rejection_lower",
        lambda c: c.algorithm.rejection == "none",
        "algorithm.rejection is none",
    ),
    _Rule(
        "algorithm.importance_floor", lambda c: c.algorithm.importance != "icepop", "only importance icepop has a floor"
    ),
    _Rule(
        "algorithm.kl_estimator reference. model.reference_path",
        lambda c: not c.needs_reference,
        "no reference log-probs are computed: kl_coefficient is 0 and reference.always is off",
    ),
    _Rule(
        "reward.overlong_cache_tokens reward.overlong_factor",
        lambda c: "soft" not in c.reward.overlong,
        "reward.overlong is not soft",
    ),
    _Rule("evaluation.", lambda c: not c.data.evaluation, "data.evaluation is empty"),
    _Rule("generation.vllm.", lambda c: c.generation.engine != "vllm", "generation.engine is not vllm"),
    _Rule("reference.vllm.", lambda c: c.reference.backend != "vllm", "reference.backend is not vllm"),
    _Rule("learner.deepspeed.", lambda c: c.learner.backend != "deepspeed", "learner.backend is not deepspeed"),
    _Rule("value.deepspeed.", lambda c: c.value.backend != "deepspeed", "value.backend is not deepspeed"),
    _Rule(
        "learner.lora.alpha learner.lora.target_modules", lambda c: c.learner.lora.rank == 0, "learner.lora.rank is 0"
    ),
    _Rule("wire.host wire.advertise_host wire.ports", lambda c: c.wire.transport != "tcp", "wire.transport is ipc"),
)


def unread(config: RunConfig) -> dict[str, str]:
    """Return every given setting that is not read, with the reason, in the schema's order."""
    found: dict[str, str] = {}
    for key in given_keys(config):
        why = next((rule.why for rule in _RULES if _names(rule, key) and rule.is_unread(config)), None)
        if why is not None:
            found[key] = why.format(algorithm=config.algorithm.name)
    return found


def in_words(config: RunConfig) -> list[str]:
    """Return one finding for each reason: the given settings that are not read."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, why in unread(config).items():
        keys_by_reason.setdefault(why, []).append(key)
    return [f"set, but not read: {', '.join(keys)} ({why})" for why, keys in keys_by_reason.items()]


def given_keys(config: RunConfig) -> Iterator[str]:
    """Yield the keys that a file or an override gave, in the schema's order."""
    for setting in settings():
        section = section_of(config, setting.section)
        if (
            section is not None
            and setting.name in section.model_fields_set
            and getattr(section, setting.name) is not None
        ):
            yield setting.key


def _names(rule: _Rule, key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in rule.keys.split())
