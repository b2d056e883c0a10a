"""Settings of earlier versions.

A value that asked for nothing is taken: resolved files of earlier runs hold it. Any other is
refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that is gone."""

    idle: tuple[object, ...]
    """Values with which a run is as it is without the setting."""
    why: str
    """Why it is gone, and what to do."""


_ELASTIC = (
    "Headrace makes no autoscaler of a cluster. Leave it out, and let your own scale the elastic Deployments by "
    "`headrace_queue_depth` and `headrace_learner_input_wait_ratio`, or set fleet.max_generators"
)
EMULATED: Final = (
    "the emulated engines are no part of Headrace any more; a checkout has them in ops/emulated. Set generation.engine to "
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
}
"""By key."""


def drop_idle(tree: dict[str, Any]) -> None:
    """Take settings that are gone, and that asked for nothing, out of a configuration's table."""
    for key, removed in REMOVED.items():
        *sections, name = key.split(".")
        held: Any = tree
        for section in sections:
            held = cast("dict[str, Any]", held).get(section) if isinstance(held, dict) else None
        if isinstance(held, dict) and cast("dict[str, Any]", held).get(name) in removed.idle:
            del held[name]
    if not tree.get("emulation", True):
        del tree["emulation"]
