"""Counts both sides of the conservation law, in calls that each hold the server for milliseconds.

``scripts/audit.lua`` reads one batch per call, and explains why the sum is exact although work moves
meanwhile. Counters and work in flight are those of the last call; the *states* of work that did not move are
as old as their batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Final, Protocol

from pipeline.ledger.redis.connection import Command
from pipeline.ledger.redis.views import audit_from
from pipeline.ledger.types import Audit
from protocol.errors import LedgerError

MOST: Final = 500
"""Chunks and trajectories per call: a few milliseconds of the server's time."""
_MAX_AGAIN: Final = 500
"""Trajectories that one call reads again; the rest of its time goes to the walk."""
_MAX_WALKS: Final = 3
_STATES: Final = (b"open", b"leased", b"waiting", b"finished", b"ready", b"claimed")
"""In order, from the least advanced. A group is in the state of its least advanced member."""

Ask = Callable[[Command], Awaitable[Any]]


class Server(Protocol):
    async def ask(self, script: str, **arguments: object) -> Any: ...


async def audit(server: Server, lane: FinishedLane, *, most: int = MOST) -> Audit:
    """Return both sides of the conservation law at one moment.

    A walk that lost track starts again. So does the first one that finds a difference: the server may have
    been replaced by one that lacks the newest writes, whereas a real difference stays. Raises LedgerError
    when every walk loses track."""
    found = None
    for _ in range(_MAX_WALKS):
        again = await Walk(lane, most=most).run(server)
        if again is not None and (again.balances or found is not None):
            return again
        found = again
    if found is None:
        raise LedgerError(
            f"the audit lost track of the ledger {_MAX_WALKS} times: more work moves between two of its calls than the "
            "ledger keeps a list of; repeat it when the server is less busy"
        )
    return found


class FinishedLane:
    """Reads the trajectories that the value worker waits for or has claimed, in batches."""

    def __init__(self, ask: Ask, waiting: str, claims: str, claim: Callable[[str], str]) -> None:
        self._ask, self._waiting, self._claims, self._claim = ask, waiting, claims, claim

    async def names(self) -> set[bytes]:
        """Return the trajectories that did not move meanwhile; those that did are listed in ``moved``."""
        found = await self._members(self._waiting)
        for claim in await self._ask(("SMEMBERS", self._claims)):
            found |= await self._members(self._claim(claim.decode()))
        return found

    async def _members(self, key: str) -> set[bytes]:
        found: set[bytes] = set()
        after = "-inf"
        while page := await self._ask(("ZRANGEBYSCORE", key, after, "+inf", "WITHSCORES", "LIMIT", 0, MOST)):
            names, scores = ([pair[i] for pair in page] if isinstance(page[0], list) else page[i::2] for i in (0, 1))
            found.update(names)
            after = f"({float(scores[-1]):.0f}"
        return found


class Walk:
    """One walk over the store. Keeps a row for each trajectory in flight."""

    def __init__(self, lane: FinishedLane, *, most: int = MOST) -> None:
        self._lane, self._most = lane, most
        self._rows: dict[bytes, tuple[bytes, bytes, tuple[Any, ...]]] = {}
        """State, state for the value worker, and tokens by state of each trajectory."""
        self._again: dict[bytes, None] = {}
        """Trajectories to read again, in order."""

    async def run(self, server: Server) -> Audit | None:
        """Return the audit; None if more work moved between two calls than ``moved`` lists."""
        since, group, member, is_first = None, 0, 0, True
        while True:
            again = tuple(islice(self._again, _MAX_AGAIN))
            for name in again:
                del self._again[name]
            where = {"since": since, "group": group, "member": member, "is_last": not is_first and not self._again}
            names = tuple(name.decode() for name in again)
            reply = await server.ask("audit", most=self._most, **where, again=names)
            if reply is None:
                return None
            since, group, member, rows, left, *over = reply
            self._keep(rows)
            self._again |= dict.fromkeys(left)
            if is_first:
                is_first = False
                self._again |= dict.fromkeys(await self._lane.names())
            if over:
                return self._audit(*over)

    def _keep(self, rows: list[list[Any]]) -> None:
        for name, state, finished, *tokens in rows:
            if state or finished:
                self._rows[name] = (state, finished, tuple(tokens))
            else:
                self._rows.pop(name, None)

    def _audit(self, num_groups: int, counters: list[bytes]) -> Audit:
        return audit_from([counters, *self._in_flight(num_groups)])

    def _in_flight(self, num_groups: int) -> Iterator[tuple[bytes, bytes, int]]:
        trajectories, finished = Counter[bytes](), Counter[bytes]()
        tokens, groups = Counter[bytes](), dict[bytes, bytes]()
        for name, (state, lane, counts) in self._rows.items():
            if lane:
                finished[lane] += 1
            if state:
                trajectories[state] += 1
                for of, number in zip(counts[::2], counts[1::2], strict=True):
                    tokens[of] += number
                group = name.split(b".")[1]
                groups[group] = min(state, groups.get(group, state), key=_STATES.index)
        by_state = Counter(groups.values())
        # groups without members are in none of these states
        by_state[b"empty"] = num_groups - len(groups)
        counted = {b"groups": by_state, b"trajectories": trajectories, b"tokens": tokens, b"finished": finished}
        for currency, states in counted.items():
            for state, number in states.items():
                yield currency, state, number
