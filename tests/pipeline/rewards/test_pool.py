from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipeline.config.training import RewardSection
from pipeline.ledger.url import without_ledger_password
from pipeline.process.records import process_runs
from pipeline.rewards import registry
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import VerifierSpec
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError

USER = "tests.pipeline.rewards.user_verifiers"
HOSTILE = "\\boxed{9^{9^{9^{9}}}}"


class Limits(RewardSection):
    timeout_s: float = 10.0


def response(text: str, answer: str = "1", *, by: str, **extra: object) -> Response:
    return Response(response_text=text, answer=answer, verifier=by, extra=extra)


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING = _Everything()


async def judge(
    *responses: Response, limits: Limits | None = None, memory_bytes: int = 1 << 30
) -> list[VerifierOutcome]:
    async with VerifierPool(limits or Limits(), configured=EVERYTHING, memory_bytes=memory_bytes) as pool:
        return await pool.score(responses)


def late(wait_s: float, verifier: str) -> VerifierFailure:
    error = f"not judged within {wait_s:g} s; the process of verifier {verifier!r} was killed"
    return VerifierFailure(kind=VerifierFailureKind.LATE, error=error)


def over_budget(cpu_s: float, verifier: str) -> VerifierFailure:
    used = f"used more than {cpu_s:g} s of processor time (reward.timeout_s); its process was killed"
    return VerifierFailure(kind=VerifierFailureKind.OVER_BUDGET, error=f"verifier {verifier!r} {used}")


def is_right(outcome: VerifierOutcome) -> bool:
    return isinstance(outcome, Verdict) and outcome.judged and outcome.accuracy == 1.0


def failure(outcome: VerifierOutcome) -> VerifierFailure:
    assert isinstance(outcome, VerifierFailure), outcome
    return outcome


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_reaped(pid: int) -> None:
    async with asyncio.timeout(10.0):
        await asyncio.sleep(0.01)
        while is_alive(pid):  # noqa: ASYNC110  an event loop's child watcher announces nothing
            await asyncio.sleep(0.01)


async def test_outcomes_come_in_the_order_of_the_responses_whatever_verifier_each_names() -> None:
    outcomes = await judge(
        response("\\boxed{\\frac{2}{4}}", "\\frac12", by="math"),
        response("so 7", "8", by="arithmetic"),
        response("5", "5", by=f"{USER}:equals"),
        response("Answer: 12", "12", by="dapo_math"),
        response("x", "3", by="math"),
        limits=Limits(processes=2),
    )
    assert [o.accuracy for o in outcomes if isinstance(o, Verdict)] == [1.0, 0.0, 1.0, 1.0, 0.0]


async def test_an_empty_batch_starts_no_process() -> None:
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        assert await pool.score([]) == []
        assert await pool.score([response("5", "5", by="arithmetic")]) == [Verdict(accuracy=1.0)]
        assert pool.pids == []


async def test_a_hostile_expression_has_no_verdict_after_its_processor_time_and_spoils_no_other() -> None:
    async with VerifierPool(Limits(timeout_s=0.5, wait_s=60.0), configured=EVERYTHING) as pool:
        await pool.start(["math"])
        (victim,) = pool.pids
        started = time.monotonic()
        hostile, innocent = await pool.score(
            [response(HOSTILE, "9^{9^{9^{8}}}", by="math"), response("\\boxed{4}", "4", by="math")]
        )
        took = time.monotonic() - started
        assert hostile == over_budget(0.5, "math")
        assert is_right(innocent)
        assert not is_alive(victim)
        assert took < 30.0


async def test_a_call_that_waits_is_late_and_one_that_works_is_over_its_budget_and_neither_is_wrong() -> None:
    hung, spun, child, well = await judge(
        response("hang", by=f"{USER}:hangs_when_told"),
        response("", by=f"{USER}:spins_without_the_interpreter"),
        response("", by=f"{USER}:spins_in_a_child"),
        response("go on", by=f"{USER}:hangs_when_told"),
        limits=Limits(timeout_s=0.3, wait_s=10.0, processes=2),
    )
    assert hung == late(10.0, f"{USER}:hangs_when_told")
    assert spun == over_budget(0.3, f"{USER}:spins_without_the_interpreter")
    assert child == over_budget(0.3, f"{USER}:spins_in_a_child")
    assert well == Verdict(accuracy=1.0)


async def test_what_a_verifier_used_in_earlier_calls_is_not_counted_in_a_later_one() -> None:
    async with VerifierPool(Limits(timeout_s=0.4, wait_s=30.0), configured=EVERYTHING) as pool:
        asked = [response("0.2", by=f"{USER}:works_for_so_long") for _ in range(4)]
        assert await pool.score(asked) == [Verdict(accuracy=1.0)] * 4


async def test_a_raising_verifier_gives_its_traceback_and_never_a_score() -> None:
    (outcome,) = await judge(response("5", "5", by=f"{USER}:raises"))
    assert failure(outcome).kind is VerifierFailureKind.RAISED
    assert "no rule for 5" in failure(outcome).error
    assert "user_verifiers.py" in failure(outcome).error


async def test_what_a_verifier_prints_does_not_reach_the_protocol() -> None:
    outcomes = await judge(response("a", by=f"{USER}:prints_a_lot"), response("b", by=f"{USER}:prints_a_lot"))
    assert outcomes == [Verdict(accuracy=1.0)] * 2


async def test_a_verifier_that_corrupts_the_protocol_fails_and_its_process_is_replaced() -> None:
    corrupt, after = await judge(
        response("", by=f"{USER}:scribbles_on_every_descriptor"), response("1", "1", by=f"{USER}:equals")
    )
    assert failure(corrupt).kind is VerifierFailureKind.DIED
    assert after == Verdict(accuracy=1.0)


async def test_numpy_numbers_are_numbers() -> None:
    assert await judge(response("", by=f"{USER}:returns_numpy")) == [Verdict(accuracy=0.5, parts={"bonus": 0.25})]


async def test_huge_replies_and_huge_messages_are_cut() -> None:
    much, message = await judge(
        response("", by=f"{USER}:returns_too_much"), response("", by=f"{USER}:raises_with_a_huge_message")
    )
    assert failure(much).kind is VerifierFailureKind.BAD_VERDICT
    assert "bytes" in failure(much).error
    assert failure(message).kind is VerifierFailureKind.RAISED
    assert len(failure(message).error) <= 8_000


async def test_a_verifier_that_exits_or_dies_is_replaced_for_the_next_response() -> None:
    exits, dies, after = await judge(
        response("", by=f"{USER}:exits"), response("", by=f"{USER}:dies"), response("1", "1", by=f"{USER}:equals")
    )
    assert failure(exits).kind is VerifierFailureKind.RAISED
    assert failure(dies).kind is VerifierFailureKind.DIED
    assert "exited with code 7" in failure(dies).error
    assert after == Verdict(accuracy=1.0)


async def test_a_verifier_cannot_take_more_memory_than_its_limit() -> None:
    grown, after = await judge(response("", by=f"{USER}:grows"), response("1", "1", by=f"{USER}:equals"))
    assert failure(grown).kind in (VerifierFailureKind.RAISED, VerifierFailureKind.DIED)
    assert "MemoryError" in failure(grown).error
    assert after == Verdict(accuracy=1.0)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nothing", "NoneType"),
        ("text", "str"),
        ("too few", "0 outcomes for 1"),
        ("too large", "accuracy is 1.5"),
        ("not a number", "accuracy is nan"),
        ("not an outcome", "object"),
        ("a reserved part", "'correct'"),
        ("an infinite part", "inf"),
        ("a broken text", "Unicode"),
    ],
)
async def test_what_is_not_an_outcome_is_a_failure_that_says_so(what: str, says: str) -> None:
    (outcome,) = await judge(response(what, by=f"{USER}:returns"))
    assert failure(outcome).kind is VerifierFailureKind.BAD_VERDICT
    assert says in failure(outcome).error


async def test_extra_columns_reach_the_verifier_and_its_parts_come_back() -> None:
    (outcome,) = await judge(response("", by=f"{USER}:with_parts", bonus=0.25))
    assert outcome == Verdict(accuracy=0.5, parts={"format": 0.25})


async def test_any_text_survives_the_way_to_the_sandbox_and_back() -> None:
    texts = ["", "\x00", "é\u202e\U0001f600", "\r\n", "{}[]", "x" * 300_000]
    outcomes = await judge(*(response(text, text, by=f"{USER}:equals") for text in texts))
    assert outcomes == [Verdict(accuracy=1.0)] * len(texts)


async def test_a_verifier_that_does_not_exist_fails_its_own_responses_only() -> None:
    unknown, missing, fine = await judge(
        response("1", by="aritmetic"), response("1", by=f"{USER}:equal"), response("1", by="arithmetic")
    )
    assert failure(unknown).kind is failure(missing).kind is VerifierFailureKind.UNKNOWN_VERIFIER
    assert "did you mean arithmetic" in failure(unknown).error
    assert "did you mean 'equals'" in failure(missing).error
    assert fine == Verdict(accuracy=1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_here:judge", "name its folder in reward.path"),
        ("pipeline.mine:judge", "give yours another name"),
        (f"{USER}:equal", "did you mean 'equals'"),
        (f"{USER}:not_a_function", "must be a function"),
        ("tests.pipeline.rewards.broken_import:judge", "nothing_of_this_name"),
    ],
)
async def test_starting_with_a_verifier_that_cannot_be_loaded_is_refused(name: str, says: str) -> None:
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        with pytest.raises(ConfigError, match=says):
            await pool.start([name])


async def test_processes_work_side_by_side() -> None:
    async with VerifierPool(Limits(processes=3), configured=EVERYTHING) as pool:
        await pool.score([response("1", "1", by=f"{USER}:equals") for _ in range(3)])
        assert len(set(pool.pids)) == 3


async def test_a_cancelled_batch_leaves_no_process_behind_that_could_answer_the_next_one() -> None:
    async with VerifierPool(Limits(timeout_s=30.0), configured=EVERYTHING) as pool:
        await pool.start([f"{USER}:hangs_when_told"])
        (victim,) = pool.pids
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.score([response("hang", by=f"{USER}:hangs_when_told")])
        assert not is_alive(victim)
        assert await pool.score([response("go on", by=f"{USER}:hangs_when_told")]) == [Verdict(accuracy=1.0)]


async def test_a_process_killed_from_outside_between_batches_is_replaced_unnoticed() -> None:
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        ok = response("1", "1", by=f"{USER}:equals")
        assert await pool.score([ok]) == [Verdict(accuracy=1.0)]
        (victim,) = pool.pids
        os.kill(victim, 9)
        await until_reaped(victim)
        assert await pool.score([ok]) == [Verdict(accuracy=1.0)]


async def test_closing_ends_every_process_and_may_be_repeated() -> None:
    pool = VerifierPool(Limits(processes=2), configured=EVERYTHING)
    await pool.score([response("1", "1", by=f"{USER}:equals") for _ in range(8)])
    pids = pool.pids
    assert pids
    await pool.aclose()
    await pool.aclose()
    assert not any(is_alive(pid) for pid in pids)


async def test_code_that_only_a_response_names_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef score(r): return []\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    async with VerifierPool(Limits(), configured=frozenset({"planted:other"})) as pool:
        outcomes = await pool.score([response("1", by="planted:score"), response("is 1", by="arithmetic")])
    assert failure(outcomes[0]).kind is VerifierFailureKind.UNKNOWN_VERIFIER
    assert "reward.verifiers" in failure(outcomes[0]).error
    assert not isinstance(outcomes[1], VerifierFailure)
    assert not (tmp_path / "ran").exists()
    async with VerifierPool(Limits(), configured=frozenset({"planted:score"})) as pool:
        await pool.score([response("1", by="planted:score")])
    assert (tmp_path / "ran").exists()


async def until_gone(pids: Iterable[int]) -> None:
    async with asyncio.timeout(20.0):
        while any(process_runs(pid) for pid in pids):  # noqa: ASYNC110  strangers' ends are announced by nothing
            await asyncio.sleep(0.02)


def told(path: Path) -> list[int]:
    return [int(number) for number in path.read_text().split()]


@pytest.mark.parametrize("how", ["hang", "die"])
async def test_what_a_verifier_started_dies_with_it_even_in_a_session_of_its_own(tmp_path: Path, how: str) -> None:
    tell = tmp_path / "pids"
    async with VerifierPool(Limits(timeout_s=1.0), configured=EVERYTHING) as pool:
        (outcome,) = await pool.score([response(how, "3", by=f"{USER}:leaves_processes", tell=str(tell))])
        assert failure(outcome).kind is (VerifierFailureKind.LATE if how == "hang" else VerifierFailureKind.DIED)
        assert len(told(tell)) == 3
        await until_gone(told(tell))


async def test_helpers_that_a_verifier_keeps_live_as_long_as_its_process(tmp_path: Path) -> None:
    tell = tmp_path / "pids"
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        assert await pool.score([response("", "2", by=f"{USER}:leaves_processes", tell=str(tell))]) == [
            Verdict(accuracy=1.0)
        ]
        assert all(process_runs(pid) for pid in told(tell))
    await until_gone(told(tell))


async def test_a_verifier_with_too_many_processes_fails_and_all_of_them_are_killed(tmp_path: Path) -> None:
    tell = tmp_path / "pids"
    async with VerifierPool(Limits(timeout_s=60.0), configured=EVERYTHING, max_processes=4) as pool:
        many, few = await pool.score(
            [
                response("hang", "6", by=f"{USER}:leaves_processes", tell=str(tell)),
                response("", "3", by=f"{USER}:leaves_processes", tell=str(tmp_path / "few")),
            ]
        )
        assert failure(many).kind is VerifierFailureKind.DIED
        assert "had 6 processes, at most 4 are allowed at once" in failure(many).error, "one left its session"
        assert few == Verdict(accuracy=1.0)
        await until_gone(told(tell))


async def test_open_files_and_the_size_of_a_file_are_limited_and_cores_are_off(tmp_path: Path) -> None:
    (outcome,) = await judge(response("", by=f"{USER}:has_limits", file=str(tmp_path / "file")))
    assert outcome == Verdict(accuracy=1.0)


async def test_a_verifier_sees_no_password_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "rediss://user:s3cr%25t@host:6380/0")
    monkeypatch.setenv("REDISCLI_AUTH", "s3cr%t")
    monkeypatch.setenv("ANOTHER", "copied s3cr%t there")
    monkeypatch.setenv("HEADRACE__LEDGER__URL", "rediss://:s3crets@host:6380/0")
    monkeypatch.setenv("YET_ANOTHER", "copied s3crets there")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=s3cr-of-a-collector")
    monkeypatch.setenv("OPENAI_API_KEY", "kept: a verifier may need it")
    assert await judge(response("", "s3cr", by=f"{USER}:finds_no_password")) == [Verdict(accuracy=1.0)]
    assert without_ledger_password(os.environ)["OPENAI_API_KEY"]


POOL = """
import asyncio, sys
from pipeline.ledger.url import without_ledger_password
from pipeline.rewards.pool import VerifierPool
from tests.pipeline.rewards.test_pool import EVERYTHING, Limits, USER, response
async def main():
    async with VerifierPool(Limits(timeout_s=60.0), configured=EVERYTHING) as pool:
        await pool.score([response("hang", "0", by=f"{USER}:leaves_processes", tell=sys.argv[1])])
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when its call's time is over")
async def test_a_sandbox_ends_with_its_parent_in_the_middle_of_a_call(tmp_path: Path) -> None:
    tell = tmp_path / "pids"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", POOL, str(tell))
    async with asyncio.timeout(30.0):
        while not tell.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (sandbox,) = told(Path(f"/proc/{parent.pid}/task/{parent.pid}/children"))
    parent.kill()
    await parent.wait()
    await until_gone([sandbox])


async def test_a_reward_function_of_trl_is_sandboxed_and_an_unknown_signature_is_refused() -> None:
    async with VerifierPool(Limits(), configured=EVERYTHING) as pool:
        asked = [response("1", by=f"{USER}:trl_reward"), response("2", by=f"{USER}:trl_reward")]
        assert await pool.score(asked) == [Verdict(accuracy=1.0), Verdict(accuracy=0.0)]
        with pytest.raises(ConfigError, match=r"has the signature .*; give it one of these: judge\(responses\)"):
            await pool.start([f"{USER}:two_parameters"])


async def test_an_answer_that_ends_a_verifiers_process_is_forgiven_once_and_not_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = VerifierSpec("sound", f"{USER}:dies_by_its_response", sandboxed=True, sound=True)
    monkeypatch.setitem(registry._SPECS, "sound", sound)
    once = {"once": str(tmp_path / "once")}
    twice, forgiven, fine, users = await judge(
        response("die", by="sound"),
        response("die once", by="sound", **once),
        response("a", by="sound"),
        response("die", by=f"{USER}:dies_by_its_response"),
    )
    assert isinstance(twice, Verdict)
    assert (twice.accuracy, twice.judged) == (0.0, False)
    assert "exited with code 7" in twice.reason
    assert is_right(forgiven)
    assert is_right(fine)
    assert failure(users).kind is VerifierFailureKind.DIED


def test_the_time_limit_does_not_count_what_a_module_imports() -> None:
    async def slow_module() -> list[VerifierOutcome]:
        return await judge(
            response("1", "1", by="tests.pipeline.rewards.slow_import:judge"), limits=Limits(timeout_s=0.5)
        )

    assert asyncio.run(slow_module()) == [Verdict(accuracy=1.0)]


async def test_a_module_that_is_not_imported_in_time_is_a_failure_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.rewards.process.STARTUP_TIMEOUT_S", 0.3)
    (outcome,) = await judge(response("1", "1", by="tests.pipeline.rewards.slow_import:judge"))
    assert failure(outcome).kind is VerifierFailureKind.NOT_LOADED
