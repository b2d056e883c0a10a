"""Claims about verifiers that judge several responses at once."""

from __future__ import annotations

import pytest

from pipeline.process.work import Meter, listening
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Verdict, VerifierFailureKind, VerifierOutcome
from tests.pipeline.rewards.test_pool import EVERYTHING, USER, Limits, failure, judge, response


@pytest.fixture
def only_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no step for each second that goes by: a busy machine takes longer."""
    monkeypatch.setattr("pipeline.process.work._BEAT_S", 600.0)


@pytest.mark.usefixtures("only_verdicts")
async def test_every_verdict_of_a_batch_is_told_as_it_comes() -> None:
    meter = Meter()
    with listening(meter), meter.task("scoring", 3.0, "responses"):
        await judge(*(response("1", by=f"{USER}:equals") for _ in range(3)))
        report = meter.report()
    assert (report.steps, report.share) == (3, pytest.approx(1.0))


def together(outcome: VerifierOutcome) -> float:
    assert isinstance(outcome, Verdict)
    return outcome.parts["together"]


async def test_a_verifier_of_several_responses_a_call_gets_them_shared_among_processes() -> None:
    async with VerifierPool(Limits(processes=2), configured=EVERYTHING) as pool:
        asked = [response(str(n), by=f"{USER}:counts_its_batch") for n in range(6)]
        sizes = sorted(together(outcome) for outcome in await pool.score(asked))
        assert max(sizes) <= 3.0, "an equal share for each process"
        assert max(sizes) > 1.0
        (alone,) = await pool.score(asked[:1])
        assert together(alone) == 1.0
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        assert [together(outcome) for outcome in await pool.score(asked)] == [4.0] * 4 + [2.0] * 2


@pytest.mark.parametrize("how", ["raise", "hang", "die"])
async def test_one_response_of_a_batch_spoils_no_other(how: str) -> None:
    asked = [response(text, by=f"{USER}:counts_its_batch") for text in ("a", how, "b")]
    first, culprit, last = await judge(*asked, limits=Limits(timeout_s=1.0))
    assert together(first) == together(last) == 1.0
    kinds = {"raise": VerifierFailureKind.RAISED, "hang": VerifierFailureKind.LATE, "die": VerifierFailureKind.DIED}
    assert failure(culprit).kind is kinds[how]


@pytest.mark.usefixtures("only_verdicts")
async def test_every_call_is_a_piece_of_work_also_when_a_batch_is_judged_one_by_one() -> None:
    meter = Meter()
    with listening(meter), meter.task("scoring", 3.0, "responses"):
        await judge(*(response(text, by=f"{USER}:counts_its_batch") for text in ("a", "raise", "b")))
        report = meter.report()
    assert (report.steps, report.share) == (4, pytest.approx(1.0))
