"""Claims about a host that joins by a token: what it may do, and how that ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis.asyncio

from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.token import ledger_url, read_token, write_token
from pipeline.process.exit_codes import ExitCode
from protocol.errors import LedgerRefused
from protocol.ids import Role
from tests.pipeline.supervisor.joining.meeting import Meeting, meeting, until

pytestmark = pytest.mark.timeout(90)


def mirrored(run: Meeting, token_id: str) -> list[str]:
    return [path.name for path in (run.run_dir / "keys").glob(f"joined.{token_id}.*.pub")]


@pytest.mark.long
async def test_a_joined_host_goes_on_with_a_rotated_token_and_ends_with_a_revoked_one(
    tmp_path: Path, redis_server: str, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        admin = TokenAdmin(redis_client, run.config.run.name)
        token = await admin.create(Role.GENERATOR)
        operators, revoked_s = tmp_path / "generator.token", list[float]()
        write_token(operators, token)

        async def lives() -> bool:
            return bool(await run.registry.heartbeats())

        async def has(secret: str) -> bool:
            return read_token(place.path / "ledger.token").secret == secret

        async def num_connections() -> int:
            [row] = await admin.rows()
            return row.num_connections or 0

        async def control() -> None:
            await until(lives)
            assert len(mirrored(run, token.id)) == 1
            before = await num_connections()
            rotated = await admin.rotate(token.id, overlap_s=0.0)
            assert await num_connections() < before
            write_token(operators, rotated)
            await until(lambda: has(rotated.secret))

            async def all_are_back() -> bool:
                return await num_connections() >= before

            await until(all_are_back)
            assert not joining.done(), "the rotated token works on"
            revoked_s.append(time.monotonic())
            await admin.revoke(token.id)

            async def gone() -> bool:
                return not mirrored(run, token.id)

            await until(gone)

        with run.claimed() as place:
            url = ledger_url(redis_server, token, place.path)
            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(place, ledger_url=url, token_file=operators))
                tasks.create_task(control())
            assert read_ledger_url(place.path) == url
            assert not any(
                token.secret.encode() in path.read_bytes() for path in place.path.rglob("*") if path.is_file()
            )
        outcome = joining.result()
        assert time.monotonic() - revoked_s[0] < 3.0, "it learns of it at once"
        assert outcome.exit_code == ExitCode.CONFIG
        assert f"refused the join token headrace:{run.config.run.name}:{token.id}" in outcome.detail
        await admin.aclose()


async def test_a_revoked_or_wrong_token_joins_nothing(
    tmp_path: Path, redis_server: str, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        admin = TokenAdmin(redis_client, run.config.run.name)
        token, other = await admin.create(Role.GENERATOR), await TokenAdmin(redis_client, "another").create(Role.REWARD)
        await admin.revoke(token.id)
        with run.claimed() as place:
            with pytest.raises(LedgerRefused, match="it was revoked or rotated, or belongs to another server"):
                await run.join(place, ledger_url=ledger_url(redis_server, token, place.path))
            with pytest.raises(LedgerRefused, match="expected a join token of this run and role"):
                await run.join(place, ledger_url=ledger_url(redis_server, other, place.path))
        assert await run.registry.heartbeats() == []
        await TokenAdmin(redis_client, "another").revoke(other.id)
        await admin.aclose()
