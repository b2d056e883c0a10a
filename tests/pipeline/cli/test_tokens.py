"""Claims about ``headrace fleet tokens``, as an operator gives it: real server, files and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config.load import write_resolved
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.token import Token, ledger_url, read_token
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import ConfigError, Fenced
from protocol.ids import Role
from tests.own_server import own_server
from tests.pipeline.op_config import op_config
from tests.pipeline.runtime.registries import beat_of

pytestmark = pytest.mark.timeout(60)
OWNER = "redis://:owners-pw@127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_server(tmp_path_factory.mktemp("server"), "requirepass owners-pw", "save ''", url=OWNER) as url:
        yield url


@pytest.fixture
def run_dir(server: str, tmp_path: Path) -> Path:
    """A run's folder, as a supervisor leaves it beside an external ledger."""
    with redis.Redis.from_url(server) as client:
        client.flushall()
    config = op_config(tmp_path, "wire.transport=tcp")
    config.run_dir.mkdir(parents=True, mode=0o700)
    write_resolved(config, config.run_dir)
    write_address(config.run_dir, LedgerAddress(url=server))
    return config.run_dir


def said(*words: str | Path, as_json: bool = True) -> Any:
    command = ["fleet", "tokens", *map(str, words), *(["--json"] if as_json else [])]
    done = CliRunner().invoke(headrace, command, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout) if as_json else done.output


def is_accepted(server: str, token: Token, folder: Path) -> bool:
    async def ping() -> bool:
        client = connect(ledger_url(server.replace(":owners-pw@", ""), token, folder), patience_s=1.0)
        try:
            return bool(await client.ping())
        except redis.ConnectionError:
            return False
        finally:
            await client.aclose()

    return asyncio.run(ping())


def test_a_token_is_made_listed_rotated_and_revoked(server: str, run_dir: Path, tmp_path: Path) -> None:
    made = said("create", run_dir, "--role", "generator")
    path = run_dir / "tokens" / f"{made['token']}.token"
    assert made == {"token": made["token"], "role": "generator", "run": "op", "file": str(path)}
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    first = read_token(path)
    assert (first.run, first.role, first.id) == ("op", Role.GENERATOR, made["token"])
    assert is_accepted(server, first, tmp_path)
    out = tmp_path / "r.token"
    other = said("create", run_dir, "--role", "reward", "--out", out)
    assert [(row["id"], row["role"]) for row in said("list", run_dir)] == [
        (first.id, "generator"),
        (other["token"], "reward"),
    ]
    said("rotate", first.id, run_dir)
    second = read_token(path)
    assert second.secret != first.secret
    assert is_accepted(server, first, tmp_path) and is_accepted(server, second, tmp_path)
    assert "both secrets work" in said("list", run_dir, as_json=False)
    said("rotate", first.id, run_dir, "--overlap", "0")
    assert not is_accepted(server, second, tmp_path) and is_accepted(server, read_token(path), tmp_path)
    assert said("revoke", first.id, other["token"], run_dir)["revoked"] == [first.id, other["token"]]
    assert not is_accepted(server, read_token(path), tmp_path)
    assert said("list", run_dir, as_json=False).startswith("no tokens; ")


def test_a_revoked_tokens_workers_are_fenced_and_others_are_not(server: str, run_dir: Path, tmp_path: Path) -> None:
    path = Path(said("create", run_dir, "--role", "generator")["file"])
    token = read_token(path)

    async def revoke() -> list[str]:
        url = ledger_url(server.replace(":owners-pw@", ""), token, tmp_path)
        joined = RedisRegistry(connect(url, client_name="generator-far-0"), "op")
        home = RedisRegistry(connect(server, client_name="generator-0"), "op")
        far_worker = await joined.register(Role.GENERATOR, "generator-far-0")
        worker = await home.register(Role.GENERATOR, "generator-0")
        from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter

        for who in (far_worker, worker):
            writer = RedisHeartbeatWriter(server, "op")
            assert await asyncio.to_thread(writer.beat, beat_of(who))
            await asyncio.to_thread(writer.close)
        found = await asyncio.to_thread(said, "revoke", token.id, run_dir)
        with pytest.raises(Fenced):
            await home.set_endpoint(far_worker, "tcp://127.0.0.1:1")
        await home.set_endpoint(worker, "tcp://127.0.0.1:1")
        await joined.aclose()
        await home.aclose()
        return found["ended_workers"]

    assert asyncio.run(revoke()) == ["generator-far-0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create", "--role", "generator", "--out", "{there}"], "exists already; expected a new file"),
        (["create", "--role", "generator", "--out", "{none}/x"], "is not a folder"),
        (["revoke", "generator-none"], "has no token 'generator-none'; it has none"),
        (["rotate", "generator-none"], "has no token 'generator-none'"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence_and_leave_no_token(
    words: list[str], message: str, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").touch()
    words = [word.format(there=tmp_path / "there", none=tmp_path / "none") for word in words]
    with pytest.raises(ConfigError, match=message):
        said(*words, "--run", run_dir)
    assert said("list", run_dir) == []


def test_a_run_whose_mailboxes_are_on_ipc_gets_a_warning(run_dir: Path, tmp_path: Path) -> None:
    write_resolved(op_config(tmp_path), run_dir)
    assert "no other host can reach; start the run with wire.transport=tcp" in said(
        "create", run_dir, "--role", "reward", as_json=False
    )


def test_no_secret_is_in_arguments_environment_output_or_other_files(run_dir: Path, tmp_path: Path) -> None:
    """Real processes, watched from outside while they run."""
    seen: list[bytes] = []
    outputs: list[bytes] = []

    def command(*words: str) -> Any:
        line = [sys.executable, "-m", "pipeline.cli", "fleet", "tokens", *words, "--run", str(run_dir)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None:
            for name in ("cmdline", "environ"):
                # It has ended, or this system has no such file.
                with contextlib.suppress(OSError):
                    seen.append(Path(f"/proc/{process.pid}/{name}").read_bytes())
            time.sleep(0.01)
        assert process.stdout is not None and process.stderr is not None
        outputs.extend((process.stdout.read(), process.stderr.read()))
        process.stdout.close()
        process.stderr.close()
        return process.returncode

    path = tmp_path / "t.token"
    assert command("create", "--role", "generator", "--out", str(path)) == 0
    first = read_token(path)
    assert command("rotate", first.id, "--out", str(path), "--json") == 0
    second = read_token(path)
    assert command("list", "--json") == 0
    assert command("revoke", first.id) == 0
    assert command("revoke", first.id) == 2
    assert seen and len(outputs) == 10
    files = [found.read_bytes() for found in run_dir.rglob("*") if found.is_file()]
    for secret in (first.secret, second.secret):
        assert not any(secret.encode() in text for text in (*seen, *outputs, *files))
    assert any(first.id.encode() in text for text in outputs)
    assert b"owners-pw" not in b"".join((*seen, *outputs))
    assert "owners-pw" not in json.dumps(dict(os.environ))
