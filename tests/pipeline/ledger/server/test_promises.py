"""Claims about external servers: a losing one is refused, a risky one gets a warning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.promises import ServerPromises, judge_terms, read_promises
from protocol.errors import ConfigError, LedgerUnavailable
from tests.own_server import own_server
from tests.pipeline.op_config import write_config

GOOD = ("maxmemory 100mb", "maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec")
# every command that the ledger needs, and no look at the server itself
WORKER = "user default on nopass ~* &* +@all -config"


async def told(url: str) -> ServerPromises:
    client = connect(url)
    try:
        return await read_promises(client, "ledger.url")
    finally:
        await client.aclose()


async def test_a_server_as_the_runbook_wants_it_is_taken_without_a_word(tmp_path: Path) -> None:
    with own_server(tmp_path, *GOOD) as url:
        terms = await told(url)
        assert (terms.max_memory_bytes, terms.eviction_policy) == (100 * 2**20, "noeviction")
        assert (terms.has_append_only_file, terms.flushes) == (True, "everysec")
        assert terms.version is not None
        assert terms.version >= (6, 2)
        assert judge_terms(terms, url) == ()


@pytest.mark.parametrize("user", [(), (WORKER,), (WORKER.replace("-config", "-info"),)])
async def test_a_server_that_evicts_is_refused_whichever_way_it_can_be_asked(
    tmp_path: Path, user: tuple[str, ...]
) -> None:
    evicting = ("maxmemory 100mb", "maxmemory-policy volatile-lru", "appendonly yes")
    with own_server(tmp_path, *evicting, *user) as url:
        terms = await told(url)
    with pytest.raises(ConfigError, match=r"volatile-lru at maxmemory 100 MB.*expected noeviction. Set"):
        judge_terms(terms, url)


async def test_a_policy_that_no_limit_brings_to_bear_is_no_reason_to_refuse(tmp_path: Path) -> None:
    with own_server(tmp_path, "maxmemory 0", "maxmemory-policy allkeys-lru", "appendonly yes") as url:
        assert judge_terms(await told(url), url) == ()


@pytest.mark.parametrize("user", [(), (WORKER.replace("-config", "-info"),)])
async def test_a_server_without_an_append_only_file_is_warned_of_once(tmp_path: Path, user: tuple[str, ...]) -> None:
    with own_server(tmp_path, "appendonly no", *user) as url:
        [warning] = judge_terms(await told(url), url)
    assert "keeps no append-only file" in warning
    assert "set `appendonly yes` there" in warning


async def test_a_server_that_leaves_flushing_to_its_system_is_warned_of(tmp_path: Path) -> None:
    with own_server(tmp_path, "appendonly yes", "appendfsync no") as url:
        [warning] = judge_terms(await told(url), url)
    assert "appendfsync no" in warning


async def test_what_a_user_is_not_permitted_to_ask_is_said_to_be_unknown(tmp_path: Path) -> None:
    with own_server(tmp_path / "config", *GOOD, WORKER) as url:
        [warning] = judge_terms(await told(url), url)
        assert "could not check appendfsync of" in warning
    with own_server(tmp_path / "neither", *GOOD, f"{WORKER} -info") as url:
        terms = await told(url)
        assert terms == ServerPromises(None, None, None, None, None)
        [warning] = judge_terms(terms, url)
        assert "could not check maxmemory, maxmemory-policy, appendonly, appendfsync of" in warning
        assert "Ensure that it has maxmemory-policy noeviction, appendonly yes" in warning


def test_a_server_that_is_too_old_is_refused() -> None:
    terms = ServerPromises((5, 0, 14), 0, "noeviction", True, "everysec")
    with pytest.raises(ConfigError, match=r"is version 5\.0\.14; expected Redis 6\.2 or later"):
        judge_terms(terms, "redis://host:6379/0")


async def test_a_server_with_too_few_connections_for_the_fleet_is_refused(
    tmp_path: Path,
) -> None:
    with own_server(tmp_path, *GOOD, "maxclients 60") as url:
        terms = await told(url)
        assert terms.max_clients == 60
        assert judge_terms(terms, url, num_workers=5) == ()
        busy = dataclasses.replace(terms, num_clients=20)
        [warning] = judge_terms(busy, url, num_workers=5)
        assert "has 20 of 60 connections in use; this run needs 47, and 40 are free" in warning
        with pytest.raises(
            ConfigError, match=r"accepts 60 connections \(maxclients\); 10 workers need 62. Set `maxclients"
        ):
            judge_terms(terms, url, num_workers=10)


async def test_a_server_that_is_not_there_is_unavailable_not_unknown() -> None:
    with pytest.raises(LedgerUnavailable):
        await told("redis://127.0.0.1:1/0")


def test_config_check_and_up_say_so_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_config(tmp_path))
    with own_server(tmp_path / "loose", "appendonly no", "requirepass pw", url="redis://:pw@127.0.0.1:{port}/0") as url:
        monkeypatch.setenv("REDIS_URL", url)
        done = CliRunner().invoke(headrace, ["config", "check", path], standalone_mode=False)
        assert done.exception is None, done.output
        assert done.output.count("keeps no append-only file") == 1
        assert ":pw@" not in done.output
        done = CliRunner().invoke(headrace, ["config", "check", path, "--json"], standalone_mode=False)
        assert any("keeps no append-only file" in line for line in json.loads(done.stdout)["findings"])
    evicting = ("maxmemory 100mb", "maxmemory-policy allkeys-lru", "appendonly yes")
    with own_server(tmp_path / "evicting", *evicting) as url:
        monkeypatch.setenv("REDIS_URL", url)
        for words in (["config", "check", path], ["up", path]):
            with pytest.raises(ConfigError, match="allkeys-lru"):
                headrace.main(words, standalone_mode=False)
    with own_server(tmp_path / "narrow", *GOOD, "maxclients 40") as url:
        monkeypatch.setenv("REDIS_URL", url)
        with pytest.raises(ConfigError, match=r"accepts 40 connections \(maxclients\); \d+ workers need"):
            headrace.main(["config", "check", path], standalone_mode=False)
    assert not (tmp_path / "runs").exists()
