"""Claims about the parts of a drill: its plans, its damage, its reading of the server's file."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis
import zmq

from ops.drill.append_only import read_transactions
from ops.drill.events import Admitted, Claimed, Ended, Epoch, Held, Published, Stored, Tally
from ops.drill.ledger_history import LedgerHistory
from ops.drill.record import crashes
from ops.drill.relay import Relays, damage
from ops.drill.schedule import WIRE, FaultKind, plan
from ops.drill.verifier import judge
from pipeline.replay.redis import RedisReplay
from pipeline.rewards.verifier import Response
from pipeline.runtime.registry import WeightsAnnouncement
from pipeline.runtime.registry_redis import RedisRegistry
from protocol.errors import DataError
from protocol.ids import Role, TrajectoryId
from tests.pipeline.replay.builders import make_chunk, make_spec, reward
from workers.engines.emulated.journal import Journal, read_journal

ROOT = Path(__file__).parents[3]


# -- plans ---------------------------------------------------------------------------------------------------------------


def test_a_seed_always_makes_the_same_plan_and_others_make_others() -> None:
    assert plan(7) == plan(7)
    assert len({plan(seed).rounds for seed in range(50)}) == 50


def test_seeds_in_a_row_go_through_every_kind_of_fault_and_every_algorithm() -> None:
    plans = [plan(seed) for seed in range(len(FaultKind))]
    assert frozenset().union(*(each.kinds for each in plans)) == frozenset(FaultKind)
    assert {each.algorithm for each in plans} == {"dapo", "tppo", "vapo"}
    assert all(each.algorithm != "dapo" for each in plans if FaultKind.KILL_VALUE in each.kinds)


def test_a_run_is_longer_than_its_faults() -> None:
    for seed in range(100):
        each = plan(seed)
        lasting = sum(max(fault.duration_s for fault in faults) for faults in each.rounds)
        assert each.num_updates(0.1) * 0.1 > lasting
        assert plan(seed, [FaultKind.CORRUPT]).kinds == {FaultKind.CORRUPT}


# -- damage --------------------------------------------------------------------------------------------------------------

MESSAGE = [b"envelope" * 4, b"body" * 50]
MEMORY = [[b"old", bytes([n])] for n in range(9)]


def handed(kind: FaultKind | None, num: int = 200) -> list[list[list[bytes]]]:
    rng = random.Random(0)
    return [damage(kind, MESSAGE, MEMORY, rng) for _ in range(num)]


def test_without_a_fault_a_message_passes_as_it_came() -> None:
    assert all(out == [MESSAGE] for out in handed(None))


@pytest.mark.parametrize(
    ("kind", "is_damaged"),
    [
        (FaultKind.CORRUPT, lambda out: len(out) == 1 and out[0] != MESSAGE and list(map(len, out[0])) == [32, 200]),
        (FaultKind.TRUNCATE, lambda out: len(out) == 1 and sum(map(len, out[0])) < 232),
        (FaultKind.DUPLICATE, lambda out: len(out) > 1 and all(each == MESSAGE for each in out)),
        (FaultKind.REPLAY, lambda out: out[0] == MESSAGE and all(each in MEMORY for each in out[1:]) and len(out) > 1),
        (FaultKind.GARBAGE, lambda out: out[0] == MESSAGE and len(out) == 2),
        (FaultKind.ONE_WAY, lambda out: out == []),
    ],
)
def test_a_fault_damages_most_messages_and_lets_some_pass(kind: FaultKind, is_damaged) -> None:
    outs = handed(kind)
    hit = [out for out in outs if out != [MESSAGE]]
    assert 100 < len(hit) < 200
    assert all(is_damaged(out) for out in hit)


def test_a_relay_hands_on_is_cut_off_and_goes_on(tmp_path: Path) -> None:
    context = zmq.Context()
    relays = Relays(tmp_path / "r", 0)
    try:
        mailbox = context.socket(zmq.PULL)
        mailbox.bind(f"ipc://{tmp_path / 'mailbox'}")
        address = relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}")
        assert address is not None
        assert relays.stand_before("reward-0", address) is None, "a relay is not put before a relay"
        assert relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}") == address
        sender = context.socket(zmq.PUSH)
        sender.setsockopt(zmq.IMMEDIATE, 1)
        sender.setsockopt(zmq.SNDTIMEO, 5000)
        sender.connect(address)
        sender.send_multipart(MESSAGE)
        assert mailbox.poll(5000) and mailbox.recv_multipart() == MESSAGE
        relays.set("reward-0", FaultKind.ONE_WAY)
        while relays.num_damaged < 5:
            sender.send_multipart(MESSAGE)
        relays.set("reward-0", FaultKind.PARTITION)
        deadline = time.monotonic() + 5.0
        sender.setsockopt(zmq.SNDTIMEO, 0)
        with pytest.raises(zmq.Again):
            while time.monotonic() < deadline:
                sender.send_multipart(MESSAGE)
        relays.set("reward-0", None)
        while mailbox.poll(0):
            mailbox.recv_multipart()
        sender.setsockopt(zmq.SNDTIMEO, 5000)
        sender.send_multipart([b"again", b""])
        assert mailbox.poll(5000)
    finally:
        relays.close()
        context.destroy(linger=0)


def test_a_relay_hands_on_in_another_order_and_keeps_nothing_for_long(tmp_path: Path) -> None:
    context = zmq.Context()
    relays = Relays(tmp_path / "r", 0)
    try:
        mailbox = context.socket(zmq.PULL)
        mailbox.bind(f"ipc://{tmp_path / 'mailbox'}")
        sender = context.socket(zmq.PUSH)
        sender.connect(str(relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}")))
        relays.set("reward-0", FaultKind.REORDER)
        sent = [[b"%d" % number] for number in range(21)]  # the last one is alone in its round
        for message in sent:
            sender.send_multipart(message)
        came = [mailbox.recv_multipart() for _ in sent if mailbox.poll(10_000)]
        assert sorted(came) == sorted(sent)
        assert came != sent
        assert relays.num_damaged > 0
    finally:
        relays.close()
        context.destroy(linger=0)


def test_every_wire_fault_is_one_that_a_relay_knows() -> None:
    assert {kind for kind in WIRE if handed(kind) == handed(None)} == {
        FaultKind.PARTITION, FaultKind.STALL, FaultKind.REORDER,
    }  # fmt: skip


# -- the server's file ---------------------------------------------------------------------------------------------------


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def test_transactions_are_read_whole_and_a_torn_end_is_passed_over(tmp_path: Path) -> None:
    whole = command(b"SELECT", b"0") + command(b"SET", b"a", b"\r\n*1") + command(b"MULTI") + command(b"DEL", b"a")
    whole += command(b"HSET", b"h", b"k", b"v") + command(b"EXEC")
    torn = command(b"MULTI") + command(b"SET", b"b", b"1")
    for end in (len(torn), len(torn) - 1, len(torn) - 7):
        (tmp_path / "appendonly.aof").write_bytes(whole + torn[:end])
        found = list(read_transactions(tmp_path))
        assert found == [[[b"SET", b"a", b"\r\n*1"]], [[b"DEL", b"a"], [b"HSET", b"h", b"k", b"v"]]]


def test_a_file_that_the_server_has_rewritten_is_refused(tmp_path: Path) -> None:
    parts = tmp_path / "appendonlydir"
    with pytest.raises(DataError, match="no append-only file"):
        list(read_transactions(tmp_path))
    parts.mkdir()
    (parts / "x.manifest").write_text("file x.2.base.rdb seq 2 type b\nfile x.3.incr.aof seq 3 type i\n")
    with pytest.raises(DataError, match="rewritten"):
        list(read_transactions(tmp_path))


async def test_what_a_ledger_does_is_read_from_its_servers_file(redis_client: redis.asyncio.Redis) -> None:
    folder = Path((await redis_client.config_get("dir"))["dir"])
    run = f"read-{os.getpid()}"
    replay, registry = RedisReplay(redis_client, run), RedisRegistry(redis_client, run)
    await replay.open(make_spec(run=run, group_size=1, units_per_update=1))
    generator = await registry.register(Role.GENERATOR, "generator-0")
    learner = await registry.register(Role.LEARNER, "learner")
    await registry.announce_weights(
        learner,
        WeightsAnnouncement(policy_version=3, digest="", path="", num_bytes=0, host=""),
    )
    grant = await replay.lease(generator, max_trajectories=1)
    chunk = msgspec.structs.replace(make_chunk(grant.leases[0].trajectory), worker=str(generator))
    await replay.write_chunk(generator, chunk)
    await replay.write_score(generator, chunk.id, reward())
    claim = await replay.claim(learner, policy_version=0)
    await replay.settle(learner, (claim.claim_id,))
    events = list(LedgerHistory(run, truth=lambda c: c.num_tokens > 0).read(read_transactions(folder)))
    kinds = [event for event in events if not isinstance(event, Tally)]
    assert Epoch("generator-0", 1) in kinds and Published(3) in kinds and Admitted(0) in kinds
    assert Held("t.0.0", "generator-0#1") in kinds
    (stored,) = [event for event in kinds if isinstance(event, Stored)]
    assert (stored.chunk, stored.who, stored.end, stored.is_true) == (
        "t.0.0.0",
        "generator-0#1",
        chunk.num_tokens,
        True,
    )
    (claimed,) = [event for event in kinds if isinstance(event, Claimed)]
    assert (claimed.claim, claimed.units) == (claim.claim_id, ("0",))
    assert [event for event in kinds if isinstance(event, Ended)] == [
        Ended("t.0.0.0", "trained"), Ended("t.0.0", "trained"),
    ]  # fmt: skip
    assert not any(event.groups_missing for event in events if isinstance(event, Tally))
    assert TrajectoryId.parse(stored.trajectory) == chunk.trajectory


# -- journals, clock, verifier -------------------------------------------------------------------------------------------


def test_a_journal_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j" / "1.journal"
    journal = Journal(path)
    journal.note(TrajectoryId("t", 3, 1), 0, 8)
    assert not list(read_journal(path))
    journal.flush()
    with path.open("a") as file:
        file.write("t.3.1 8 1")
    assert list(read_journal(path)) == [(TrajectoryId("t", 3, 1), 0, 8)]


def test_the_drills_clock_moves_the_wall_clock_of_a_process_and_nothing_else(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("<d", -3600.0))
    probe = "import time; a = time.monotonic(); print(time.time()); assert time.monotonic() - a < 60"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "ops/drill/clock"), "HEADRACE_DRILL_CLOCK": str(clock)}
    told = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, check=True, timeout=60)
    assert 3500 < time.time() - float(told.stdout) < 3700


def test_the_verifier_judges_about_half_as_right_until_it_is_told_to_fail(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    responses = [
        Response(response_text=str(n), answer="", verifier="", extra={"switch": str(switch)}) for n in range(200)
    ]
    assert 0.4 < np.mean(judge(responses)) < 0.6
    assert judge(responses) == judge(responses)
    switch.write_text("raise")
    with pytest.raises(RuntimeError, match="asked this verifier to raise"):
        judge(responses)


# -- crashes -------------------------------------------------------------------------------------------------------------


def test_a_crash_is_told_by_a_workers_log_or_its_last_words_but_a_verifiers_error_is_none(tmp_path: Path) -> None:
    failed = {"event": "worker_failed", "exception": "Traceback ...\nKeyError: 7"}
    torn = '{"event": "worker_failed'
    (tmp_path / "learner.jsonl").write_text(json.dumps({"event": "update"}) + "\n" + json.dumps(failed) + "\n" + torn)
    (tmp_path / "value.out").write_text("\nTraceback (most recent call last):\n  File x\nImportError: y\n")
    (tmp_path / "reward-0.out").write_text(
        "[warning] scoring_failed error='Traceback (most recent call last):\\n ...'\n"
    )
    assert [(crash.worker, crash.error[-11:].strip()) for crash in crashes(tmp_path)] == [
        ("learner", "KeyError: 7"),
        ("value", "rtError: y"),
    ]
