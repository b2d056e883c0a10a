"""Where the workers of a hung worker's role stand, for its incident.

It consumes the components of new incidents, and produces a few lines for each: its stacks beside
those of its role. It waits for the workers of this host to write their stacks, two looks of
``ANSWER_S`` at most. Meanwhile the observer goes on. Components that come meanwhile are examined
next, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from pipeline.process.stacks.request import stands_of
from pipeline.runtime.actor import ActorContext

HANGS: Final = frozenset({"hung", "stuck", "deadlock"})
"""Kinds of incidents whose workers are examined."""
ANSWER_S: Final = 1.5
_LOOKS = 2
"""Of one look every worker seems to stand."""

Told = Callable[[str, tuple[str, ...]], Awaitable[None]]
"""Takes a component and its lines."""


class HangStacks:
    """The examinations of one observer, one after another."""

    def __init__(self, ctx: ActorContext, tell: Told) -> None:
        self._ctx, self._tell = ctx, tell
        self._wanted: dict[str, None] = {}
        self._is_examining = False

    def examine(self, components: Iterable[str]) -> None:
        """Examine components: workers, or those of a circle, joined by ``>``."""
        self._wanted |= dict.fromkeys(components)
        if self._wanted and not self._is_examining:
            self._is_examining = True
            self._ctx.spawn("stacks", self._examine(), endless=False)

    async def _examine(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            workers = sorted({worker for component in wanted for worker in component.split(">")})
            read = partial(stands_of, self._ctx.run_dir, workers, num_looks=_LOOKS, answer_s=ANSWER_S)
            stands = await asyncio.to_thread(read)
            for component in wanted:
                known = [stands[worker] for worker in component.split(">") if worker in stands]
                lines = known[0] if len(known) == 1 else tuple(of[0] for of in known)
                if lines:
                    await self._tell(component, lines)
        self._is_examining = False
