"""The registry's contract again, with join tokens: their rules permit all that workers do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.token import ledger_url
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
from protocol.ids import Role
from tests.pipeline.runtime import test_registry, test_registry_news, test_registry_relays
from tests.pipeline.runtime.registries import Subject, announcement

OF_OWNER = ("set_fleet", "replace_fleet", "add_settings_change", "redis_server", "redis_client")
"""Calls that no token may make, and tests with a connection of their own."""
OF_LEARNER = ("announce_weights", "set_run_status", "announcement(")
CLAIMS = {
    name: (claim, inspect.getsource(claim))
    for module in (test_registry, test_registry_news, test_registry_relays)
    for name, claim in vars(module).items()
    if name.startswith("test_") and "subject" in inspect.signature(claim).parameters
}
globals().update(
    {
        name: claim
        for name, (claim, text) in CLAIMS.items()
        if not any(word in text for word in (*OF_OWNER, *OF_LEARNER))
    }
)


@pytest.fixture(params=[Role.GENERATOR, Role.LEARNER])
async def subject(
    request: pytest.FixtureRequest, redis_server: str, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> AsyncIterator[Subject]:
    admin = TokenAdmin(redis_client, "contract")
    token = await admin.create(request.param)
    url = ledger_url(redis_server, token, tmp_path)
    writer, registry = RedisHeartbeatWriter(url, "contract"), RedisRegistry(connect(url), "contract")
    yield Subject(registry, writer)
    await asyncio.to_thread(writer.close)
    await registry.aclose()
    await admin.revoke(token.id)
    await admin.aclose()


def test_most_of_the_contract_is_run_by_tokens() -> None:
    assert len([name for name in globals() if name in CLAIMS]) >= 10


@pytest.mark.parametrize("subject", [Role.LEARNER], indirect=True)
async def test_a_learner_publishes_by_its_token(subject: Subject) -> None:
    who = await subject.registry.register(Role.LEARNER, "learner")
    await subject.registry.announce_weights(who, announcement(1))
    found = await subject.registry.weights()
    assert found is not None and found.policy_version == 1
