"""The learner's second look at log-probs: whose chunks, how many, and what its heartbeat has.

A generator's gap to the learner's log-probs is compared with its peers' at the same lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from ops.emulated.law import TokenLaw
from ops.emulated.training import EmulatedTraining
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.training import DataSection
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.entries import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import Segment, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.logprob_check import (
    FEWEST_CHUNKS,
    LAST_CHUNKS,
    MAX_REPORTED,
    GeneratorGap,
    LogprobCheck,
    SamplerGaps,
    is_chosen,
    sample_of,
)

SEED, TOKENS, CONTEXT = 7, 8, 5
LAW = TokenLaw.of(64, {1})


class Backend(EmulatedTraining):
    """Counts the samples that it computes."""

    def __init__(self) -> None:
        super().__init__(num_weights=4, law=LAW, seed=SEED)
        self.num_computed = 0

    def response_logprobs(self, samples: Any) -> list[np.ndarray]:
        self.num_computed += len(samples)
        return super().response_logprobs(samples)


def chunk_of(number: int, worker: str, *, garbage: bool = False) -> TrajectoryChunk:
    trajectory = TrajectoryId("t", number // 4, number % 4)
    made = make_chunk(trajectory, 1, tokens=TOKENS, context=CONTEXT)
    begin, end = CONTEXT, CONTEXT + TOKENS
    tokens = LAW.tokens(SEED, trajectory, begin, end, length=1000)
    logprobs = LAW.logprobs(SEED, trajectory, begin, end)
    return msgspec.structs.replace(
        made, worker=worker, tokens=(tokens + 3) % 60 + 2 if garbage else tokens, behavior_logprobs=logprobs
    )


def unit_of(*chunks: TrajectoryChunk) -> ClaimedUnit:
    return ClaimedUnit(str(chunks[0].trajectory), tuple((ScoredChunk(chunk, {}),) for chunk in chunks))


async def checked(
    folder: Path, tasks: asyncio.TaskGroup, share: float, *, is_recorded: bool = False
) -> tuple[LogprobCheck, ActorContext, Backend]:
    config = small_config(folder)
    if is_recorded:
        config = config.model_copy(update={"data": DataSection(responses=(folder / "no-data.jsonl",))})
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"logprob_check_share": share})})
    registry = MemoryRegistry(ManualClock())
    ctx = await context_of(config, folder, Role.LEARNER, "learner", tasks, registry, zmq_transport(), ManualClock())
    backend = Backend()
    return LogprobCheck(ctx, cast("Any", backend)), ctx, backend


def updates_of(versions: np.ndarray) -> np.ndarray:
    return versions.astype(np.int64)


async def test_the_heartbeat_has_the_generator_whose_tokens_are_not_the_policys(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        check, ctx, _ = await checked(tmp_path, tasks, share=1.0)
        for turn in range(6):
            chunks = [chunk_of(20 * turn + n, f"generator-{n % 4}#1", garbage=n % 4 == 2) for n in range(20)]
            await check.check_units([unit_of(*chunks)], updates_of, 0)
        gaps = {name: value for name, value in ctx.counters.items() if name.startswith(LOGPROB_GAP)}
        assert gaps[f"{LOGPROB_GAP}generator-2"] > 2.9
        assert {value for name, value in gaps.items() if not name.endswith("-2")} == {0.0}
        assert ctx.counters[f"{LOGPROB_USUAL_GAP}generator-2"] == 0.0
        assert ctx.counters["checked_chunks"] == 120
        ctx.close()


async def test_about_the_set_share_of_chunks_is_computed_again_and_none_at_zero(tmp_path: Path) -> None:
    names = [f"t.{group}.{member}.{index}" for group in range(1000) for member in range(4) for index in range(5)]
    assert sum(is_chosen(name, 0.01) for name in names) == pytest.approx(200, abs=60)
    assert all(is_chosen(name, 1.0) for name in names) and not any(is_chosen(name, 0.0) for name in names)
    units = [unit_of(*(chunk_of(n, "generator-0#1") for n in range(200)))]
    async with asyncio.TaskGroup() as tasks:
        for share in (0.0, 0.1):
            check, ctx, backend = await checked(tmp_path, tasks, share=share)
            await check.check_units(units, updates_of, 0)
            assert backend.num_computed == sum(is_chosen(f"t.{n // 4}.{n % 4}.1", share) for n in range(200))
            assert ("checked_chunks" in ctx.counters) is (share > 0.0)
            ctx.close()


async def test_recorded_responses_have_no_log_probs_to_check(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        for is_recorded in (False, True):
            check, ctx, backend = await checked(tmp_path, tasks, share=1.0, is_recorded=is_recorded)
            await check.check_units([unit_of(*(chunk_of(n, "generator-0#1") for n in range(4)))], updates_of, 0)
            assert backend.num_computed == (0 if is_recorded else 4)
            ctx.close()


async def test_a_large_fleet_reports_only_the_worst_and_forgets_earlier_names(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        check, ctx, _ = await checked(tmp_path, tasks, share=1.0)
        for turn in range(8):
            first = (turn // 4) * 30
            await check.check_units(
                [
                    unit_of(
                        *(chunk_of(n, f"generator-{n}#1", garbage=n == 7 or n > 45) for n in range(first, first + 30))
                    )
                ],
                updates_of,
                0,
            )
        names = [name for name in ctx.counters if name.startswith(LOGPROB_GAP)]
        assert len(names) == MAX_REPORTED
        assert {int(name.rpartition("-")[2]) for name in names} < {7, *range(46, 60)}
        ctx.close()


def test_a_chunk_becomes_a_sample_with_its_context_as_prompt_and_no_loss() -> None:
    chunk = msgspec.structs.replace(chunk_of(3, "generator-0#1"), segments=(Segment(4, 5), Segment(6, 3)))
    sample = sample_of(chunk)
    assert sample.prompt_length == 2 + CONTEXT and sample.response_length == TOKENS
    assert sample.tokens.tolist() == [1, 2, *range(CONTEXT), *chunk.tokens]
    assert sample.versions.tolist() == [4] * 5 + [6] * 3
    assert not sample.loss_mask.any() and sample.num_context_tokens == CONTEXT


async def test_chunks_without_a_worker_or_with_broken_numbers_are_left_out(tmp_path: Path) -> None:
    nameless = msgspec.structs.replace(chunk_of(1, ""), worker="")
    broken = msgspec.structs.replace(
        chunk_of(2, "generator-0#1"), behavior_logprobs=np.full(TOKENS, np.nan, np.float32)
    )
    async with asyncio.TaskGroup() as tasks:
        check, ctx, backend = await checked(tmp_path, tasks, share=1.0)
        await check.check_units([unit_of(nameless, broken)], updates_of, 0)
        assert backend.num_computed == 0
        await check.check_units([unit_of(nameless, broken, chunk_of(3, "generator-0#1"))], updates_of, 0)
        assert backend.num_computed == 1
        ctx.close()


def test_an_emulated_policy_finds_other_tokens_unlikely_and_its_own_as_they_were() -> None:
    backend = Backend()
    own, other = sample_of(chunk_of(5, "g#1")), sample_of(chunk_of(5, "g#1", garbage=True))
    ended = replace(own, tokens=np.concatenate([own.tokens[:-1], [1]]).astype(np.int32))
    for sample in (own, ended, replace(own, name="t.1.1")):
        np.testing.assert_array_equal(_one(backend, sample), sample.behavior_logprobs)
    assert (_one(backend, other) < -11.0).all()


def _one(backend: EmulatedTraining, sample: TrainingSample) -> np.ndarray:
    (found,) = backend.response_logprobs([sample])
    return found


HONEST = 0.02
"""Gap of a healthy engine at equal weights, in nats."""
MOVED = 0.05
"""Growth of the gap by one update."""


def noted(
    number: int, gap_of: Callable[[int, int], float], *, generators: int = 3, lag_of: Callable[[int], int] = lambda n: 0
) -> SamplerGaps:
    """So many chunks of each generator; ``gap_of(generator, lag)`` in nats."""
    gaps, rng = SamplerGaps(), np.random.default_rng(0)
    for turn in range(number):
        for one in range(generators):
            lag = lag_of(one)
            tokens = rng.exponential(gap_of(one, lag), 32).astype(np.float32)
            gaps.record(f"generator-{one}#{1 + turn // 1000}", tokens, np.full(32, lag))
    return gaps


def by_name(gaps: SamplerGaps) -> dict[str, GeneratorGap]:
    return {one.worker: one for one in gaps.worst(100)}


def test_a_generator_with_other_tokens_stands_out_and_its_peers_do_not() -> None:
    for generators in (2, 3, 8):
        found = by_name(noted(12, lambda one, _: 6.0 if one == 1 else HONEST, generators=generators))
        assert found["generator-1"].excess > 2.0 and found["generator-1"].usual < 0.1
        assert all(one.excess < 0.1 for name, one in found.items() if name != "generator-1")


def test_staleness_alone_makes_no_excess_when_peers_are_as_stale() -> None:
    stale = noted(12, lambda _, lag: HONEST + MOVED * lag, lag_of=lambda one: 6)
    assert all(one.gap > 0.25 and abs(one.excess) < 0.1 for one in by_name(stale).values())


def test_tokens_at_a_lag_that_no_peer_has_are_not_judged() -> None:
    behind = noted(12, lambda _, lag: HONEST + MOVED * lag, lag_of=lambda one: 40 if one == 2 else 0)
    assert set(by_name(behind)) == {"generator-0", "generator-1"}
    assert all(abs(one.excess) < 0.1 for one in by_name(behind).values())


def test_a_chunk_across_versions_is_compared_at_each_of_its_lags() -> None:
    gaps = SamplerGaps()
    lags = np.repeat([0, 3], 16)
    for _ in range(10):
        for one in range(3):
            gaps.record(f"generator-{one}#1", np.where(lags == 0, 0.01, 0.5).astype(np.float32), lags)
    (one, *_) = gaps.worst(1)
    assert one.gap == pytest.approx(0.255) and one.usual == pytest.approx(0.255)


def test_a_lone_generator_is_compared_with_its_own_past() -> None:
    gaps = noted(30, lambda _, __: HONEST, generators=1)
    assert abs(by_name(gaps)["generator-0"].excess) < 0.05
    for _ in range(FEWEST_CHUNKS):
        gaps.record("generator-0#1", np.full(32, 6.0, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-0"].excess > 0.8


def test_a_successor_begins_anew_and_few_chunks_are_no_report() -> None:
    gaps = noted(12, lambda one, _: 6.0 if one == 1 else HONEST)
    gaps.record("generator-1#2", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert "generator-1" not in by_name(gaps)
    for _ in range(FEWEST_CHUNKS):
        gaps.record("generator-1#2", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-1"].excess < 0.1


def test_few_tokens_are_no_report_however_many_chunks_they_are_in() -> None:
    gaps = SamplerGaps()
    for turn in range(LAST_CHUNKS):
        for one in range(3):
            gaps.record(f"generator-{one}#1", np.full(2, 3.0, np.float32), np.zeros(2, int))
        assert gaps.worst(9) == [], f"{2 * turn + 2} tokens"


def test_single_tokens_that_became_very_unlikely_are_no_great_gap() -> None:
    gaps = SamplerGaps()
    for turn in range(12):
        for one in range(3):
            tokens = np.full(32, HONEST, np.float32)
            tokens[0] = 40.0 if one == 1 and turn > 3 else HONEST
            gaps.record(f"generator-{one}#1", tokens, np.zeros(32, int))
    assert 0.05 < by_name(gaps)["generator-1"].excess < 0.15


def test_a_generator_that_is_well_again_is_so_after_few_chunks() -> None:
    gaps = noted(12, lambda one, _: 6.0 if one == 1 else HONEST)
    for _ in range(LAST_CHUNKS):
        gaps.record("generator-1#1", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-1"].excess < 0.1


def test_the_worst_come_first_and_relabelled_generators_change_nothing() -> None:
    gaps = noted(12, lambda one, _: HONEST * (1 + 40 * one), generators=5)
    assert [one.worker for one in gaps.worst(2)] == ["generator-4", "generator-3"]
    turned = noted(12, lambda one, _: HONEST * (1 + 40 * (4 - one)), generators=5)
    assert [one.worker for one in turned.worst(2)] == ["generator-0", "generator-1"]
