"""Claims about what a join token's user may send: all that workers' calls and scripts send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import redis.asyncio

from pipeline.ledger.redis.acl import COMMANDS

ROOT = Path(__file__).parents[4]
OF_WORKERS = (
    "pipeline/runtime/registry/redis.py",
    "pipeline/ledger/redis/ledger.py",
    "pipeline/ledger/redis/durable.py",
)
OF_OPERATORS = {"INFO", "CONFIG", "RPUSH"}
"""Sent by ``unwritten`` alone, for `headrace why`, and by ``add_settings_change``, for `headrace
update` and supervisors: no worker of a token changes settings."""
_SENT = re.compile(r"""\(\s*["']([A-Z]{3,}(?:[A-Z]|\b))["'],""")
_CALLED = re.compile(r"""redis\.call\(\s*["'](\w+)["']""")


async def test_every_command_of_registry_ledger_and_scripts_is_permitted_to_a_tokens_user(
    redis_client: redis.asyncio.Redis,
) -> None:
    sent = {word for name in OF_WORKERS for word in _SENT.findall((ROOT / name).read_text())}
    called = {word for path in (ROOT / "pipeline").rglob("*.lua") for word in _CALLED.findall(path.read_text())}
    assert {"HMGET", "ZMSCORE", "XREAD"} <= sent and {"ZADD", "HSET"} <= called, "the patterns still find them"
    names: Any = await redis_client.execute_command("ACL", "CAT", "read")
    reads = {name.decode() for name in names}
    assert {word.lower() for word in (sent | called) - OF_OPERATORS} - reads - {"time"} <= set(COMMANDS)
