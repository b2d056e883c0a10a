"""Claims about holes in the append-only file, which a full disk leaves after a rewrite."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.server.holes import holes_of, take_out_holes
from protocol.errors import LedgerUnavailable

WORDS = st.binary(max_size=20)
COMMANDS = st.lists(st.lists(WORDS, min_size=1, max_size=3), max_size=8)


def encoded(command: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)


@contextmanager
def serving(run_dir: Path) -> Iterator[redis.Redis]:
    server = EmbeddedServer(run_dir, max_memory_mb=64)
    server.start()
    client = redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))
    try:
        yield client
    finally:
        client.close()
        server.stop()


def written_file(run_dir: Path) -> Path:
    """Return the file that a server appends to."""
    folder = run_dir / "ledger" / "appendonlydir"
    return max(folder.glob("*.incr.aof")) if folder.is_dir() else run_dir / "ledger" / "appendonly.aof"


@given(COMMANDS, st.lists(st.integers(1, 9000), max_size=8), st.binary(max_size=5))
def test_holes_between_commands_are_found_and_zeros_in_commands_are_data(
    commands: list[list[bytes]], sizes: list[int], tail: bytes
) -> None:
    data, expected = b"", list[tuple[int, int]]()
    for at, command in enumerate(commands):
        data += encoded(command)
        if at < len(sizes):
            expected.append((len(data), len(data) + sizes[at]))
            data += bytes(sizes[at])
    # a last command that was cut short is no hole, nor is anything behind other damage
    found = list(holes_of(data + b"*2\r\n$4\r\n" + tail[:3]))
    assert found == expected
    assert list(holes_of(data + b"x" + bytes(50) + encoded([b"PING"]))) == expected


def test_a_server_starts_on_a_file_with_holes_and_has_everything(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        client.set("before", b"\0" * 100)
    path = written_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        whole + bytes(876) + encoded([b"SET", b"after", b"1"]) + bytes(3) + encoded([b"SET", b"last", b"2"])
    )
    path.chmod(0o600)
    with capture_logs() as logs, serving(tmp_path) as client:
        assert (client.get("before"), client.get("after"), client.get("last")) == (b"\0" * 100, b"1", b"2")
    (said,) = [line for line in logs if line["event"] == "ledger_file_mended"]
    assert said["num_bytes"] == 879
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir() if "holes" in found.name] == []
    with capture_logs() as logs, serving(tmp_path) as client:
        assert client.get("last") == b"2"
    assert "ledger_file_mended" not in [line["event"] for line in logs]


def test_other_damage_is_left_as_it_is_and_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        client.set("before", 1)
    path = written_file(tmp_path)
    path.write_bytes(damaged := path.read_bytes() + b"no command" + bytes(100) + encoded([b"SET", b"after", b"1"]))
    server = EmbeddedServer(tmp_path, max_memory_mb=64)
    with pytest.raises(LedgerUnavailable, match="at its start"):
        server.start()
    assert path.read_bytes() == damaged
    assert take_out_holes(tmp_path / "ledger") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_was_full_after_a_rewrite_loses_nothing(tmp_path: Path) -> None:
    (ledger := tmp_path / "ledger").mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(ledger)]
    if subprocess.run(command, capture_output=True, timeout=30).returncode:
        pytest.skip("no right to mount here")
    try:
        with serving(tmp_path) as client:
            client.bgrewriteaof()
            for _ in range(1000):
                if not client.info("persistence")["aof_rewrite_in_progress"]:
                    break
            client.set("first", bytes(10_000))
            ballast = ledger / "ballast"
            with ballast.open("wb") as file:
                while (room := os.statvfs(ledger).f_bavail * 4096) > 4096:
                    file.write(bytes(min(room - 4096, 65536)))
                    file.flush()
            # more than there is room for: cut short, and refused until there is room again
            client.set("second", os.urandom(20_000))
            refusals = [_refused(client) for _ in range(50)]
            assert any(refusals), "the disk was not full"
            ballast.unlink()
            while _refused(client):
                pass
            client.set("third", 3)
            second = client.get("second")
        with serving(tmp_path) as client:
            assert (client.get("first"), client.get("second"), client.get("third")) == (bytes(10_000), second, b"3")
    finally:
        subprocess.run(["umount", "-l", str(ledger)], capture_output=True, timeout=30)


def _refused(client: redis.Redis) -> bool:
    try:
        client.set("refused?", 1)
    except redis.ResponseError:
        return True
    return False
