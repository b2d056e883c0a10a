"""Scripts that keep a ledger's server busy: it runs one at a time, and answers nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ops.drill.fleet import DrillFleet
from pipeline.ledger.address import read_address

_BUSY = """
local from = redis.call('TIME')
while redis.call('TIME')[1] - from[1] < tonumber(ARGV[1]) do end
"""
_ENDLESS = """
redis.call('SET', KEYS[1], 'a script that has written is not ended by SCRIPT KILL')
while true do redis.call('TIME') end
"""
_KEY = "drill:busy"
_JOIN_S = 90.0


def keep_busy(fleet: DrillFleet, seconds: float | None) -> Callable[[], object]:
    """Run a script on a thread for ``seconds``, or for ever with None; return a function that waits for its end."""
    address = read_address(fleet.run_dir)
    assert address is not None, "a run that has taken updates has a server"

    def run() -> None:
        # no retry: a restarted server must not get the script again
        never = Retry(NoBackoff(), 0)
        with (
            redis.Redis.from_url(address.url, socket_timeout=_JOIN_S, retry=never) as client,
            suppress(redis.RedisError),
        ):
            client.execute_command("EVAL", _BUSY if seconds else _ENDLESS, 1, _KEY, seconds or 0.0)

    thread = threading.Thread(target=run, name="busy", daemon=True)
    thread.start()
    return lambda: thread.join(_JOIN_S)
