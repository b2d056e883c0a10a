"""Claims about evaluations as the learner keeps them, on the ledger in memory with a clock driven
by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.config.data_sets import EvaluationSection
from pipeline.data.source import HeldOutSource
from pipeline.ledger.types import EvaluationRequest
from pipeline.observability.history import EvaluationRow
from pipeline.observability.prompt_accuracies import EVALUATIONS_NAME, prompt_accuracies
from pipeline.runtime.context import ActorContext
from protocol.ids import Role
from protocol.trajectory import Field
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward
from tests.pipeline.runtime.fakes import small_config
from tests.transports import zmq_transport
from workers.learner.evaluations import Evaluations


@dataclass
class Bench:
    ctx: ActorContext
    ledger: MemoryLedger
    clock: ManualClock
    evaluations: Evaluations
    rows: list[EvaluationRow]

    def collected(self) -> list[EvaluationRow]:
        """Return the evaluations recorded since the last call."""
        rows = self.rows[:]
        self.rows.clear()
        return rows

    async def answer(self, accuracies: list[float]) -> None:
        """Sample and score as many evaluation responses as there are accuracies."""
        grant = await self.ledger.lease(GENERATOR, max_trajectories=len(accuracies))
        for lease, accuracy in zip(grant.leases, accuracies, strict=True):
            chunk = make_chunk(lease.trajectory, version=3)
            await self.ledger.write_chunk(GENERATOR, chunk)
            await self.ledger.write_score(SCORER, chunk.id, reward(accuracy))


@asynccontextmanager
async def _opened(tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    clock = ManualClock()
    ledger = MemoryLedger(lambda _: 1, clock.time)
    await ledger.open(make_spec())
    section = EvaluationSection.model_validate({"num_prompts": 4, "timeout_s": 60.0} | settings)
    config = small_config(tmp_path).model_copy(update={"evaluation": section})
    async with asyncio.TaskGroup() as tasks:
        ctx = ActorContext(
            config=config,
            run_dir=tmp_path,
            who=LEARNER,
            ledger=ledger,
            registry=MemoryRegistry(clock),
            transport=zmq_transport(),
            log=cast("FilteringBoundLogger", structlog.get_logger("test")),
            clock=clock,
            tasks=tasks,
        )
        assert LEARNER.role is Role.LEARNER
        try:
            rows = list[EvaluationRow]()
            yield Bench(
                ctx,
                ledger,
                clock,
                Evaluations(ctx, rows.append, sets=(HeldOutSource("", 0, 100, "of the prompts"),)),
                rows,
            )
        finally:
            ctx.close()


async def test_a_complete_evaluation_becomes_one_row(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        await bench.evaluations.collect()
        assert bench.collected() == []
        await bench.answer([1.0, 0.0, 1.0, 1.0])
        await bench.evaluations.collect()
        (row,) = bench.collected()
        assert (row.number, row.policy_version, row.num_responses, row.accuracy) == (0, 3, 4, 0.75)
        assert (row.oldest_version, row.newest_version, row.num_failed) == (3, 3, 0)
        await bench.evaluations.collect()
        assert bench.collected() == [], "told once"
        ((kept,), _) = prompt_accuracies(tmp_path).read()
        assert (kept.number, kept.policy_version, kept.digest) == (0, 3, "of the prompts")
        assert sorted(each or 0.0 for each in kept.accuracies) == [0.0, 1.0, 1.0, 1.0]


async def test_a_response_that_could_not_be_scored_is_told_and_never_counts_as_wrong(tmp_path: Path) -> None:
    async with _opened(tmp_path, samples_per_prompt=2, num_prompts=2) as bench:
        await bench.evaluations.request(3)
        await bench.answer([1.0, 1.0, 1.0])
        [lease] = (await bench.ledger.lease(GENERATOR, max_trajectories=1)).leases
        chunk = make_chunk(lease.trajectory, version=3)
        await bench.ledger.write_chunk(GENERATOR, chunk)
        for _ in range(2):
            await bench.ledger.fail_score(SCORER, chunk.id, Field.REWARD, "Traceback")
        await bench.evaluations.collect()
        (row,) = bench.collected()
        assert (row.num_responses, row.num_failed, row.accuracy, row.pass_at_k) == (3, 1, 1.0, 1.0)
        ((kept,), _) = prompt_accuracies(tmp_path).read()
        assert [*kept.accuracies] == [1.0, 1.0]


async def test_a_disk_without_room_for_prompt_accuracies_changes_nothing_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / EVALUATIONS_NAME).mkdir()
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        await bench.answer([1.0, 0.0, 1.0, 1.0])
        await bench.evaluations.collect()
        assert len(bench.collected()) == 1


async def test_an_evaluation_past_its_deadline_is_recorded_with_what_is_there(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        await bench.answer([1.0])
        await bench.evaluations.collect()
        assert bench.collected() == []
        await bench.clock.advance(60.0)
        await bench.evaluations.collect()
        (row,) = bench.collected()
        assert (row.num_responses, row.accuracy) == (1, 1.0)


async def test_waiting_ends_at_the_deadline_when_nobody_answers_and_records_nothing(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(bench.evaluations.wait())
            await bench.clock.advance(59.0)
            assert not job.done()
            await bench.clock.advance(2.0)
        assert job.done() and bench.collected() == []


async def test_an_evaluation_that_the_ledger_forgot_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        bench.ctx.ledger = MemoryLedger(lambda _: 1, bench.clock.time)
        await bench.ctx.ledger.open(make_spec())
        await bench.clock.advance(61.0)
        await bench.evaluations.wait()
        assert bench.collected() == []


async def test_waiting_reports_the_share_of_the_responses_in_the_heartbeat(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        await bench.answer([1.0])
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(bench.evaluations.wait())
            await bench.clock.advance(0.5)
            report = bench.ctx.work.report()
            assert (report.kind, report.amount, report.unit) == ("evaluation", 4.0, "responses")
            assert report.share == pytest.approx(0.25)
            await bench.answer([1.0, 0.0, 1.0])
            await bench.clock.advance(0.5)
            await job
        assert len(bench.collected()) == 1
        assert bench.ctx.work.report().kind == ""


async def test_waiting_ends_when_the_worker_drains(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.evaluations.request(3)
        bench.ctx.draining.set()
        await bench.evaluations.wait()
        assert bench.collected() == []


async def test_numbers_go_on_after_a_restart_and_prompts_are_those_there_are(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        later = Evaluations(bench.ctx, bench.rows.append, sets=(HeldOutSource("", 0, 2),), next_number=5)
        await later.request(9)
        assert later.next_number == 6
        state = await bench.ledger.evaluation(5)
        assert state is not None
        assert state.request.num_prompts == 2
        assert not Evaluations(bench.ctx, bench.rows.append, sets=()).is_enabled


async def test_an_evaluation_is_asked_for_as_the_run_has_it_set(tmp_path: Path) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.6,
        "top_k": 9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
    }
    sampling |= {"stop_strings": ("Q:",), "max_response_tokens": 5}
    settings = {"num_prompts": 3, "samples_per_prompt": 5} | sampling
    async with _opened(tmp_path, **settings) as bench:
        await bench.evaluations.request(9)
        state = await bench.ledger.evaluation(0)
        assert state is not None
        assert state.request == EvaluationRequest(0, 9, num_prompts=3, samples_per_prompt=5, **sampling)


async def test_a_version_that_was_just_evaluated_is_not_evaluated_again(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        for version in (8, 9, 9):
            await bench.evaluations.request(version)
        assert bench.evaluations.pending == ((0, 8), (1, 9))


async def test_an_evaluation_ends_responses_as_training_does_unless_it_is_set(tmp_path: Path) -> None:
    sets = [{"name": "a", "files": ["a"]}, {"name": "b", "files": ["b"], "stop_strings": []}]
    async with _opened(tmp_path, sets=sets) as bench:
        generation = bench.ctx.config.generation.model_copy(update={"stop_strings": ("</b>",)})
        bench.ctx.config = bench.ctx.config.model_copy(update={"generation": generation})
        held_out = (HeldOutSource("a", 0, 5), HeldOutSource("b", 5, 2))
        await Evaluations(bench.ctx, bench.rows.append, sets=held_out).request(3)
        states = [await bench.ledger.evaluation(number) for number in (0, 1)]
        assert [state and state.request.stop_strings for state in states] == [("</b>",), ()]


async def test_an_evaluation_is_recorded_in_the_step_in_which_it_is_no_longer_pending(tmp_path: Path) -> None:
    """A checkpoint between the two would lose it: the checkpoint holds the pending evaluations, the
    history the recorded ones."""
    async with _opened(tmp_path) as bench:
        pending = list[int]()
        later = Evaluations(
            bench.ctx, lambda row: pending.append(len(later.pending)), sets=(HeldOutSource("", 0, 100),)
        )
        await later.request(3)
        await later.request(4)
        seen = list[tuple[int, int]]()

        async def slow(number: int) -> object:
            seen.append((len(later.pending), len(pending)))
            return await MemoryLedger.evaluation(bench.ledger, number)

        await bench.answer([1.0] * 8)
        bench.ledger.evaluation = slow  # pyright: ignore[reportAttributeAccessIssue]
        await later.collect()
        assert seen == [(2, 0), (1, 1)]
        assert pending == [1, 0]


async def test_each_set_is_evaluated_with_its_settings_prompts_and_estimates(tmp_path: Path) -> None:
    sets = [
        {"name": "gsm8k", "files": ["g"], "num_prompts": 1},
        {
            "name": "aime",
            "files": ["a"],
            "samples_per_prompt": 4,
            "temperature": 1.0,
            "top_p": 0.7,
            "pass_at": 2,
            "min_p": 0.2,
        },
    ]
    async with _opened(tmp_path) as bench:
        section = EvaluationSection.model_validate({"num_prompts": 4, "top_k": 5, "sets": sets, "main": "aime"})
        bench.ctx.config = bench.ctx.config.model_copy(update={"evaluation": section})
        held_out = (HeldOutSource("gsm8k", 0, 5), HeldOutSource("aime", 5, 2))
        evaluations = Evaluations(bench.ctx, bench.rows.append, sets=held_out)
        await evaluations.request(3)
        first, second = [await bench.ledger.evaluation(number) for number in (0, 1)]
        assert first is not None and second is not None
        assert first.request == EvaluationRequest(0, 3, 1, 1, 0.0, set="gsm8k", top_k=5)
        assert second.request == EvaluationRequest(1, 3, 2, 4, 1.0, 0.7, 5, "aime", 5, 0.2)
        await bench.answer([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
        await evaluations.collect()
        gsm8k, aime = bench.collected()
        assert (gsm8k.set_name, gsm8k.is_main, gsm8k.accuracy, gsm8k.pass_at_k) == ("gsm8k", False, 0.0, None)
        assert (aime.set_name, aime.is_main, aime.accuracy) == ("aime", True, 0.625)
        assert (aime.pass_k, aime.pass_at_k) == (2, (0.5 + 1.0) / 2)
        assert aime.low is not None and aime.high is not None
        assert 0.0 < aime.low < 0.625 < aime.high < 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"main": "other", "sets": [{"name": "a", "files": ["x"]}]}, "evaluation.main is 'other'"),
        ({"sets": [{"name": "a", "files": ["x"]}] * 2}, "a different name"),
        ({"pass_at": 4}, "pass_at is 4, above samples_per_prompt 1"),
        ({"sets": [{"name": "a", "files": ["x"], "pass_at": 2}]}, "evaluation.sets a: pass_at is 2"),
    ],
)
def test_evaluation_sets_that_contradict_themselves_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluationSection.model_validate(settings)
