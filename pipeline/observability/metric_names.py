"""The Prometheus metric of each counter that workers report in their heartbeats.

Names follow Prometheus's conventions: base units, ``_total`` for what only grows until a worker
starts anew, ``_ratio`` from 0 to 1. A test finds each counter of the workers' code here. A counter
of a later version that is not here is left out of the endpoint.

Source: https://prometheus.io/docs/practices/naming/"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP

PREFIX: Final = "headrace_"


@dataclass(frozen=True, slots=True)
class MetricName:
    """One metric of workers."""

    name: str
    """With its prefix and suffix."""
    help: str

    @property
    def only_grows(self) -> bool:
        """Whether it is a Prometheus counter; else a gauge."""
        return self.name.endswith("_total")


_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    # generators
    "sampled_tokens": ("sampled_tokens_total", "Tokens sampled by the engine."),
    "prefill_tokens": ("prefill_tokens_total", "Context tokens computed before sampling."),
    "decode_steps": ("decode_steps_total", "Decode steps of the engine."),
    "decode_s": ("decode_seconds_total", "Time inside decode steps."),
    "live": ("live_sequences", "Sequences in the engine, waiting ones too."),
    "slots": ("engine_slots", "Sequences that the engine decodes at once."),
    "longest_standstill_s": (
        "engine_longest_standstill_seconds",
        "Longest time without a token that tokens have ended.",
    ),
    "standstill_s": ("engine_standstill_seconds", "Time of the newest turns without a token; 0 after one with tokens."),
    "turns": ("generator_turns_total", "Turns of the generator's loop."),
    "chunks": ("written_chunks_total", "Chunks stored in the ledger."),
    "written_tokens": ("written_tokens_total", "Response tokens stored in the ledger."),
    "duplicates": ("duplicate_writes_total", "Chunks or scores that the ledger held already."),
    "refused_tokens": ("refused_tokens_total", "Response tokens that the ledger refused, of a lost lease."),
    "undelivered": ("undelivered_chunks_total", "Chunks that no scorer took in time; handed out again by the ledger."),
    "weights_s": (
        "weights_taking_seconds_total",
        "Time from a version's announcement until it is verified and merged.",
    ),
    "weights_pause_s": ("weights_pause_seconds_total", "Time without sampling for new weights."),
    "weights_merge_s": ("weights_merge_seconds_total", "Time of adding adapters to base weights, within the above."),
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
    "scored_tokens": ("scored_tokens_total", "Tokens scored, in guided passes too; of judged responses, for rewards."),
    "failed": ("failed_scores_total", "Chunks on which the scorer failed."),
    "overdue": ("overdue_chunks_total", "Chunks taken from the ledger after their deadline."),
    "guided": ("guided_responses_total", "Responses with guidance."),
    "guided_passes": ("guided_passes_total", "Passes of responses after a gold text or a judgment."),
    "guided_tokens": ("guided_tokens_total", "Tokens read in guided passes, those of prompts too."),
    "guidance_absent": ("absent_guidance_total", "Responses without some guidance that they should have."),
    "not_judged": (
        "unjudged_responses_total",
        "Responses that count as wrong, since judging them exhausted its limits.",
    ),
    "late": ("late_verdicts_total", "Tries to judge a response that gave no verdict in time."),
    "without_verdict": ("responses_without_verdict_total", "Responses that never got a verdict: dead letters."),
    "judged": ("judged_responses_total", "Responses with an accuracy."),
    "judged_accuracy": ("judged_accuracy_total", "Sum of these responses' accuracies."),
    "judgments": ("judgments_total", "Wrong responses with a judgment."),
    "waited_for_endpoint": ("endpoint_waits_total", "Responses put off, since their endpoint was away."),
    "waited_for_group": ("group_waits_total", "Responses put off until their group is finished."),
    "finished": ("value_waiting_trajectories", "Finished responses that wait for the critic."),
    "trained": ("value_trained_trajectories_total", "Responses that the critic has trained on."),
    "value_loss": ("value_loss", "Loss of the critic's newest step."),
    "value_version": ("value_version", "Version of the critic."),
    "value_steps": ("value_steps", "Optimiser steps in the critic; fewer after a restart from a checkpoint."),
    "explained_variance": ("value_explained_variance_ratio", "Mean explained variance of the critic's newest steps."),
    "gate_open": ("value_gate_open", "1 once the critic is good enough for the policy to train."),
    # observer
    "moments": ("observed_moments_total", "Seconds at which the observer looked at the fleet."),
    "missed_moments": ("missed_moments_total", "Of them, those without an answer of the registry."),
    "moments_left_out": ("unwritten_moments_total", "Seconds of metrics that the disk refused for too long."),
    "records_lost": ("lost_flow_records_total", "Flow records that were gone before the observer read them."),
    "incidents": ("incidents_total", "Incidents that were opened."),
    "incidents_open": ("open_incidents", "Incidents that have not ended."),
    # learner
    "checked_chunks": ("checked_chunks_total", "Chunks whose log-probs the learner computed a second time."),
    "updates": ("updates", "Updates in the policy; fewer after a restart from a checkpoint."),
    "num_updates": ("wanted_updates", "Updates after which the run is finished."),
    "trained_tokens": ("trained_tokens_total", "Response tokens that carried loss."),
    "refused_steps": ("refused_steps_total", "Optimiser steps that were not finite, so not applied."),
    "accuracy": ("train_accuracy_ratio", "Mean raw accuracy of the newest update's batch."),
    "reward": ("train_reward", "Mean reward of the newest update's batch."),
    "loss": ("train_loss", "Loss of the newest update."),
    "response_length": ("train_response_mean_tokens", "Mean response of the newest update's batch."),
    "staleness_mean": (
        "train_staleness_mean_versions",
        "Mean versions between learner and tokens of the newest update.",
    ),
    "staleness_max": (
        "train_staleness_max_versions",
        "Most versions between learner and a token of the newest update.",
    ),
    "evaluation_accuracy": ("evaluation_accuracy_ratio", "Accuracy of the newest evaluation."),
    "ready": ("learner_ready_units", "Ready units at the learner's last claim that was refused."),
    "needed": ("learner_needed_units", "Units that an update needs, at that claim."),
    "unusable_in_a_row": (
        "learner_unusable_groups",
        "Last groups in a row that were dropped with nothing to learn from.",
    ),
    "published_bytes": ("published_weights_bytes_total", "Bytes of published weights."),
    "published_s": ("publishing_seconds_total", "Time of publishing weights."),
    "checkpoint_version": ("checkpoint_version", "Version in the newest whole checkpoint."),
    "snapshot_version": ("snapshot_version", "Version in the newest snapshot in the host's memory."),
    "snapshots": ("snapshots_total", "Snapshots copied to the host's memory."),
    "skipped_snapshots": ("snapshots_skipped_total", "Snapshots left out: the one before was not sealed yet."),
    "snapshot_s": (
        "snapshot_seconds_total",
        "Time that learner or value worker waited for its snapshots, its engine's steps included.",
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
"""By counter of a heartbeat."""
ENDPOINT_METRICS: Final = {of: MetricName(PREFIX + name, text) for of, (name, text) in _ENDPOINT_NAMES.items()}
"""By the last part of a counter ``ENDPOINT:what``."""
REWARD_PART: Final = MetricName(f"{PREFIX}train_reward_part", "Mean of a summand of the newest update's reward.")
"""Of counters ``reward_NAME``."""
REWARD_PART_COUNTER: Final = "reward_"
ABSENT_JUDGMENTS: Final = MetricName(
    f"{PREFIX}judgments_absent_total", "Wrong responses without a judgment, by reason."
)
"""Of counters ``judgments_absent_REASON``."""
GENERATOR_METRICS: Final = {
    LOGPROB_GAP: MetricName(
        f"{PREFIX}logprob_gap_nats", "Mean gap of a generator's log-probs to the learner's, a token."
    ),
    LOGPROB_USUAL_GAP: MetricName(f"{PREFIX}logprob_usual_gap_nats", "The same of its peers at the same lags."),
}
"""By the begin of a counter that a generator's name follows."""
