"""From golden vectors to Headrace's public functions, one adapter a family. An adapter reshapes; it computes nothing."""

from __future__ import annotations

from tests.golden.adapters.groups import (
    dynamic_sampling,
    group_advantage,
    group_rules,
    math_verifier,
    overlong,
    segments,
)
from tests.golden.adapters.losses import aggregation, decoupled_ppo, entropy, kl, policy_loss, tis
from tests.golden.adapters.schedules import tppo_schedule
from tests.golden.adapters.values import egae, egae_batch, gae, gae_vapo, value_loss
from tests.golden.check import Adapter

ADAPTERS: dict[str, Adapter] = {
    "aggregation": aggregation,
    "decoupled_ppo": decoupled_ppo,
    "dynamic_sampling": dynamic_sampling,
    "egae": egae,
    "egae_batch": egae_batch,
    "entropy": entropy,
    "gae": gae,
    "gae_vapo": gae_vapo,
    "group_advantage": group_advantage,
    "group_rules": group_rules,
    "kl": kl,
    "math_verifier": math_verifier,
    "overlong": overlong,
    "policy_loss": policy_loss,
    "segments": segments,
    "tis": tis,
    "tppo_schedule": tppo_schedule,
    "value_loss": value_loss,
}
