"""The Prometheus metric for each counter that workers report in their heartbeats.

Names follow Prometheus's conventions: base units, ``_total`` for what only grows until a worker
restarts, ``_ratio`` from 0 to 1. A test checks that every counter in the workers' code is listed here.
Unknown counters, as from a newer version, are not exported.

Source: https://prometheus.io/docs/practices/naming/"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP

PREFIX: Final = "headrace_"


@dataclass(frozen=True, slots=True)
class MetricName:
    name: str
    """Full name, with prefix and suffix."""
    help: str

    @property
    def only_grows(self) -> bool:
        """Whether it is a Prometheus counter rather than a gauge."""
        return self.name.endswith("_total")


_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    # generators
    "sampled_tokens": ("sampled_tokens_total", "Tokens sampled by the engine."),
    "prefill_tokens": ("prefill_tokens_total", "Context tokens computed before sampling."),
    "decode_steps": ("decode_steps_total", "Decode steps of the engine."),
    "decode_s": ("decode_seconds_total", "Time inside decode steps."),
    "live": ("live_sequences", "Sequences in the engine, including waiting ones."),
    "slots": ("engine_slots", "Maximum sequences that the engine decodes at once."),
    "longest_standstill_s": (
        "engine_longest_standstill_seconds",
        "Longest completed time without a new token.",
    ),
    "standstill_s": ("engine_standstill_seconds", "Time since the last new token; 0 if the last turn had one."),
    "turns": ("generator_turns_total", "Turns of the generator's loop."),
    "chunks": ("written_chunks_total", "Chunks stored in the ledger."),
    "written_tokens": ("written_tokens_total", "Response tokens stored in the ledger."),
    "duplicates": ("duplicate_writes_total", "Chunks or scores that the ledger already had."),
    "refused_tokens": ("refused_tokens_total", "Response tokens that the ledger refused because their lease was lost."),
    "undelivered": ("undelivered_chunks_total", "Chunks that no scorer took in time; handed out again by the ledger."),
    "weights_s": (
        "weights_taking_seconds_total",
        "Time from a version's announcement until it is verified and merged.",
    ),
    "weights_pause_s": ("weights_pause_seconds_total", "Time without sampling for new weights."),
    "weights_merge_s": (
        "weights_merge_seconds_total",
        "Time of merging adapters into base weights; part of weights_taking_seconds_total.",
    ),
    "weights_bases": ("weights_bases_total", "Base weights taken."),
    "weight_swaps": ("weight_swaps_total", "Versions taken by the engine."),
    "stale_swaps": ("stale_weight_swaps_total", "Swaps after which the engine still served the old weights."),
    "rejected_version": ("rejected_policy_version", "Version that the engine refused; -1 for none."),
    "weights_bytes": ("weights_received_bytes_total", "Bytes of weights read or fetched."),
    "weights_parts": ("weights_received_parts_total", "Parts of versions fetched from other hosts."),
    "weights_deltas": ("weights_deltas_total", "Versions fetched as a difference."),
    "weights_refreshes": ("weights_refreshes_total", "Versions fetched whole after a difference that did not fit."),
    "weights_sources_lost": ("weights_lost_sources_total", "Hosts that stopped serving in the middle of a fetch."),
    "relayed_bytes": ("weights_relayed_bytes_total", "Bytes of weights served to other hosts."),
    # reward, reference, value
    "scored": ("scored_chunks_total", "Chunks scored."),
    "scored_tokens": (
        "scored_tokens_total",
        "Tokens scored, including guided passes; for rewards, tokens of judged responses.",
    ),
    "failed": ("failed_scores_total", "Chunks on which the scorer failed."),
    "overdue": ("overdue_chunks_total", "Chunks taken from the ledger after their deadline."),
    "guided": ("guided_responses_total", "Responses with guidance."),
    "guided_passes": ("guided_passes_total", "Passes over responses conditioned on a gold text or a judgment."),
    "guided_tokens": ("guided_tokens_total", "Tokens read in guided passes, including prompts."),
    "guidance_absent": ("absent_guidance_total", "Responses that lack guidance they should have."),
    "not_judged": (
        "unjudged_responses_total",
        "Responses counted as wrong because judging them exceeded a limit.",
    ),
    "late": ("late_verdicts_total", "Attempts to judge a response that gave no verdict in time."),
    "without_verdict": ("responses_without_verdict_total", "Responses that never got a verdict: dead letters."),
    "judged": ("judged_responses_total", "Responses with an accuracy."),
    "judged_accuracy": ("judged_accuracy_total", "Sum of these responses' accuracies."),
    "judgments": ("judgments_total", "Wrong responses with a judgment."),
    "waited_for_endpoint": ("endpoint_waits_total", "Responses postponed because their endpoint was unavailable."),
    "waited_for_group": ("group_waits_total", "Responses postponed until their group was finished."),
    "finished": ("value_waiting_trajectories", "Finished responses waiting for the critic."),
    "trained": ("value_trained_trajectories_total", "Responses the critic has trained on."),
    "value_loss": ("value_loss", "Loss of the critic's newest step."),
    "value_version": ("value_version", "Version of the critic."),
    "value_steps": ("value_steps", "Optimiser steps in the critic; falls after a restart from a checkpoint."),
    "explained_variance": ("value_explained_variance_ratio", "Mean explained variance of the critic's newest steps."),
    "gate_open": ("value_gate_open", "1 once the critic is good enough for the policy to train."),
    # observer
    "moments": ("observed_moments_total", "Seconds at which the observer read the fleet's state."),
    "missed_moments": ("missed_moments_total", "Such seconds at which the registry did not answer."),
    "moments_left_out": (
        "unwritten_moments_total",
        "Seconds of metrics lost because the disk refused them for too long.",
    ),
    "records_lost": ("lost_flow_records_total", "Flow records lost before the observer could read them."),
    "incidents": ("incidents_total", "Incidents that were opened."),
    "incidents_open": ("open_incidents", "Incidents that have not ended."),
    # learner
    "checked_chunks": ("checked_chunks_total", "Chunks whose log-probs the learner computed twice, as a check."),
    "updates": ("updates", "Updates in the policy; falls after a restart from a checkpoint."),
    "num_updates": ("wanted_updates", "Updates after which the run is finished."),
    "trained_tokens": ("trained_tokens_total", "Response tokens that carried loss."),
    "refused_steps": ("refused_steps_total", "Optimiser steps not applied because they were not finite."),
    "accuracy": ("train_accuracy_ratio", "Mean raw accuracy of the newest update's batch."),
    "reward": ("train_reward", "Mean reward of the newest update's batch."),
    "loss": ("train_loss", "Loss of the newest update."),
    "response_length": ("train_response_mean_tokens", "Mean response length in the newest update's batch."),
    "staleness_mean": (
        "train_staleness_mean_versions",
        "Mean versions between the learner and the tokens of the newest update.",
    ),
    "staleness_max": (
        "train_staleness_max_versions",
        "Maximum versions between the learner and a token of the newest update.",
    ),
    "evaluation_accuracy": ("evaluation_accuracy_ratio", "Accuracy of the newest evaluation."),
    "ready": ("learner_ready_units", "Ready units at the learner's last refused claim."),
    "needed": ("learner_needed_units", "Units that an update needs, at that claim."),
    "unusable_in_a_row": (
        "learner_unusable_groups",
        "Most recent groups in a row dropped because they had nothing to learn from.",
    ),
    "published_bytes": ("published_weights_bytes_total", "Bytes of published weights."),
    "published_s": ("publishing_seconds_total", "Time of publishing weights."),
    "checkpoint_version": ("checkpoint_version", "Version in the newest whole checkpoint."),
    "snapshot_version": ("snapshot_version", "Version in the newest snapshot in the host's memory."),
    "snapshots": ("snapshots_total", "Snapshots copied to the host's memory."),
    "skipped_snapshots": ("snapshots_skipped_total", "Snapshots skipped because the previous one was not sealed yet."),
    "snapshot_s": (
        "snapshot_seconds_total",
        "Time that the learner or value worker waited for its snapshots, including its engine's steps.",
    ),
    "failed_checkpoints": ("failed_checkpoints_total", "Checkpoints that the disk refused."),
}

_ENDPOINT_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "requests": ("endpoint_requests_total", "Requests to an endpoint of rewards."),
    "request_s": ("endpoint_request_seconds_total", "Time of these requests."),
    "retries": ("endpoint_retries_total", "Requests that were repeated."),
    "rate_limited": ("endpoint_rate_limited_requests_total", "Requests that the endpoint refused as too many."),
    "failed": ("endpoint_failed_requests_total", "Requests without a verdict."),
    "cached": ("endpoint_cached_verdicts_total", "Verdicts taken from the cache."),
}

WORKER_METRICS: Final = {of: MetricName(PREFIX + name, text) for of, (name, text) in _NAMES.items()}
"""By heartbeat counter."""
ENDPOINT_METRICS: Final = {of: MetricName(PREFIX + name, text) for of, (name, text) in _ENDPOINT_NAMES.items()}
"""By the last part of a counter ``ENDPOINT:what``."""
REWARD_PART: Final = MetricName(f"{PREFIX}train_reward_part", "Mean of one part of the newest update's reward.")
"""For counters ``reward_NAME``."""
REWARD_PART_COUNTER: Final = "reward_"
ABSENT_JUDGMENTS: Final = MetricName(
    f"{PREFIX}judgments_absent_total", "Wrong responses that got no judgment, by reason."
)
"""For counters ``judgments_absent_REASON``."""
GENERATOR_METRICS: Final = {
    LOGPROB_GAP: MetricName(
        f"{PREFIX}logprob_gap_nats", "Mean gap per token between a generator's log-probs and the learner's."
    ),
    LOGPROB_USUAL_GAP: MetricName(
        f"{PREFIX}logprob_usual_gap_nats", "The same gap for the generator's peers at the same version lags."
    ),
}
"""By the prefix of a counter that ends in a generator's name."""
