"""Checks of specifications and arguments that both ledgers make before any change, and their errors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Final

from pipeline.ledger.types import Claim, EvaluationRequest, LedgerSpec, Unit
from protocol.errors import ConfigError, LedgerError, LedgerMismatch
from protocol.ids import ChunkId
from protocol.trajectory import Field, FinishReason, TrajectoryChunk

MAX_CHUNKS_PER_TRAJECTORY: Final = 65_536
"""A chunk sorts by its trajectory's order times this, plus its index."""
MAX_EVALUATION_PROMPTS: Final = 10_000_000
MAX_EVALUATION_SAMPLES: Final = 10_000


def check_chunk(chunk: TrajectoryChunk, fields: Collection[Field]) -> None:
    """Raise ValueError for a chunk that is empty (unless it opens a trajectory with an environment), aborted,
    beyond the longest allowed trajectory, or waits for turns that a run with these fields does not have."""
    if chunk.finish_reason is FinishReason.ABORT:
        raise ValueError(f"chunk {chunk.id} was aborted; give its trajectory back, aborted chunks are not stored")
    if chunk.finish_reason is FinishReason.TURN and Field.TURN not in fields:
        raise ValueError(
            f"chunk {chunk.id} ends a turn, but the ledger's fields are {sorted(fields)}; open it with turn, or write "
            "stop or length"
        )
    if chunk.num_tokens == 0 and not chunk.is_opening:
        raise ValueError(
            f"chunk {chunk.id} has no tokens; a chunk holds at least one: give its trajectory back instead"
        )
    if not 0 <= chunk.id.index < MAX_CHUNKS_PER_TRAJECTORY - 1:
        raise ValueError(
            f"chunk {chunk.id} has index {chunk.id.index}, expected 0 to {MAX_CHUNKS_PER_TRAJECTORY - 2}; use longer windows"
        )


def check_evaluation(request: EvaluationRequest) -> None:
    """Raise ValueError for an evaluation that is empty or too large for its sort order."""
    if not 0 < request.num_prompts <= MAX_EVALUATION_PROMPTS or not (
        0 < request.samples_per_prompt <= MAX_EVALUATION_SAMPLES
    ):
        raise ValueError(
            f"evaluation {request.number} of {request.num_prompts} prompts, {request.samples_per_prompt} samples each; "
            f"expected 1 to {MAX_EVALUATION_PROMPTS} and 1 to {MAX_EVALUATION_SAMPLES}"
        )


def check_value_batch(num_trajectories: int) -> None:
    if num_trajectories < 1:
        raise ValueError(f"a value batch of {num_trajectories} trajectories; expected at least 1")


def parse_chunk(text: str) -> ChunkId | None:
    """Parse a chunk id; None when ``text`` is not one."""
    try:
        return ChunkId.parse(text)
    except ValueError:
        return None


def claim_gone(claim: Claim) -> LedgerError:
    return LedgerError(
        f"claim {claim.claim_id} of {len(claim.units)} units is not in the ledger: it was settled, returned by a newer "
        "learner, or cancelled; claim again"
    )


def nothing_kept(doing: str) -> LedgerError:
    """Return the error for claiming finished trajectories in a run that does not keep them."""
    return LedgerError(
        f"{doing}: the run's ledger keeps no finished trajectories; open it with value_training to train a value model"
    )


def unmarked(num_updates: int) -> LedgerError:
    """Return the error for going back to a checkpoint whose counts the ledger does not have."""
    return LedgerError(
        f"the ledger does not know a checkpoint of {num_updates} updates, but later updates are settled, and going back would "
        "lose count of them: use a newer checkpoint, or start another run from the model in this one"
    )


def spec_texts(spec: LedgerSpec) -> dict[str, str]:
    """Return every setting as text, for comparison and for Redis. None becomes the empty text."""
    texts: dict[str, str] = {}
    for item in fields(spec):
        value: object = getattr(spec, item.name)
        if isinstance(value, frozenset):
            value = ",".join(field.value for field in Field if field in spec.fields)
        elif isinstance(value, bool):
            value = int(value)
        texts[item.name] = "" if value is None else str(value)
    return texts


def mismatch(there: LedgerSpec | Mapping[str, str], wanted: LedgerSpec) -> LedgerMismatch:
    """Return an error that names every setting in which the existing ledger differs."""
    have = spec_texts(there) if isinstance(there, LedgerSpec) else there
    differing = "; ".join(
        f"{name} is {have.get(name, 'absent')!r} there, {value!r} here"
        for name, value in spec_texts(wanted).items()
        if have.get(name) != value
    )
    return LedgerMismatch(
        f"the ledger of run {wanted.run!r} was opened with other settings: {differing}; use the same configuration and data, "
        "or another run name"
    )


def surplus(oversampling: float, units_per_update: int) -> int:
    """Return the additional credit for oversampling, ``floor((oversampling - 1) * B)``."""
    # 1.1 is not exact in binary: 0.1 * 10 must not become 0
    return math.floor((oversampling - 1.0) * units_per_update + 1e-9)


def fewest_judged(group_size: int) -> int:
    """Return how many members of a group need a verdict for a baseline to exist."""
    return min(2, group_size)


def check_spec(spec: LedgerSpec) -> None:
    """Raise ConfigError for a specification that could never fill an update."""
    for name, value, least in (
        ("group_size", spec.group_size, 1),
        ("units_per_update", spec.units_per_update, 1),
        ("eta", spec.eta, 0),
        ("oversampling", spec.oversampling, 1),
        ("max_attempts", spec.max_attempts, 1),
    ):
        if value < least:
            raise ConfigError(f"ledger {name} is {value}, expected at least {least}")
    if spec.lease_s <= 0 or spec.scoring_deadline_s <= 0:
        raise ConfigError(
            f"ledger lease_s is {spec.lease_s} and scoring_deadline_s {spec.scoring_deadline_s}; both must be above 0"
        )
    extra = spec.eta * spec.units_per_update + surplus(spec.oversampling, spec.units_per_update)
    if spec.unit is Unit.GROUP:
        if spec.units_per_update % spec.group_size:
            raise ConfigError(
                f"units_per_update is {spec.units_per_update} trajectories, not a multiple of group_size {spec.group_size}; "
                "an update trains whole groups"
            )
    elif extra < spec.group_size - 1:
        raise ConfigError(
            f"credit of eta * units_per_update + surplus = {extra} cannot admit a whole group of {spec.group_size} while an "
            f"update is one {spec.unit.value} short. Raise eta or oversampling until it is at least {spec.group_size - 1}"
        )
    if spec.signal_filter and (spec.unit is not Unit.GROUP or spec.group_size < 2):
        raise ConfigError(
            f"signal_filter with unit {spec.unit.value} and group_size {spec.group_size}; it compares the members of a group: "
            "use unit group with at least 2 members"
        )
    if spec.fields & {Field.GUIDANCE, Field.TURN} and Field.REWARD not in spec.fields:
        raise ConfigError(
            f"ledger fields are {sorted(spec.fields)}; guidance follows the reward, which has its texts, and the reward the "
            "last turn: add reward"
        )
    if spec.value_training and not {Field.REWARD, Field.VALUE} <= spec.fields:
        raise ConfigError(
            f"value_training with fields {sorted(spec.fields)}; a critic trains on rewards and its own stored "
            f"values: add reward and value to the fields"
        )
