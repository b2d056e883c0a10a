"""Claims about joining: the files that arrive, the checks, and the sentences of refusals."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.load import read_resolved
from pipeline.config.operations import REWARDS, WORKERS
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.address import read_ledger_url
from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import process_runs
from pipeline.runtime.registry.contract import Drain, Eviction, Fleet, RunState
from pipeline.runtime.registry.settings_change import after
from pipeline.supervisor.joining import join as join_module
from pipeline.supervisor.joining.manifest import CodeVersion, Manifest, encode_manifest
from pipeline.supervisor.pulse import trouble
from protocol.errors import ConfigError, DataError
from protocol.ids import Role
from tests.pipeline.supervisor.joining.meeting import Meeting, meeting, until

pytestmark = pytest.mark.timeout(90)


async def published(run: Meeting) -> Manifest:
    return msgspec.json.decode(await until(run.board.manifest), type=Manifest)


async def test_a_joined_host_has_workers_of_its_own_until_the_run_ends(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        seen: list[int] = []
        pulses: list[str] = []

        async def two_live() -> bool:
            seen[:] = [beat.pid for beat in await run.registry.heartbeats()]
            pulses.append(trouble(place.path, needs_ready=False))
            return len(seen) == 2

        with run.claimed() as place:
            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(place, count=2))
                tasks.create_task(run.end_soon(two_live))
            names = {place.worker_name(Role.GENERATOR, number) for number in range(2)}
        assert joining.result().exit_code == ExitCode.OK
        assert "finished: by the test" in joining.result().detail
        assert not any(map(process_runs, seen))
        assert pulses[-1] == "" and "has ended" in trouble(place.path, needs_ready=True)
    # The last lines arrive before the run's host ends.
    for name in names:
        log = (place.path / "logs" / f"{name}.jsonl").read_bytes()
        assert b"worker_ended" in log
        assert (run.run_dir / "logs" / f"{name}.jsonl").read_bytes() == log


async def test_joined_workers_are_drained_and_replaced_and_the_last_ends_the_join(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed() as place:
            first, second = (place.worker_name(Role.GENERATOR, number) for number in range(2))

            async def epochs() -> dict[str, int]:
                return {beat.who.worker: beat.who.epoch for beat in await run.registry.heartbeats()}

            async def steer() -> None:
                async def are(wanted: dict[str, int]) -> bool:
                    return await epochs() == wanted

                await until(lambda: are({first: 1, second: 1}))
                await run.registry.set_fleet(Fleet({}, drains=(Drain(second, 1, is_replaced=True),)))
                await until(lambda: are({first: 1, second: 2}))
                await run.registry.set_fleet(Fleet({}, drains=(Drain(first, 1), Drain(second, 1, is_replaced=True))))
                await until(lambda: are({second: 2}))
                # forgotten by the registry, and not by the host
                await run.registry.set_fleet(Fleet({}))
                await asyncio.sleep(1.5)
                assert await epochs() == {second: 2}
                await run.registry.set_fleet(Fleet({}, drains=(Drain(second, 2),)))

            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(place, count=2))
                tasks.create_task(steer())
        assert joining.result().exit_code == ExitCode.OK
        assert "its workers were drained by an operator" in joining.result().detail
        assert not joining.result().may_resume


async def test_joined_workers_are_evicted_and_readmitted_and_an_evicted_host_joins_no_more(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed() as place:
            first, second = (place.worker_name(Role.GENERATOR, number) for number in range(2))
            host = Eviction(host=socket.gethostname(), reason="hot", by="operator@home")

            async def are(wanted: dict[str, int]) -> bool:
                epochs = {beat.who.worker: beat.who.epoch for beat in await run.registry.heartbeats()}
                return epochs == wanted

            async def steer() -> None:
                await until(lambda: are({first: 1, second: 1}))
                elsewhere = Eviction("generator-hostb-x3f9a1-0"), Eviction(host="hostb")
                await run.registry.set_fleet(Fleet({}, evictions=(Eviction(first), *elsewhere)))
                await until(lambda: are({second: 1}))
                await run.registry.set_fleet(Fleet({}, evictions=elsewhere))
                # one epoch was the fence's
                await until(lambda: are({first: 3, second: 1}))
                await run.registry.set_fleet(Fleet({}, evictions=(host,)))

            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(place, count=2))
                tasks.create_task(steer())
            told = joining.result().detail
            assert told.startswith("this host is evicted by operator@home: hot; `headrace fleet readmit --host ")
            assert not joining.result().may_resume and await run.registry.heartbeats() == []
            assert {await run.registry.epoch(name) for name in (first, second)} == {2, 4}, "both are fenced"
            assert (await run.join(place, count=2)).detail == told
            assert {await run.registry.epoch(name) for name in (first, second)} == {2, 4}, "and none was started"


async def test_a_joined_folder_has_the_runs_prompts_and_settings_and_no_path_of_its_host(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed() as place:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.join(place))
                tasks.create_task(run.end_soon(lambda: _any(run)))
            ours = read_resolved(place.path)
            assert str(run.folder / "home") not in (place.path / "config.toml").read_text()
            assert read_ledger_url(place.path) == redis_server
            sources = [PromptSource(config, load_text_tokenizer(config.model.path)) for config in (run.config, ours)]
            assert sources[0].digest == sources[1].digest
            assert ours.algorithm == run.config.algorithm
            weights = [path.name for path in (place.files / "model").iterdir() if path.suffix == ".safetensors"]
            assert weights == [], "a generator takes its weights from the learner"


async def _any(run: Meeting) -> bool:
    return bool(await run.registry.heartbeats())


async def test_another_version_of_headrace_is_refused_with_both_versions_and_the_remedy(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        manifest = await published(run)
        for code, remedy in (
            (CodeVersion("9.9.9", "0" * 12), "install headrace 9.9.9 on this host"),
            (CodeVersion(manifest.code.version, "0" * 12), "install the same commit on both hosts"),
        ):
            await run.board.set_manifest(encode_manifest(msgspec.structs.replace(manifest, code=code)))
            with run.claimed() as place, pytest.raises(ConfigError, match=remedy) as refused:
                await run.join(place)
            assert str(code) in str(refused.value) and str(manifest.code) in str(refused.value)


async def test_a_run_whose_workers_go_by_other_code_is_joined_by_no_host(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        await published(run)
        change = after(None, {WORKERS: '"00ff00ff00ff00ff"'}, {WORKERS: '""'}, by="ann@a", at_s=1.0)
        assert await run.registry.add_settings_change(change)
        with run.claimed() as place, pytest.raises(ConfigError, match="use version 00ff00ff00ff00ff of their code"):
            await run.join(place)


async def test_a_run_whose_reward_functions_were_changed_is_joined_by_no_reward_worker(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        await published(run)
        change = after(None, {REWARDS: '"00ff00ff00ff00ff"'}, {REWARDS: '""'}, by="ann@a", at_s=1.0)
        assert await run.registry.add_settings_change(change)
        words = "version 00ff00ff00ff00ff of the reward functions"
        with run.claimed(Role.REWARD) as place, pytest.raises(ConfigError, match=words) as refused:
            await run.join(place)
        assert "join in another role" in str(refused.value)
        with run.claimed() as place:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.join(place))
                tasks.create_task(run.end_soon(lambda: _any(run)))


async def test_a_change_of_code_while_a_host_fetches_its_files_is_noticed_in_time(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = join_module.fetch_files

    async def slow(*arguments: Any, **named: Any) -> Any:
        found = await fetch(*arguments, **named)
        if await run.registry.last_settings_change() is None:
            change = after(None, {WORKERS: '"00ff00ff00ff00ff"'}, {WORKERS: '""'}, by="ann@a", at_s=1.0)
            assert await run.registry.add_settings_change(change)
        return found

    monkeypatch.setattr(join_module, "fetch_files", slow)
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed() as place, pytest.raises(ConfigError, match="use version 00ff00ff00ff00ff of their code"):
            await run.join(place)
        assert await run.registry.heartbeats() == []


@pytest.mark.parametrize(("difference_s", "words"), [(61.0, "61.0 s behind"), (-61.0, "61.0 s ahead of")])
async def test_a_clock_a_minute_apart_is_refused_with_the_difference(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch, difference_s: float, words: str
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        await published(run)

        async def apart(_: object) -> float:
            return difference_s

        monkeypatch.setattr("pipeline.ledger.redis.join_board.JoinBoard.clock_difference_s", apart)
        with run.claimed() as place, pytest.raises(ConfigError, match=f"{words} that of the ledger's server"):
            await run.join(place)


async def test_the_servers_clock_is_compared_with_this_hosts(redis_server: str, tmp_path: Path, monkeypatch) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        assert abs(await run.board.clock_difference_s()) < 0.5
        import time

        now = time.time
        monkeypatch.setattr("pipeline.ledger.redis.join_board.time.time", lambda: now() - 60.0)
        assert 59.5 < await run.board.clock_difference_s() < 60.5


async def test_a_run_that_has_ended_or_never_was_is_refused(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed() as place:
            with pytest.raises(ConfigError, match="has no run 'another'"):
                await run.join(place, run="another", wait_s=0.1)
            await run.set(RunState.FINISHED, "50 updates done")
            with pytest.raises(ConfigError, match="is finished: 50 updates done"):
                await run.join(place)


async def test_a_runs_host_out_of_reach_is_named_with_this_host(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.supervisor.joining.file_fetch._REACH_S", 1.0)
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        manifest = await published(run)
        away = msgspec.structs.replace(manifest, endpoint="tcp://127.0.0.1:1")
        await run.board.set_manifest(encode_manifest(away))
        with (
            run.claimed() as place,
            pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:1, which cannot be reached from"),
        ):
            await run.join(place)


async def test_a_file_that_was_changed_on_the_runs_host_is_refused_by_name(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        await published(run)
        data = tmp_path / "home" / "train.jsonl"
        data.write_bytes(data.read_bytes().replace(b'"2"', b'"3"'))
        with run.claimed() as place, pytest.raises(DataError, match=r"data/train-0/train\.jsonl is not the file"):
            await run.join(place)


async def test_workers_that_fail_too_often_end_the_join_and_not_the_run(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch, "supervisor.max_data_failures=1") as run:
        with run.claimed() as place:
            outcome = await run.join(place, script="crash")
        assert outcome.exit_code == ExitCode.FAILURE
        assert "the run and other hosts go on" in outcome.detail
        assert "the last words of a crash" in outcome.last_lines
        assert (await run.registry.run_status()).state is RunState.RUNNING


async def test_a_role_that_the_run_does_not_need_is_refused(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with run.claimed(Role.REFERENCE) as place, pytest.raises(ConfigError, match="needs no reference workers"):
            await run.join(place)
