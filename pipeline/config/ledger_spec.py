"""Derives the specification of a run's ledger from its configuration and data.

Workers whose settings or data differ get LedgerMismatch when they open the ledger."""

from __future__ import annotations

from typing import Protocol

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import LatePolicy, LedgerSpec, Unit


class PromptStream(Protocol):
    """What the ledger needs to know about the data."""

    @property
    def digest(self) -> str:
        """Digest of files, tokeniser, limits and seed."""
        ...

    @property
    def num_prompts(self) -> int:
        """Prompts in one epoch."""
        ...


def ledger_spec(config: RunConfig, stream: PromptStream) -> LedgerSpec:
    algorithm = config.algorithm
    declared = config.declaration
    return LedgerSpec(
        run=config.run.name,
        unit=declared.unit,
        group_size=algorithm.group_size,
        units_per_update=algorithm.groups_per_update * algorithm.group_size,
        eta=config.staleness.eta,
        num_prompts=None if config.data.epochs is None else config.data.epochs * stream.num_prompts,
        oversampling=algorithm.oversampling,
        fields=config.score_fields,
        signal_filter=algorithm.dynamic_sampling and declared.unit is Unit.GROUP,
        late=LatePolicy(config.staleness.late),
        data_digest=stream.digest,
        lease_s=config.ledger.lease_s,
        scoring_deadline_s=config.ledger.scoring_deadline_s,
        max_attempts=config.ledger.max_attempts,
        max_bytes=int(config.ledger.watermark * config.ledger.max_memory_mb * 2**20),
        value_training=declared.has_critic,
    )
