"""Which ranks can copy their own shards of the training state into a snapshot, without gathering
it.

FSDP2's can, without tensor parallelism. DeepSpeed's can if each shard is fp32 numbers on its rank's device, partitioned
as ZeRO does by default. Some settings put shards elsewhere, or change their type or partition, so
with any setting not listed here a snapshot gathers the state."""

from __future__ import annotations

from pipeline.config.learning import DeepSpeedSection, LearnerSection, ValueSection

_PLAIN_ZERO = frozenset(
    {
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "overlap_comm", "reduce_bucket_size",
        "reduce_scatter", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size", "sub_group_size",
    }
)  # fmt: skip
_PLAIN_CONFIG = frozenset({"comms_logger", "flops_profiler", "steps_per_print", "wall_clock_breakdown"})


def lends_shares(zero: DeepSpeedSection) -> bool:
    """Return whether DeepSpeed's ranks can copy their own shards."""
    is_offloaded = bool(zero.offload_optimizer or zero.offload_param)
    return not is_offloaded and _PLAIN_ZERO.issuperset(zero.zero_optimization) and _PLAIN_CONFIG.issuperset(zero.config)


def gathered_ranks(section: LearnerSection | ValueSection) -> int:
    """Return the number of ranks whose state a snapshot must gather; 1 if it gathers nothing."""
    is_gathered = section.backend == "deepspeed" and not lends_shares(section.deepspeed)
    return section.ranks if is_gathered or section.tensor_parallel > 1 else 1
