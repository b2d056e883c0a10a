"""Claims about single kinds of fault: junk, verdicts, scripts, starts and a small shared memory."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import redis
import redis.asyncio

from ops.drill import scripts, starts
from ops.drill.append_only import read_transactions
from ops.drill.events import Beat, DeadLetter, Ended, Epoch, Event, Judged, Limits, NotScored, OrderResult, Stored
from ops.drill.fleet import MEMORY, RUN, DrillFleet
from ops.drill.judged import dead_letters_were_tried, trained_are_judged
from ops.drill.junk import KEYS, litter, litter_own, spoil_epoch, unnamed
from ops.drill.ledger_history import LedgerHistory
from ops.drill.leftovers import leftovers
from ops.drill.small_memory import fill, small_memory
from ops.drill.verifier import is_chosen, judge, verdict
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim
from pipeline.rewards.verifier import Response
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.weights.store import weights_folder
from protocol.ids import Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import make_chunk, make_spec, reward
from tests.pipeline.runtime.registries import beat_of

LIMITS = Limits(eta=1, group_size=3, num_slots=1, window_tokens=8, max_attempts=2)


async def events_of(
    run: str, client: redis.asyncio.Redis, is_whole: Callable[[list[Event]], bool], **words: Any
) -> list[Event]:
    """Read the server's file until everything is in it: the server puts off what it appends."""
    folder = (await client.config_get("dir"))["dir"]
    assert folder is not None
    events: list[Event] = []
    async with asyncio.timeout(20.0):
        while not is_whole(events):
            await asyncio.sleep(0.05)
            events = list(LedgerHistory(run, **words).read(read_transactions(Path(folder))))
    return events


async def test_the_member_without_a_verdict_is_told_from_the_others_of_its_group(
    redis_client: redis.asyncio.Redis,
) -> None:
    run = f"verdicts-{os.getpid()}"
    ledger, registry = RedisLedger(redis_client, run), RedisRegistry(redis_client, run)
    await ledger.open(make_spec(run=run, group_size=3, units_per_update=3, max_attempts=2))
    generator = await registry.register(Role.GENERATOR, "generator-0")
    learner = await registry.register(Role.LEARNER, "learner")
    grant = await ledger.lease(generator, max_trajectories=3)
    for lease in grant.leases:
        chunk = msgspec.structs.replace(make_chunk(lease.trajectory), worker=str(generator))
        await ledger.write_chunk(generator, chunk)
        if lease.trajectory.member == 1:
            assert [await ledger.fail_score(generator, chunk.id, Field.REWARD, "late") for _ in range(2)]
        else:
            await ledger.write_score(generator, chunk.id, reward(float(lease.trajectory.member == 0)))
    claim = await ledger.claim(learner, policy_version=0)
    assert isinstance(claim, Claim)
    await ledger.settle(learner, (claim.claim_id,))
    events = await events_of(
        run, redis_client, lambda found: any(isinstance(event, Ended) for event in found), verdict=lambda _: 1.0
    )
    ends = {event.name: event.fate for event in events if isinstance(event, Ended)}
    fates = {"t.0.0": "trained", "t.0.1": "dropped:dead_letter", "t.0.2": "trained"}
    assert ends == fates | {f"{name}.0": fate for name, fate in fates.items()}
    told = [event for event in events if isinstance(event, (Judged, NotScored, DeadLetter))]
    missing = [NotScored("t.0.1.0", "reward")] * 2 + [DeadLetter("t.0.1.0", "reward")]
    assert [event for event in told if not isinstance(event, Judged)] == missing
    assert list(dead_letters_were_tried(events, LIMITS)) == []
    assert list(trained_are_judged(events, LIMITS)) == ["t.0.2.0 was judged 0, but its verifier's verdict is 1"]
    assert [event.verdict for event in events if isinstance(event, Stored)] == [1.0] * 3
    hasty = list(dead_letters_were_tried(events, replace(LIMITS, max_attempts=3)))
    assert hasty == ["t.0.1.0 is a dead letter after 2 of 3 tries at its reward"]


@pytest.fixture
def littered(redis_server: str, tmp_path: Path) -> Iterator[DrillFleet]:
    """A fleet without processes, whose server is there."""
    fleet = DrillFleet(tmp_path / "drill", [])
    fleet.run_dir.mkdir()
    write_address(fleet.run_dir, LedgerAddress(url=redis_server))
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    yield fleet
    assert fleet._client is not None
    fleet._client.close()


@pytest.mark.parametrize("seed", range(3))
async def test_junk_is_in_every_key_that_a_generators_token_may_write_and_all_of_it_can_be_named(
    littered: DrillFleet, redis_server: str, seed: int
) -> None:
    client = connect(redis_server)
    registry, writer = RedisRegistry(client, RUN), RedisHeartbeatWriter(redis_server, RUN)
    who = await registry.register(Role.REWARD, "reward-0")
    await registry.set_endpoint(who, "ipc://reward-0")
    beat = beat_of(who)
    assert await asyncio.to_thread(writer.beat, beat)
    named = await asyncio.to_thread(litter, littered, random.Random(seed))
    assert all([await client.exists(f"{{{RUN}}}:{key}") for key in KEYS])
    found = await RedisRegistry(client, RUN).check_entries()
    status = {"unreadable": [f"{entry} cannot be read: {why}" for entry, why in found.items()]}
    assert list(unnamed(status, named)) == []
    assert list(unnamed({"unreadable": []}, named)) == list(unnamed(None, named)) == named
    assert {each.who.worker for each in littered.beats().values()} == {"reward-0"}
    before = await asyncio.to_thread(litter_own, littered, "reward-0", random.Random(seed))
    assert before is not None and json.loads(before)["endpoint"] == "ipc://reward-0"
    assert not littered.beats()
    await asyncio.to_thread(spoil_epoch, littered, "reward-0", random.Random(seed))
    assert not await asyncio.to_thread(writer.beat, beat), "it is fenced"

    def is_whole(events: list[Event]) -> bool:
        return Epoch("reward-0", None) in events

    events = await events_of(RUN, client, is_whole)
    assert {event.who for event in events if isinstance(event, Beat)} == {"reward-0#1"}
    await asyncio.to_thread(writer.close)
    await registry.aclose()


def test_one_response_in_a_few_is_slow_or_late_and_it_is_the_same_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, slept = tmp_path / "switch", list[float]()
    monkeypatch.setattr("ops.drill.verifier.time.sleep", slept.append)
    responses = [
        Response(response_text=str(n), answer="", verifier="", extra={"switch": str(switch)}) for n in range(600)
    ]
    chosen = [is_chosen(one.response_text) for one in responses]
    assert 20 <= sum(chosen) <= 90
    true = [verdict(one.response_text) for one in responses]
    for order, longest_s in (("sometimes 20", 20.0), ("late", 600.0)):
        switch.write_text(order)
        slept.clear()
        assert judge(responses) == true
        assert [seconds == longest_s for seconds in slept] == chosen


def test_a_busy_server_answers_nobody_until_its_script_is_over(littered: DrillFleet) -> None:
    wait = scripts.keep_busy(littered, 2.0)
    answers: list[object] = []
    while len(answers) < 200 and None not in answers:
        answers.append(littered.ledger("PING"))
    assert None in answers
    wait()
    assert littered.ledger("PING")


@pytest.mark.parametrize("is_obeyed", [True, False])
def test_an_order_that_is_accepted_and_not_carried_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_obeyed: bool
) -> None:
    answers = iter([(None, "is still starting; try again in a moment"), ({"counts": {}}, "")])
    monkeypatch.setattr(starts, "_HELD_S", 0.1)
    monkeypatch.setattr(starts, "_SPREAD_S", 0.0)
    monkeypatch.setattr(starts, "_until_begun", lambda _: None)
    monkeypatch.setattr(starts.Order, "give", lambda _: next(answers))
    fleet = DrillFleet(tmp_path / "drill", [])
    number = random.Random(0).choice([1, 3])
    generators = [SimpleNamespace(who=SimpleNamespace(worker=f"generator-{n}")) for n in range(number)]
    monkeypatch.setattr(fleet, "workers", lambda _: generators)
    monkeypatch.setattr(fleet, "is_over", lambda: False)
    monkeypatch.setattr(fleet, "prepared", lambda *_: None)
    fleet._processes.append(cast("Any", SimpleNamespace(pid=7, poll=lambda: 0)))
    blobs = {
        keys.fleet(RUN): json.dumps({"generator": number if is_obeyed else 2}).encode(),
        keys.run_status(RUN): b'{"state":"running","supervisor":7}',
    }
    monkeypatch.setattr(fleet, "ledger", lambda _, key: blobs[key])
    (wished,), note = starts.scale(fleet, random.Random(0))
    assert isinstance(wished, OrderResult) and wished.held is is_obeyed
    assert note.endswith("refused 1 times before")
    assert is_obeyed or wished.found == f"2 are wanted, {number} exist"


def test_a_fleets_small_shared_memory_is_its_own_and_what_is_left_there_is_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with small_memory(1 << 20) as memory:
        if memory is None:
            pytest.skip("this machine permits no mount namespace")
        ballast = fill(memory.folder)
        assert 900_000 < ballast.stat().st_size <= 1 << 20
        assert not (MEMORY / ballast.name).exists()
        ballast.unlink()
        left = memory.folder / weights_folder(run, shared_memory=True).name
        left.mkdir()
        assert [line.split()[0] for line in leftovers(run, memory.folder)] == ["shared"]
        assert leftovers(run) == []
        fleet = DrillFleet(tmp_path / "drill", [], host=memory.on())
        seen = fleet.prepared("import os; print(os.getcwd(), os.statvfs('/dev/shm').f_blocks)").communicate("")[0]
        folder, blocks = seen.split()
        assert (Path(folder) / "configs" / "drill.toml").is_file() and int(blocks) * 4096 == 1 << 20


def test_a_namespace_that_does_not_come_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("ops.drill.small_memory._START_S", 0.1)
    began_s = time.monotonic()
    with small_memory(1 << 20) as memory:
        assert memory is None
    assert time.monotonic() - began_s < 30.0
