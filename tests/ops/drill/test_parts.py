"""Claims about the parts of a drill: its plans, its damage, its reading of the server's file."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from ops.drill.append_only import read_transactions
from ops.drill.events import (
    Admitted,
    Beat,
    Claimed,
    Ended,
    Epoch,
    Held,
    Lost,
    NotStored,
    Published,
    ServerLogged,
    Serving,
    Status,
    Stored,
    Tally,
)
from ops.drill.fleet import DrillFleet
from ops.drill.ledger_history import LedgerHistory
from ops.drill.leftovers import leftovers
from ops.drill.record import crashes, refused_windows, servers
from ops.drill.schedule import ASKED, ENVIRONMENT_KINDS, KINDS, WIRE, FaultKind, long_plan, plan, traits
from ops.drill.truth import TRUTHS, Struck, ask_until_named
from ops.drill.witness import Witness, servers_of
from ops.emulated.journal import SamplingJournal, read_journal
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Claim
from pipeline.process.descendants import WORKER_MARK, worker_mark
from pipeline.runtime.registry.contract import RunState, RunStatus, WeightsAnnouncement
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from pipeline.weights.store import weights_folder
from protocol.endpoints import ipc_endpoint
from protocol.errors import DataError
from protocol.ids import Role, TrajectoryId
from tests.pipeline.ledger.builders import make_chunk, make_spec, reward
from tests.pipeline.runtime.registries import beat_of

ROOT = Path(__file__).parents[3]


# -- plans -----------------------------------------------------------------------------------------


def test_a_seed_always_makes_the_same_plan_and_others_make_others() -> None:
    assert plan(7) == plan(7)
    assert len({plan(seed).rounds for seed in range(50)}) == 50


def test_seeds_in_a_row_go_through_every_kind_of_fault_and_every_algorithm() -> None:
    for kinds in (KINDS, ENVIRONMENT_KINDS):
        plans = [plan(seed, kinds) for seed in range(len(kinds))]
        assert frozenset().union(*(each.kinds for each in plans)) == frozenset(kinds)
    assert {each.algorithm for each in plans} == {"dapo", "tppo", "vapo"}
    assert all(each.algorithm != "dapo" for each in plans if FaultKind.KILL_VALUE in each.kinds)


def test_a_run_is_longer_than_its_faults() -> None:
    for seed in range(100):
        each = plan(seed)
        moving = [[fault for fault in faults if traits(fault.kind).moving_s is None] for faults in each.rounds]
        lasting = sum(max((fault.duration_s for fault in faults), default=0.0) for faults in moving)
        assert each.num_updates(0.1) * 0.1 > lasting
        assert plan(seed, [FaultKind.CORRUPT]).kinds == {FaultKind.CORRUPT}


def test_half_an_hour_has_sixty_single_faults_and_each_kind_once_before_one_comes_twice() -> None:
    each = long_plan(0, 30.0)
    kinds = Counter(fault.kind for (fault,) in each.rounds)
    assert sum(kinds.values()) == 60 and len(kinds) == len(KINDS) - 5
    assert max(kinds.values()) - min(kinds.values()) == 1
    assert each == long_plan(0, 30.0) != long_plan(1, 30.0)
    assert 30 * 60 <= each.num_updates(1.0) <= 40 * 60


def test_a_fault_that_must_be_alone_is_alone_in_its_round_or_in_its_drill() -> None:
    assert set(TRUTHS) == ASKED
    for each in (plan(seed) for seed in range(400)):
        for faults in each.rounds:
            assert len(faults) == 1 or not any(traits(fault.kind).is_alone for fault in faults)
        assert len(each.kinds) == 1 or not any(traits(kind).is_sole for kind in each.kinds)


def test_a_fleet_that_speaks_tcp_has_no_fault_that_needs_a_relay() -> None:
    plans = [plan(seed) for seed in range(300)]
    assert any(FaultKind.LINK_CUT in each.kinds for each in plans)
    assert not any(FaultKind.LINK_CUT in each.kinds and each.kinds & WIRE for each in plans)


# -- the server's file -----------------------------------------------------------------------------


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


def test_zeros_that_a_full_disk_left_between_commands_are_passed_over(tmp_path: Path) -> None:
    data = command(b"SET", b"a", b"\0" * 9) + bytes(876) + command(b"DEL", b"a") + bytes(3)
    (tmp_path / "appendonly.aof").write_bytes(data)
    assert list(read_transactions(tmp_path)) == [[[b"SET", b"a", b"\0" * 9]], [[b"DEL", b"a"]]]


def test_a_file_that_the_server_has_rewritten_is_refused(tmp_path: Path) -> None:
    parts = tmp_path / "appendonlydir"
    with pytest.raises(DataError, match="no append-only file"):
        list(read_transactions(tmp_path))
    parts.mkdir()
    (parts / "x.manifest").write_text("file x.2.base.rdb seq 2 type b\nfile x.3.incr.aof seq 3 type i\n")
    with pytest.raises(DataError, match="rewritten"):
        list(read_transactions(tmp_path))


async def test_what_a_ledger_does_is_read_from_its_servers_file(
    redis_client: redis.asyncio.Redis, redis_server: str
) -> None:
    folder = (await redis_client.config_get("dir"))["dir"]
    assert folder is not None
    run = f"read-{os.getpid()}"
    ledger, registry = RedisLedger(redis_client, run), RedisRegistry(redis_client, run)
    await ledger.open(make_spec(run=run, group_size=1, units_per_update=1))
    generator = await registry.register(Role.GENERATOR, "generator-0")
    learner = await registry.register(Role.LEARNER, "learner")
    writer = RedisHeartbeatWriter(redis_server, run)
    assert await asyncio.to_thread(writer.beat, beat_of(generator, pid=77, rss_bytes=88))
    await asyncio.to_thread(writer.close)
    await registry.announce_weights(
        learner, WeightsAnnouncement(policy_version=3, digest="", path="", num_bytes=0, host="")
    )
    grant = await ledger.lease(generator, max_trajectories=1)
    chunk = msgspec.structs.replace(make_chunk(grant.leases[0].trajectory), worker=str(generator))
    await ledger.write_chunk(generator, chunk)
    await ledger.write_score(generator, chunk.id, reward())
    claim = await ledger.claim(learner, policy_version=0)
    assert isinstance(claim, Claim)
    await ledger.settle(learner, (claim.claim_id,))
    await registry.set_run_status(RunStatus(RunState.FINISHED, "1 updates done"))
    end, events = Status("finished", "1 updates done"), list[object]()
    # while the disk syncs the file, the server puts off what it appends
    async with asyncio.timeout(20.0):
        while end not in events:
            events = list(LedgerHistory(run, truth=lambda c: c.num_tokens > 0).read(read_transactions(Path(folder))))
            await asyncio.sleep(0.05)
    kinds = [event for event in events if not isinstance(event, Tally)]
    assert Epoch("generator-0", 1) in kinds and Published(3) in kinds and Admitted(0) in kinds
    assert Held("t.0.0", "generator-0#1") in kinds and end in kinds
    assert Beat("generator-0#1", 77, 0, 88) in kinds
    (stored,) = [event for event in kinds if isinstance(event, Stored)]
    assert (stored.chunk, stored.who, stored.end) == ("t.0.0.0", "generator-0#1", chunk.num_tokens) and stored.is_true
    (claimed,) = [event for event in kinds if isinstance(event, Claimed)]
    assert (claimed.claim, claimed.units) == (claim.claim_id, ("0",))
    assert [event for event in kinds if isinstance(event, Ended)] == [
        Ended("t.0.0.0", "trained"), Ended("t.0.0", "trained"),
    ]  # fmt: skip
    assert not any(event.groups_missing for event in events if isinstance(event, Tally))
    assert TrajectoryId.parse(stored.trajectory) == chunk.trajectory


# -- journals, clock, verifier ---------------------------------------------------------------------


def test_a_journal_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j" / "1.journal"
    journal = SamplingJournal(path)
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
    environment = os.environ | {"PYTHONPATH": str(ROOT / "ops/drill/shim"), "HEADRACE_DRILL_CLOCK": str(clock)}
    told = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, check=True, timeout=60)
    assert 3500 < time.time() - float(told.stdout) < 3700


# -- crashes ---------------------------------------------------------------------------------------


def test_a_workers_log_or_last_words_show_a_crash_and_a_verifiers_error_is_none(tmp_path: Path) -> None:
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


def test_a_generators_log_has_the_windows_that_the_ledger_refused(tmp_path: Path) -> None:
    row = {"event": "chunk_not_stored", "chunk": "t.5.1.2", "status": "fenced", "begin": 16, "num_tokens": 8}
    lines = [{"event": "update"}, row | {"worker": "generator-0", "epoch": 3}]
    (tmp_path / "generator-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(refused_windows(tmp_path)) == [NotStored("generator-0#3", "t.5.1", 16, 24)]


# -- observations of a live run --------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU env and /proc/self/status")
def test_a_supervisor_hears_hangups_although_the_drill_ignores_them(tmp_path: Path) -> None:
    show = "print([line for line in open('/proc/self/status') if line.startswith('SigIgn')][0].split()[1])"
    fleet = DrillFleet(tmp_path / "drill", [], host=[sys.executable, "-c", show])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fleet.start()
        assert fleet.supervisor.wait(30) == 0, fleet.output.read_text()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert int(fleet.output.read_text(), 16) & 1 << signal.SIGHUP - 1 == 0


def idler(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that works in a folder, and has begun to."""
    words = "print(flush=True); import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", words, str(folder)], cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    return process


def test_servers_are_known_by_their_working_folder_and_their_children_are_none(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "logs").mkdir()
    fork = "import os, time; os.fork(); print(flush=True); time.sleep(60)"
    witness = Witness(tmp_path)
    first = subprocess.Popen([sys.executable, "-c", fork], cwd=tmp_path / "ledger", stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.read(1)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    try:
        assert servers_of(tmp_path / "ledger") == {first.pid}
        second = idler(tmp_path / "ledger")
        assert servers_of(tmp_path / "ledger") == {first.pid, second.pid}
        (tmp_path / "logs" / "supervisor.jsonl").write_text(
            json.dumps({"event": "worker_exited", "worker": "learner", "meaning": "killed"}) + "\n"
            + json.dumps({"event": "worker_replaced", "worker": "reward-0", "reason": "silent"}) + "\n{torn"
        )  # fmt: skip
        seen = witness.close()
        second.kill()
        second.communicate()
    finally:
        for pid in (first.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        first.communicate()
    assert seen[-3] == Serving(tuple(sorted((first.pid, second.pid))))
    lost = [(event.worker, event.how, event.reason) for event in seen if isinstance(event, Lost)]
    assert lost == [("learner", "worker_exited", "killed"), ("reward-0", "worker_replaced", "silent")]
    assert servers_of(tmp_path / "ledger") == set()


def test_a_servers_log_tells_which_process_wrote_it_children_aside(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert list(servers(log)) == []
    lines = [
        "7:M 22 Nov 2026 08:21:39.272 * Ready",
        "7:M 22 Nov 2026 08:21:40.0 * x",
        "8:C 22 Nov 2026 08:22:0.0 * RDB",
    ]
    log.write_text("\n".join([*lines, "9:M 22 Nov 2026 08:23:0.0 * Ready", "7:M 22 Nov 2026 08:24:0.0 # again"]))
    assert list(servers(log)) == [ServerLogged(7), ServerLogged(9), ServerLogged(7)]


def test_what_a_worker_of_the_run_has_started_is_found_by_its_mark(tmp_path: Path) -> None:
    environment = {**os.environ, WORKER_MARK: worker_mark(tmp_path / "run", "environment-0")}
    with subprocess.Popen(["sleep", "600"], start_new_session=True, env=environment) as daemon:
        try:
            assert leftovers(tmp_path / "run") == [f"process {daemon.pid}: sleep 600"]
            assert leftovers(tmp_path / "other") == []
        finally:
            daemon.kill()


def test_everything_that_a_run_may_leave_is_found_and_its_files_are_not_called_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "sockets").mkdir(parents=True)
    (run / "supervisor.lock").write_text("1")
    (run / "history.jsonl").write_text("")
    assert leftovers(run) == []
    shared = weights_folder(run, shared_memory=True)
    temporary = Path(ipc_endpoint(run / ("long" * 30), "any").removeprefix("ipc://")).parent
    assert temporary.is_dir() and leftovers(run) == [], "the folder of another run is not ours"
    temporary.rmdir()
    temporary = temporary.with_name(f"headrace-{os.getuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:16]}")
    process = idler(run)
    try:
        shared.mkdir()
        temporary.mkdir()
        with socket.socket(socket.AF_UNIX) as unix, (run / "supervisor.lock").open() as lock:
            unix.bind(str(run / "sockets" / "x"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            words = [line.split()[0] for line in leftovers(run)]
        assert words == ["process", "shared", "temporary", "socket", "held"]
    finally:
        process.kill()
        process.communicate()
        shared.rmdir()
        temporary.rmdir()
    assert [line.split()[0] for line in leftovers(run)] == ["socket"]


# -- causes that must be named ---------------------------------------------------------------------

STRUCK = Struck(target="reward-1", folder="/run/checkpoints")


def answer(cause: str, who: str = "", *links: str, state: str = "running") -> dict[str, object]:
    chain = {"links": list(links), "cause": cause, "who": who, "outlook": "mends", "next": "wait"}
    return {"state": state, "headline": cause, "chains": [chain]}


NAMED = {
    **{kind: answer("ledger", "ledger") for kind in ASKED if "server" in kind or kind is FaultKind.ENDLESS_SCRIPT},
    FaultKind.LINK_CUT: answer("unreachable", "reward-1"),
    FaultKind.UNREACHABLE_NAME: answer("unreachable", "", "generator-0 does not reach reward-1 at all"),
    FaultKind.DISK_FULL: answer("disk", "learner", "no room in /run/checkpoints"),
    FaultKind.DISK_FULL_LEDGER: answer("disk", "ledger", "no room in /run/checkpoints"),
    FaultKind.HANGUP: answer("nobody", state="stopping"),
    FaultKind.ORPHANS_DOWN: answer("supervisor"),
}


@pytest.mark.parametrize("kind", sorted(ASKED))
def test_only_the_true_cause_counts_as_named(kind: FaultKind) -> None:
    assert TRUTHS[kind].is_named(NAMED[kind], STRUCK)
    assert not TRUTHS[kind].is_named(answer("working", "learner", "learner is at update 3"), STRUCK)
    assert not TRUTHS[kind].is_named({"state": "running", "chains": []}, STRUCK)
    if kind in (FaultKind.LINK_CUT, FaultKind.UNREACHABLE_NAME):
        assert not TRUTHS[kind].is_named(answer("unreachable", "reward-0", "to reward-10"), STRUCK)
        also = {"state": "running", "chains": [], "also": ["generator-0 does not reach reward-1 at tcp://127.0.0.1:5"]}
        assert TRUTHS[kind].is_named(also, STRUCK)
    if kind in (FaultKind.DISK_FULL, FaultKind.DISK_FULL_LEDGER):
        assert not TRUTHS[kind].is_named(answer("disk", "learner", "no room in /elsewhere"), STRUCK)
    if kind is FaultKind.HANGUP:
        assert not TRUTHS[kind].is_named(answer("nobody", state="running"), STRUCK)


def test_a_cause_is_polled_until_it_is_named_and_no_longer_than_its_time() -> None:
    answers = iter([None, answer("working"), answer("ledger", "ledger")])
    found = ask_until_named(FaultKind.MUTE_SERVER, STRUCK, lambda _: next(answers))
    assert found.seconds is not None and 0.3 < found.seconds < 5.0 and found.answer == "ledger"
    late = ask_until_named(FaultKind.MUTE_SERVER, STRUCK, lambda _: answer("working"), within_s=0.3)
    assert (late.seconds, late.answer) == (None, "working")

    def slow(_: float) -> dict[str, object]:
        time.sleep(0.4)
        return answer("ledger", "ledger")

    assert ask_until_named(FaultKind.MUTE_SERVER, STRUCK, slow, within_s=0.3).seconds is None, "too late is not in time"
