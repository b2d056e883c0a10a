"""The picture of a run: its content, and that its rates are those of the work."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.common import echo_json
from pipeline.observability.history import HISTORY_NAME, resume_history, run_history
from pipeline.operator.overview import MAX_UPDATES, RunOverview
from pipeline.operator.rates import QueueOverview
from pipeline.runtime.registry.contract import LinkReport, RunState, RunStatus, WaitingFor
from protocol.errors import LedgerUnavailable
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import Field, GuidanceScore, ReferenceScore
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, reward
from tests.pipeline.observability.rows import evaluation_row, update_row
from tests.pipeline.operator.small_run import SmallRun, small_run


def queue(picture: RunOverview, name: str, kind: str = "ledger") -> QueueOverview:
    (found,) = [row for row in picture.queues if row.name == name and row.kind == kind]
    return found


async def sample(run: SmallRun, num_groups: int, num_scored: int) -> None:
    """Lease and write groups of two, and score some of their responses with signal."""
    grant = await run.ledger.lease(GENERATOR, max_trajectories=2 * num_groups)
    assert len(grant.leases) == 2 * num_groups
    for lease in grant.leases:
        await run.ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory))
    for lease in grant.leases[:num_scored]:
        await run.ledger.write_score(SCORER, make_chunk(lease.trajectory).id, reward(lease.trajectory.member % 2))


async def test_a_picture_says_who_is_there_who_is_missing_and_what_all_wait_for(tmp_path: Path) -> None:
    run = await small_run(tmp_path, fleet={Role.LEARNER: 1, Role.GENERATOR: 2, Role.REWARD: 1})
    await run.beat(Role.LEARNER, "learner", waiting_for=WaitingFor.INPUT)
    await run.beat(Role.GENERATOR, "generator-0", detail="a window", version=3)
    picture = await run.reader().read()
    assert [(role.role, role.num_live, role.num_wanted) for role in picture.roles] == [
        ("learner", 1, 1),
        ("generator", 1, 2),
        ("reward", 0, 1),
    ]
    assert picture.absent == ("generator-1", "reward-0")
    assert picture.waits == "learner waits for generator-0, which is at compute: a window"
    assert dict(picture.versions.sampling) == {3: 1}
    assert (picture.state, picture.is_over, picture.trouble) == (RunState.RUNNING, False, "")
    assert {role.role: dict(role.waiting_for) for role in picture.roles}[Role.LEARNER] == {"input": 1}


async def test_a_picture_is_json_whatever_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = await small_run(tmp_path)
    await run.beat(Role.GENERATOR, "generator-0", sampled_tokens=math.nan, version=4)
    echo_json(await run.reader().read())
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["sampling"] == {"4": 1}
    assert told["workers"][0]["worker"] == "generator-0"
    assert told["queues"][0]["name"] == "credit"


async def test_rates_of_the_ledgers_queues_are_those_of_the_work(tmp_path: Path) -> None:
    """Ten seconds: 4 groups of 2 are sampled, and 6 of 8 responses scored: 3 groups are ready."""
    run = await small_run(tmp_path)
    reader = run.reader()
    await run.beat(Role.REWARD, "reward-0", scored=100)
    first = await reader.read()
    assert queue(first, "open").in_per_s is None
    await sample(run, num_groups=4, num_scored=6)
    await run.clock.advance(10.0)
    await run.beat(Role.REWARD, "reward-0", scored=106)
    second = await reader.read()
    assert (queue(second, "open").in_per_s, queue(second, "open").out_per_s) == (0.8, 0.8)
    assert (queue(second, "leased").in_per_s, queue(second, "leased").out_per_s) == pytest.approx((0.8, 0.8))
    assert (queue(second, "reward").in_per_s, queue(second, "reward").out_per_s) == pytest.approx((0.8, 0.6))
    assert queue(second, "reward").depth == 2
    assert (queue(second, "ready").in_per_s, queue(second, "ready").out_per_s) == pytest.approx((0.6, 0.0))
    assert second.rates.written_tokens == pytest.approx(2.4)
    assert second.rates.admitted_groups == pytest.approx(0.4)
    assert queue(second, "dead").in_per_s is None


async def test_a_reference_worker_s_two_queues_have_rates_of_their_own(tmp_path: Path) -> None:
    """Ten seconds: 8 chunks come and are scored, 6 of them are judged, and 4 of those guided."""
    run = await small_run(tmp_path, fields=frozenset({Field.REWARD, Field.REFERENCE, Field.GUIDANCE}))
    reader = run.reader()
    await run.beat(Role.REFERENCE, "reference-0", scored=100, guided=50)
    await reader.read()
    await sample(run, num_groups=4, num_scored=6)
    for chunk in (make_chunk(TrajectoryId("t", group, member)).id for group in range(4) for member in range(2)):
        await run.ledger.write_score(SCORER, chunk, ReferenceScore(logprobs=np.zeros(3, np.float32)))
        if chunk.trajectory.group < 2:
            logprobs = np.zeros(3, np.float32)
            score = GuidanceScore(standard_logprobs=logprobs, judge_logprobs=logprobs, guide_version="v")
            await run.ledger.write_score(SCORER, chunk, score)
    await run.clock.advance(10.0)
    await run.beat(Role.REFERENCE, "reference-0", scored=108, guided=54)
    second = await reader.read()
    scored, guided = queue(second, "reference"), queue(second, "guidance")
    assert (scored.depth, scored.in_per_s, scored.out_per_s) == (0, pytest.approx(0.8), pytest.approx(0.8))
    assert (guided.depth, guided.in_per_s, guided.out_per_s) == (2, pytest.approx(0.6), pytest.approx(0.4))
    assert guided.waiting_for == "reference"


async def test_a_claim_and_its_settlement_show_as_what_the_learner_takes_and_trains(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()
    await sample(run, num_groups=4, num_scored=8)
    await reader.read()
    claim = await run.ledger.claim(LEARNER, policy_version=0)
    await run.clock.advance(1.0)
    taken = await reader.read()
    assert (queue(taken, "ready").out_per_s, queue(taken, "claimed").in_per_s) == (4.0, 4.0)
    assert queue(taken, "claimed").out_per_s == 0.0
    await run.ledger.settle(LEARNER, (claim.claim_id,), num_updates=1)  # type: ignore[union-attr]
    await run.clock.advance(1.0)
    settled = await reader.read()
    # The mean over both seconds.
    assert (queue(settled, "ready").out_per_s, queue(settled, "claimed").out_per_s) == (2.0, 2.0)


async def test_rates_of_mailboxes_are_those_of_their_links_and_survive_a_restart(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()

    async def beats(sent: int, received: int, *, epoch: int = 1) -> RunOverview:
        link = "generator-0>reward-0"
        await run.beat(Role.GENERATOR, "generator-0", epoch=epoch, links=(LinkReport(name=link, sent=sent),))
        await run.beat(Role.REWARD, "reward-0", links=(LinkReport(name=link, received=received),))
        return await reader.read()

    await beats(100, 90)
    await run.clock.advance(2.0)
    box = queue(await beats(120, 118), "reward", "mailbox")
    assert (box.depth, box.in_per_s, box.out_per_s) == (2, 10.0, 14.0)
    await run.clock.advance(2.0)
    # The generator began anew: its counter is at 20, and 20 were sent.
    box = queue(await beats(20, 138, epoch=2), "reward", "mailbox")
    assert (box.in_per_s, box.out_per_s) == (10.0, 12.0)


async def test_what_is_sent_to_more_workers_than_a_sender_names_is_not_guessed(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()
    picture = await reader.read()
    for _ in range(2):
        links = tuple(LinkReport(name=f"generator-0>reward-{n}", sent=5) for n in range(8))
        await run.beat(Role.GENERATOR, "generator-0", links=(*links, LinkReport(name="generator-0>(others)", sent=9)))
        for number in range(9):
            link = LinkReport(name=f"generator-0>reward-{number}", received=3)
            await run.beat(Role.REWARD, f"reward-{number}", links=(link,))
        await run.clock.advance(1.0)
        picture = await reader.read()
    box = queue(picture, "reward", "mailbox")
    assert (box.in_per_s, box.out_per_s) == (None, 0.0)


async def test_tokens_a_second_go_on_when_a_generator_starts_again(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()
    rates: list[float | None] = []
    for epoch, tokens in ((1, 1000.0), (1, 1500.0), (2, 500.0)):
        await run.beat(Role.GENERATOR, "generator-0", epoch=epoch, sampled_tokens=tokens)
        rates.append((await reader.read()).rates.sampled_tokens)
        await run.clock.advance(1.0)
    assert rates == [None, 500.0, 500.0]


async def test_a_ledger_without_an_answer_leaves_the_last_picture_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()
    await run.beat(Role.GENERATOR, "generator-0")
    before = await reader.read()

    async def away(*_: object) -> None:
        raise LedgerUnavailable("no server\x1b[2J answers")

    monkeypatch.setattr(run.ledger, "totals", away)
    await run.clock.advance(7.0)
    picture = await reader.read()
    assert picture.trouble == "no server\\x1b[2J answers"
    assert picture.trouble_s == 7.0
    assert picture.workers == before.workers
    monkeypatch.undo()
    assert (await reader.read()).trouble == ""


async def test_a_first_picture_without_an_answer_is_empty_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await small_run(tmp_path)

    async def away(*_: object) -> None:
        raise LedgerUnavailable("no server answers")

    monkeypatch.setattr(run.registry.__class__, "run_status", away)
    picture = await run.reader().read()
    assert (picture.trouble, picture.workers, picture.name) == ("no server answers", (), "op")


async def test_a_run_without_supervisor_and_workers_is_over(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    reader = run.reader()
    await run.beat(Role.GENERATOR, "generator-0")
    assert not (await reader.read()).is_over
    await run.registry.fence("generator-0")
    await run.registry.set_run_status(RunStatus(RunState.FINISHED, "4 updates done"))
    picture = await reader.read()
    assert (picture.is_over, picture.state, picture.detail) == (True, RunState.FINISHED, "4 updates done")
    assert picture.absent == ()


async def test_progress_keeps_the_newest_updates_and_the_first_evaluation(
    tmp_path: Path,
) -> None:
    run = await small_run(tmp_path)
    history = run_history(run.run_dir / HISTORY_NAME)
    history.append(evaluation_row(0, 0, 0.25))
    for update in range(1, 1001):
        history.append(update_row(update, accuracy=0.5))
    history.append(evaluation_row(1, 1000, 0.75))
    reader = run.reader()
    picture = await reader.read()
    assert picture.progress.num_updates == 1000
    assert len(picture.progress.accuracies) == MAX_UPDATES
    assert picture.progress.held_out == (0.25, 0.75)
    assert (picture.versions.staleness_mean, picture.versions.staleness_max) == (0.5, 1)
    # A learner that went back to version 900 writes the history anew.
    history = resume_history(run.run_dir / HISTORY_NAME, last_version=900)
    history.append(update_row(901, accuracy=1.0))
    picture = await reader.read()
    assert picture.progress.num_updates == 901
    assert picture.progress.held_out == (0.25,)
