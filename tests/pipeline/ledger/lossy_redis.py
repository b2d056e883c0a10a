"""A ledger on a server whose replies are lost now and then, and whose requests come twice."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

from pipeline.ledger.redis.ledger import RedisLedger
from protocol.errors import LedgerError

READING = {"totals", "audit", "queues", "waits", "groups", "staleness", "drops", "life"}
ANSWERED_ALIKE = {
    *(
        "lease",
        "give_back",
        "overdue",
        "finished_group",
        "expire_scoring",
        "spend",
        "fail_score",
        "claim",
        "claim_finished",
        "settle",
        "return_claim",
        "recover",
        "recover_finished",
        "cancel",
    ),
}
"""Calls whose repeat gets the first answer again; a keyed write's repeat gets DUPLICATE."""


class LossyRedis(RedisLedger):
    """Loses replies now and then, so that the request is sent again, and remembers requests whose
    copies may still arrive."""

    def __init__(self, client, run: str, *, now, dice: random.Random) -> None:
        super().__init__(client, run, now=now, most=8)
        self._dice = dice
        self._sent: list = []

    async def _call(self, name, who, **arguments):
        answer = await super()._call(name, who, **arguments)
        if name in READING:
            return answer
        luck = self._dice.random()
        if luck < 0.05:
            await self._repeat(answer, name, who, arguments)
        elif luck < 0.1 and self._sent:
            await self._copy(*self._dice.choice(self._sent))
        if name not in (
            "renew",
            "extend_scoring",
            "requeue",
            "retry",
            "pause",
            "resume",
            # a copy of these acts again: it moves a lease's end, ...
        ):
            self._sent = [*self._sent[-60:], (name, who, arguments)]
        return answer

    async def _repeat(self, answer, name, who, arguments) -> None:
        """The reply was lost, and the client repeats the call."""
        before = await self.contents()
        again = await super()._call(name, who, **arguments)
        assert await self.contents() == before, f"a repeat of {name} changed the ledger"
        assert name not in ANSWERED_ALIKE or again == answer, name
        reached["repeated"] += 1

    async def _copy(self, name, who, arguments) -> None:
        """A connection that was given up delivers its request long after the answer."""
        before = await self.contents()
        # fenced by now, or overtaken
        with suppress(LedgerError):
            await super()._call(name, who, **arguments)
        assert await self.contents() == before, f"a late copy of {name} changed the ledger"
        reached["copied"] += 1

    async def contents(self) -> list:
        return await self._client.eval(CONTENTS, 0)


CONTENTS = """
local read = {
  string = function(key) return redis.call('GET', key) end,
  hash = function(key)
    local flat, rows = redis.call('HGETALL', key), {}
    for i = 1, #flat, 2 do rows[#rows + 1] = flat[i] .. '=' .. flat[i + 1] end
    table.sort(rows)
    return rows
  end,
  set = function(key) local found = redis.call('SMEMBERS', key) table.sort(found) return found end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
}
local names, found = redis.call('KEYS', '*'), {}
table.sort(names)
for _, key in ipairs(names) do found[#found + 1] = { key, read[redis.call('TYPE', key).ok](key) } end
return found
"""
"""All that a server holds, in an order that does not depend on how it holds it."""
reached: Counter[str] = Counter()
"""How often a story came to the most important steps; a suite that never gets there would agree
about nothing."""
