"""From golden vectors to Headrace's public functions, one adapter a family. An adapter reshapes; it
computes nothing."""

from __future__ import annotations

from tests.golden.adapters.groups import group_advantage, math_verifier, overlong
from tests.golden.adapters.guided import nlft
from tests.golden.adapters.ledger import DRIVERS, in_memory
from tests.golden.adapters.losses import aggregation, decoupled_ppo, entropy, kl, policy_loss, tis
from tests.golden.adapters.values import egae, egae_batch, gae, gae_vapo, value_loss
from tests.golden.check import Adapter

ADAPTERS: dict[str, Adapter] = {
    "aggregation": aggregation,
    "decoupled_ppo": decoupled_ppo,
    "egae": egae,
    "egae_batch": egae_batch,
    "entropy": entropy,
    "gae": gae,
    "gae_vapo": gae_vapo,
    "group_advantage": group_advantage,
    "kl": kl,
    "math_verifier": math_verifier,
    "nlft": nlft,
    "overlong": overlong,
    "policy_loss": policy_loss,
    "tis": tis,
    "value_loss": value_loss,
    **{family: in_memory(driver) for family, driver in DRIVERS.items() if family != "decoupled_ppo"},
}
