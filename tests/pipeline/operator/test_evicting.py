"""Claims about evictions by an operator: the refusals, what is wanted afterwards, and its words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.fleet.status import eviction_words
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Snapshot
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import read_ledger_url
from pipeline.operator import steering
from pipeline.operator.attached import Attached
from pipeline.operator.status_report import read_status
from pipeline.operator.top.format import head_lines
from pipeline.runtime.registry.contract import Eviction, Fleet, RunState, RunStatus, WaitingFor
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.made_run import made_run
from tests.pipeline.operator.small_run import COUNTS, GUEST, SmallRun


async def beat_of_guest(run: SmallRun) -> None:
    beat = await run.beat(Role.REWARD, GUEST)
    assert run.registry.beat(msgspec.structs.replace(beat, host="hostb"))


async def evict(run: SmallRun, worker: str = "", *, host: str = "", reason: str = "") -> Fleet:
    return await steering.evict(cast("Attached", run), worker=worker, host=host, reason=reason)


async def refusal(run: SmallRun, worker: str = "", *, host: str = "", reason: str = "") -> str:
    before = await run.registry.fleet()
    with pytest.raises(ConfigError) as refused:
        await evict(run, worker, host=host, reason=reason)
    assert await run.registry.fleet() == before
    return str(refused.value)


async def test_an_evicted_worker_is_out_with_who_when_and_why(run: SmallRun) -> None:
    fleet = await evict(run, "generator-1", reason="ECC \n errors")
    (one,) = fleet.evictions
    assert (one.worker, one.reason, one.is_counted) == ("generator-1", "ECC errors", True) and "@" in one.by
    assert fleet.counts == {**COUNTS, Role.GENERATOR: 1}
    assert await evict(run, "generator-1", reason="again") == fleet
    back = await steering.readmit(cast("Attached", run), worker="generator-1")
    assert back == Fleet(COUNTS)


async def test_the_last_of_a_role_and_the_learner_are_not_evicted(run: SmallRun) -> None:
    assert "run's last reward, so it cannot be evicted" in await refusal(run, "reward-0")
    assert "run's only learner, so it cannot be evicted" in await refusal(run, "learner")
    await run.beat(Role.GENERATOR, "generator-1")
    await evict(run, "generator-0")
    assert "run's last generator" in await refusal(run, "generator-1")


async def test_a_guest_at_work_lets_the_runs_own_last_worker_go_but_not_an_evicted_one(run: SmallRun) -> None:
    await beat_of_guest(run)
    assert (await evict(run, "reward-0")).counts[Role.REWARD] == 0
    assert "run's last reward" in await refusal(run, host="hostb")
    await steering.readmit(cast("Attached", run), worker="reward-0")
    await evict(run, host="hostb")
    assert "run's last reward" in await refusal(run, "reward-0")


async def test_the_only_worker_of_a_role_that_works_is_not_evicted_and_a_broken_one_is(run: SmallRun) -> None:
    await run.beat(Role.GENERATOR, "generator-1")
    await run.registry.fence("generator-0")
    refused = await refusal(run, "generator-1")
    assert "generator-1 is the only generator that works" in refused and "`headrace why`" in refused
    await run.beat(Role.GENERATOR, "generator-0", epoch=5, waiting_for=WaitingFor.STARTING)
    assert "is the only generator that works" in await refusal(run, "generator-1")
    assert (await evict(run, "generator-0")).counts[Role.GENERATOR] == 1
    await beat_of_guest(run)
    await run.registry.fence("reward-0")
    assert "hostb has the run's last reward that works" in await refusal(run, host="hostb")


async def test_only_a_joined_host_is_evicted_as_a_whole(run: SmallRun) -> None:
    await beat_of_guest(run)
    assert "no worker of this run is on gpu7; its hosts: host, hostb" in await refusal(run, host="gpu7")
    assert "it is not a joined host" in await refusal(run, host="host")
    assert (await evict(run, host="hostb")).counts == COUNTS


async def test_unknown_names_long_reasons_and_a_run_that_is_over_are_refused(run: SmallRun) -> None:
    assert "has no worker generator-9; it has: generator-0" in await refusal(run, "generator-9")
    assert "301 characters; expected at most 300" in await refusal(run, "generator-1", reason="x" * 301)
    with pytest.raises(ConfigError, match="generator-1 is not evicted; none is"):
        await steering.readmit(cast("Attached", run), worker="generator-1")
    await evict(run, "generator-1")
    with pytest.raises(ConfigError, match="generator-0 is not evicted; evicted are: generator-1"):
        await steering.readmit(cast("Attached", run), worker="generator-0")
    await run.registry.set_run_status(RunStatus(RunState.FAILED))
    assert "is failed, not running" in await refusal(run, "generator-0")
    assert await steering.readmit(cast("Attached", run), worker="generator-1") == Fleet(COUNTS), "for the next start"


async def test_status_top_and_why_name_the_evicted_with_the_reason_and_the_way_back(run: SmallRun) -> None:
    await evict(run, "generator-1", reason="ECC errors")
    words = eviction_words(await run.registry.fleet())[0]
    assert words.startswith("generator-1 is evicted by ") and words.endswith(
        ": ECC errors; `headrace fleet readmit generator-1` takes it back"
    )
    at = cast("Attached", run)
    assert list((await read_status(at)).evicted) == [words]
    picture = await run.reader().read()
    assert picture.evicted == (words,) and picture.absent == ()
    assert words in [line for line, _ in head_lines(picture)]
    snapshot = Snapshot(str(run.run_dir), RunState.RUNNING, "", has_supervisor=True, evicted=(words,))
    assert explain(snapshot).also == (words,)


def test_an_evicted_host_is_named_with_its_own_way_back() -> None:
    (words,) = eviction_words(Fleet(evictions=(Eviction(host="gpu7", reason="hot", by="supervisor"),)))
    assert words.startswith("host gpu7 is evicted by supervisor since 1970") and "readmit --host gpu7" in words


def test_the_commands_say_what_they_did_and_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    run_dir, _, server = made_run(tmp_path)

    async def begin() -> None:
        registry = RedisRegistry(connect(read_ledger_url(run_dir)), run_dir.name)
        await registry.set_fleet(Fleet(COUNTS))
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        await registry.aclose()

    def call(*words: str) -> Result:
        return CliRunner().invoke(headrace, [*words, "--run", str(run_dir)])

    try:
        asyncio.run(begin())
        with run_lock(run_dir):
            told = call("fleet", "evict", "generator-1", "--reason", "hot")
            assert told.output == (
                "generator-1 is evicted, until `headrace fleet readmit`; wanted, without joined hosts: "
                "1 learner, 1 generator, 1 reward\n"
            )
            assert "nothing given; expected one WORKER" in call("fleet", "evict").output
            assert "a, b given" in call("fleet", "evict", "a", "b").output
            assert "a given; expected one WORKER, or --host HOST" in call("fleet", "readmit", "a", "--host", "b").output
        told = call("fleet", "readmit", "generator-1")
        assert told.output.startswith("generator-1 is readmitted; wanted, without joined hosts: 1 learner, 2 generator")
    finally:
        server.stop()
