"""The learner's second look at log-probs: whose chunks, how many, and what its heartbeat has."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from ops.emulated.law import TokenLaw
from ops.emulated.training import EmulatedTraining
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.learning import DataSection
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.counter_names import LOGPROB_GAP, LOGPROB_USUAL_GAP
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import Segment, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.logprob_check import MAX_REPORTED, LogprobCheck, is_chosen, sample_of

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
            await check.look([unit_of(*chunks)], updates_of, 0)
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
            await check.look(units, updates_of, 0)
            assert backend.num_computed == sum(is_chosen(f"t.{n // 4}.{n % 4}.1", share) for n in range(200))
            assert ("checked_chunks" in ctx.counters) is (share > 0.0)
            ctx.close()


async def test_recorded_responses_have_no_log_probs_to_check(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        for is_recorded in (False, True):
            check, ctx, backend = await checked(tmp_path, tasks, share=1.0, is_recorded=is_recorded)
            await check.look([unit_of(*(chunk_of(n, "generator-0#1") for n in range(4)))], updates_of, 0)
            assert backend.num_computed == (0 if is_recorded else 4)
            ctx.close()


async def test_a_large_fleet_reports_only_the_worst_and_forgets_earlier_names(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        check, ctx, _ = await checked(tmp_path, tasks, share=1.0)
        for turn in range(8):
            first = (turn // 4) * 30
            await check.look(
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
        await check.look([unit_of(nameless, broken)], updates_of, 0)
        assert backend.num_computed == 0
        await check.look([unit_of(nameless, broken, chunk_of(3, "generator-0#1"))], updates_of, 0)
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
