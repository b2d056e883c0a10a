"""Claims about a fleet over tcp with CURVE: weights in ranges, refused strangers, and the effect of
hostile messages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.codec import encode
from protocol.ids import Role
from protocol.zeromq import CurveKeys
from tests.integration.fleet import EMULATED, ROOT, RunningFleet, fleet
from tests.protocol.samples import chunk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUICK = (
    *EMULATED,
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "wire.transport=tcp",
    "wire.max_message_mb=2",
    "weights.max_part_mb=1",
    # three parts
    "engines.settings.weights_kb=2500",
    # the run's own host takes the way of other hosts
    "launch.on=join",
    "launch.roles=['generator', 'reward']",
    "launch.poll_s=0.3",
    "fleet.generator=1",
)
# {"a": 1}
PICKLED = b"\x80\x04\x95\n\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."
FAR_GENERATOR = """
import sys
import workers.generator.weight_receiver
from workers.__main__ import work
workers.generator.weight_receiver.WeightReceiver._map = lambda self, announcement: None  # as on a host that has no such file
sys.exit(work(sys.argv[1:]))
"""


@contextmanager
def far_generator(run: RunningFleet) -> Iterator[None]:
    """A generator started by hand, as on another host: it cannot map the learner's files."""
    command = [
        sys.executable,
        "-c",
        FAR_GENERATOR,
        "generator",
        "--run-dir",
        str(run.run_dir),
        "--name",
        "generator-far",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        yield
        assert process.poll() is None, "the far generator ended"
    finally:
        process.terminate()
        process.wait(60)


def mailboxes(run: RunningFleet, role: str) -> dict[str, tuple[str, str]]:
    """Worker -> address and public key, as generators find them."""
    address = read_address(run.run_dir)
    assert address is not None

    async def look() -> dict[str, tuple[str, str]]:
        registry = RedisRegistry(connect(address.url), "test")
        try:
            return dict(await registry.endpoints(Role(role)))
        finally:
            await registry.aclose()

    return asyncio.run(look())


def push(endpoint: str, server_key: str, keys: tuple[bytes, bytes], messages: list[list[bytes]]) -> None:
    """Send raw messages with a key pair of our own. A refused one may have no connection any more,
    and would wait for it for ever."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.connect(endpoint)
        for message in messages:
            with suppress(zmq.Again):
                socket.send_multipart(message, zmq.NOBLOCK)


def test_weights_cross_hosts_while_strangers_and_hostile_messages_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with fleet(tmp_path, *QUICK) as run, far_generator(run_dir_ready(run)):
        run.wait_until(lambda: run.num_updates() >= 1, "the first update")

        def has_taken_weights() -> bool:
            far = run.workers().get("generator-far")
            return (
                far is not None and far["counters"].get("weight_swaps", 0) >= 3 and far["counters"].get("chunks", 0) > 0
            )

        run.wait_until(has_taken_weights, "three versions fetched over the wire, and chunks sampled with them")

        before = run.workers()
        [(endpoint, key)] = mailboxes(run, "reward").values()
        [(reference, reference_key)] = mailboxes(run, "reference").values()
        stranger = zmq.curve_keypair()
        push(endpoint, key, stranger, [[b"x"] * 3])
        log = run.run_dir / "logs" / "reward-0.jsonl"
        run.wait_until(lambda: "unknown key" in log.read_text(), "the stranger's refusal in the log")

        known = CurveKeys.load_or_create(run.run_dir / "keys")
        ours = (known.public.encode(), known.secret)
        good = [bytes(frame) for frame in encode(chunk(), sender="mallory#1", sequence=0, sent_s=0.0)]
        flipped = [*good[:-1], bytes(255 - byte for byte in good[-1])]
        hostile = [
            [frame[: len(frame) // 2] for frame in good],
            flipped,
            [b"\x00" * 600_000, b"\x00" * 600_000],
            [PICKLED],
            [os.urandom(200), os.urandom(200)],
            [b""],
            good[:1],
        ]
        push(endpoint, key, ours, hostile)
        push(reference, reference_key, ours, [*hostile, good])
        # over the socket's own limit: its connection is cut
        push(endpoint, key, ours, [[b"\x00" * (3 << 20)]])

        def refused(worker: str) -> float:
            queues = run.command("ledger", "queues", str(run.run_dir))
            return sum(row["num_refused"] for row in queues if row["name"].endswith(f">{worker}"))

        run.wait_until(
            lambda: refused("reward-0") >= len(hostile), "every hostile message counted at the reward worker"
        )
        run.wait_until(lambda: refused("reference-0") >= len(hostile), "and at the reference worker")
        run.wait_until(lambda: "mallory#1" in log.read_text(), "the peer's name in the log, which comes home later")
        seen = run.num_updates()
        run.wait_until(lambda: run.num_updates() >= seen + 2, "updates after the hostile messages")
        after = run.workers()
        for worker in ("reward-0", "reference-0", "learner"):
            assert after[worker]["pid"] == before[worker]["pid"], f"{worker} died of a message"
        assert run.audit()["balances"] is True
        joined = [
            path.parent for path in (tmp_path / "cache").glob("headrace/here/*/headrace/joined/*/test/config.toml")
        ]
        assert {path.parent.name.partition("-0-")[0] for path in joined} == {"generator", "reward"}
        assert not any(str(run.run_dir) in (path / "config.toml").read_text() for path in joined)
    assert not list((tmp_path / "cache").glob("headrace/here/*")), "the end of the run removes them"
    assert (run.run_dir / "logs" / "join-generator-0.out").exists()


def run_dir_ready(run: RunningFleet) -> RunningFleet:
    """Wait until the run's folder has all that a worker needs."""
    run.wait_until(lambda: (run.run_dir / "config.toml").exists() and read_address(run.run_dir), "the run's folder")
    return run
