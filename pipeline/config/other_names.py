"""Settings of TRL, verl, OpenRLHF and prime-rl that have no counterpart here, and settings that earlier
versions had.
 A removed setting is accepted with a value
that changed nothing, since resolved files of earlier runs contain it. Any other value is refused,
with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

_REASONS: Final[Mapping[str, str]] = {
    "gradient_accumulation_steps steps_per_generation": "there is no such setting: gradients add up over micro-batches of "
    "`learner.micro_batch_tokens`, and `algorithm.num_minibatches` is the optimiser steps of an update",
    "per_device_train_batch_size train_batch_size batch_size ppo_mini_batch_size generation_batch_size": "an update is "
    "`algorithm.groups_per_update` prompts of `algorithm.group_size` responses, in `algorithm.num_minibatches` optimiser steps",
    "num_iterations ppo_epochs max_epochs": "there is no such setting: each response is trained on once; the optimiser steps "
    "that an update is cut into are `algorithm.num_minibatches`",
    "partial_rollout partial_rollout_enable": "there is no such setting: unfinished responses always continue with the new "
    "weights",
    "min_lr": "a schedule's last rate is given as a share of the learning rate: set `learner.final_rate_share`",
    "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio": "a warm-up is given in updates, not as a share: "
    "set `learner.warmup_updates`",
    "epsilon_low": "set `algorithm.clip_low`",
    "use_remove_padding packing_samples": "there is no such setting: batches are always packed without padding",
    "report_to use_wandb logger": "there is no such setting: a run has report.html, history.jsonl and "
    "`supervisor.metrics_port`",
}
"""What to do instead, by names that correspond to no setting here, separated by spaces."""
OTHERWISE: Final = {name: words for names, words in _REASONS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Removed:
    idle: tuple[object, ...]
    """Values that changed nothing, so that a run is the same without the setting."""
    why: str


_ELASTIC = (
    "Headrace no longer creates autoscalers. Leave it out, and let your own scale the elastic Deployments by "
    "`headrace_queue_depth` and `headrace_learner_input_wait_ratio`, or set fleet.max_generators"
)
EMULATED: Final = (
    "the emulated engines are no longer part of Headrace; a checkout has them in ops/emulated. Set generation.engine to "
    "ops.emulated.build:generation, the backends of learner, reference and value to its :training, :scoring and :value, and "
    "write their settings in [engines.settings]"
)
_EMULATION: Final[Mapping[str, object]] = {
    "lengths": "lognormal", "median_tokens": 256.0, "tail": 1.0, "decode_base_s": 0.0, "decode_slot_s": 0.0,
    "prefill_token_s": 0.0, "weights_load_s": 0.0, "load_s": 0.0, "weights_kb": 4, "scoring_token_s": 0.0, "step_s": 0.0,
    "training_token_s": 0.0, "value_cost": 1.0,
}  # fmt: skip
REMOVED: Final[Mapping[str, Removed]] = {
    "algorithm.prompt_filter": Removed(
        ("none",),
        "it judged a prompt by its first two scored responses, the shortest, so training saw mostly short ones. Leave it "
        "out, or use name vapo with dynamic_sampling, which judges whole groups",
    ),
    "algorithm.surrogate": Removed(
        (),
        "a rule has its own loss. Leave it out; for GSPO's or CISPO's loss set algorithm.name to gspo or cispo, and for one of "
        "your own define token_loss in a rule: pipeline/algorithms/README.md",
    ),
    "checkpoint.snapshot_peers": Removed(
        ("auto", "off"),
        "joined hosts keep no copies of snapshots. Leave it out; a learner whose host was restarted goes on from its newest "
        "checkpoint: write one more often by checkpoint.every_updates and every_s",
    ),
    "ledger.shards": Removed(
        ([],),
        "one run has one server. Leave it out. One server carries about 2,000 generators at windows of 1,024 tokens, and more "
        "at longer ones (generation.window_tokens); several runs spread over the nodes of a Redis Cluster "
        "(ledger.url = redis+cluster://HOST,HOST)",
    ),
    "emulation.journal": Removed((), EMULATED),
    **{f"emulation.{name}": Removed((default,), EMULATED) for name, default in _EMULATION.items()},
    "launch.kubernetes.autoscaler": Removed(("hpa",), _ELASTIC),
    "launch.kubernetes.max_replicas": Removed((16,), _ELASTIC),
    "launch.kubernetes.queue_depth": Removed((64,), _ELASTIC),
    "launch.ray.max_restarts": Removed(
        (-1,),
        "Ray restarts no worker. Leave it out: the supervisor starts a lost one again, as supervisor.max_restarts allows",
    ),
}


_LOSSES: Final = {
    "gspo": "gspo",
    "cispo": "cispo",
    "nlft": "nlft",
    "nlft-first": "nlft-first",
    "sft": "nll",
    "rft": "nll",
}
"""What ``algorithm.surrogate`` was by default in rules whose loss is not PPO's."""


def drop_idle(tree: dict[str, Any]) -> None:
    """Delete removed settings from a configuration's tree, if their value changed nothing."""
    for key, removed in REMOVED.items():
        *sections, name = key.split(".")
        held: Any = tree
        for section in sections:
            held = cast("dict[str, Any]", held).get(section) if isinstance(held, dict) else None
        if isinstance(held, dict) and cast("dict[str, Any]", held).get(name) in removed.idle:
            del held[name]
    rule: Any = tree.get("algorithm")
    if isinstance(rule, dict):
        loss = _LOSSES.get(str(cast("dict[str, Any]", rule).get("name", "dapo")), "clip")
        if cast("dict[str, Any]", rule).get("surrogate") == loss:
            del rule["surrogate"]
    if not tree.get("emulation", True):
        del tree["emulation"]
