"""The slot table: live requests in the first rows, then rows retained for trajectories that may
come back.

Invariant: rows ``0 .. num_live - 1`` are live; every later row is free or retained. Rows are
swapped to keep it so. :meth:`SlotTable.settle` carries out all collected swaps at once, for the
table's own arrays and the KV cache alike, so a step in which many requests end moves each row at
most once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protocol.ids import TrajectoryId
from protocol.trajectory import Segment
from workers.engines.generation.local.cache import RowStore
from workers.engines.generation.local.prompts import SharedPrompt, SharedPrompts
from workers.engines.generation.seam import WindowRequest
from workers.engines.generation.windows import segments
from workers.engines.model.rng import stream_key

_LENGTH_BLOCK = 256


@dataclass(slots=True)
class Occupant:
    trajectory: TrajectoryId
    row: int
    request: WindowRequest
    start: int
    """Context tokens (prompt and earlier response) when the current window began."""
    versions: list[tuple[int, int]]
    """(context length, policy version): tokens from that length on are of that version."""
    is_live: bool = True
    last_used: int = 0
    """Grows with every use; the smallest is evicted first."""
    has_current_prompt: bool = False
    """Whether its row has the prompt's keys and values by the weights of today."""
    prompt: SharedPrompt | None = None
    """Holds the prompt's keys and values in place of the row."""

    @property
    def stored(self) -> int:
        """Tokens of the context that the prompt holds."""
        return 0 if self.prompt is None else self.prompt.size

    def segments(self, length: int) -> tuple[Segment, ...]:
        return segments(self.versions, length)


@dataclass(slots=True)
class _Arrays:
    """Numbers per row. T is the length that rows have grown to."""

    tokens: np.ndarray
    """int32 [rows, T]: prompt and response"""
    logprobs: np.ndarray
    """float32 [rows, T]: behaviour log-probs of the tokens sampled in this window"""
    lengths: np.ndarray
    """int64 [rows]: tokens of the context, the newest included; the KV cache holds one less"""
    ends: np.ndarray
    """int64 [rows]: context length at which the window ends"""
    offsets: np.ndarray
    """int64 [rows]: prompt tokens, so that ``lengths - offsets`` is the position to sample next"""
    keys: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.tokens, self.logprobs, self.lengths, self.ends, self.offsets, self.keys))


@dataclass(slots=True)
class SlotTable:
    num_slots: int
    cache: RowStore
    prompts: SharedPrompts | None = None
    num_live: int = 0
    occupants: list[Occupant | None] = field(default_factory=list)
    arrays: _Arrays = field(init=False)
    _by_trajectory: dict[TrajectoryId, Occupant] = field(default_factory=dict)
    _order: dict[int, int] = field(default_factory=dict)
    """Row -> row that still holds its content, for swapped rows that are not settled yet."""
    _clock: int = 0

    def __post_init__(self) -> None:
        self.occupants = [None] * self.num_slots
        self.arrays = _Arrays(
            tokens=np.zeros((self.num_slots, _LENGTH_BLOCK), np.int32),
            logprobs=np.zeros((self.num_slots, _LENGTH_BLOCK), np.float32),
            lengths=np.zeros(self.num_slots, np.int64),
            ends=np.zeros(self.num_slots, np.int64),
            offsets=np.zeros(self.num_slots, np.int64),
            keys=np.zeros(self.num_slots, np.uint64),
        )

    # -- queries --

    def find(self, trajectory: TrajectoryId) -> Occupant | None:
        return self._by_trajectory.get(trajectory)

    def live(self) -> list[Occupant]:
        return [occupant for occupant in self.occupants[: self.num_live] if occupant is not None]

    def row_of_prompt(self, prompt: np.ndarray) -> int | None:
        """Return a row that has a prompt's keys and values by the weights of today, if there is one."""
        for occupant in filter(None, self.occupants):
            if (
                occupant.has_current_prompt
                and occupant.prompt is None
                and np.array_equal(occupant.request.prompt_tokens, prompt)
            ):
                return occupant.row
        return None

    def outdate_prompts(self, *, recompute: bool) -> None:
        """Let no prompt be copied or shared with new requests as it is: the weights are new."""
        for occupant in filter(None, self.occupants):
            occupant.has_current_prompt = False
        if self.prompts is not None:
            self.prompts.outdate(recompute=recompute)

    def context(self, row: int) -> np.ndarray:
        """Return int32 [length]: prompt and response of a settled row, as a view."""
        return self.arrays.tokens[row, : self.arrays.lengths[row]]

    # -- changes --

    def revive(self, request: WindowRequest, context: np.ndarray) -> Occupant | None:
        """Make a retained row live if it holds exactly this context, else evict it.

        The table must be settled."""
        held = self.find(request.trajectory)
        if held is None or held.is_live:
            return None
        if not np.array_equal(self.context(held.row), context):
            self.evict(held)
            return None
        self._swap(held.row, self.num_live)
        held.request, held.is_live = request, True
        self.num_live += 1
        self.settle()
        return self._begin(held, context.size)

    def admit(self, request: WindowRequest, context: np.ndarray, *, is_group: bool = False) -> Occupant:
        """Give a new request the next live row, evicting the least recently used retained row if
        none is free. Requires ``num_live < num_slots`` and a settled table.

        ``is_group``: requests with the same prompt will follow, so that it may be stored for all."""
        row = self.num_live
        if self.occupants[row] is not None:
            free = next((r for r in range(row + 1, self.num_slots) if self.occupants[r] is None), None)
            if free is None:
                oldest = min(filter(None, self.occupants[row:]), key=lambda occupant: occupant.last_used)
                free = oldest.row
                self.evict(oldest)
            self._swap(row, free)
            self.cache.reserve(free + 1, 0)
            self.settle()
        prompt = None
        if self.prompts is not None:
            is_new = self.row_of_prompt(request.prompt_tokens) is None
            prompt = self.prompts.join(request.prompt_tokens, is_group=is_group and is_new)
        occupant = Occupant(request.trajectory, row, request, 0, [], prompt=prompt)
        self.occupants[row] = occupant
        self._by_trajectory[request.trajectory] = occupant
        self.num_live += 1
        self._reserve(context.size + 1)
        self.arrays.tokens[row, : context.size] = context
        self.arrays.keys[row] = stream_key(request.seed, request.trajectory, request.sequence)
        self.arrays.offsets[row] = request.prompt_tokens.size
        return self._begin(occupant, context.size)

    def _begin(self, occupant: Occupant, length: int) -> Occupant:
        request, row = occupant.request, occupant.row
        window = min(request.window_tokens, request.max_response_tokens - request.response_tokens.size)
        self._reserve(length + window)
        longest = request.prompt_tokens.size + request.max_response_tokens - occupant.stored
        self.cache.max_length = max(self.cache.max_length, longest)
        self.arrays.lengths[row] = length
        self.arrays.ends[row] = length + window
        self.arrays.keys[row] = stream_key(request.seed, request.trajectory, request.sequence)
        occupant.start = length
        self._touch(occupant)
        return occupant

    def end(self, occupant: Occupant, *, retain: bool) -> None:
        """End a live occupant; ``retain`` keeps its row's content. Settle before the next step."""
        last = self.num_live - 1
        self._swap(occupant.row, last)
        self.num_live = last
        occupant.is_live = False
        self._touch(occupant)
        if not retain:
            self.evict(occupant)

    def evict(self, occupant: Occupant) -> None:
        """Free a row that is not live; when the table is empty, also free the cache's memory."""
        self.occupants[occupant.row] = None
        del self._by_trajectory[occupant.trajectory]
        if occupant.prompt is not None and self.prompts is not None:
            self.prompts.leave(occupant.prompt)
        if not self._by_trajectory:
            self.cache.release()

    def evict_retained(self) -> None:
        for occupant in [o for o in self.occupants[self.num_live :] if o is not None]:
            self.evict(occupant)

    def settle(self) -> None:
        moves = [(to, came) for to, came in self._order.items() if to != came and self.occupants[to] is not None]
        self._order.clear()
        if not moves:
            return
        targets, sources = [to for to, _ in moves], [came for _, came in moves]
        for array in self.arrays:
            array[targets] = array[sources]
        held = [int(self.arrays.lengths[o.row]) - o.stored for row in targets if (o := self.occupants[row]) is not None]
        self.cache.move(targets, sources, max(held) - 1)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._order[a], self._order[b] = self._order.get(b, b), self._order.get(a, a)
        one, other = self.occupants[a], self.occupants[b]
        self.occupants[a], self.occupants[b] = other, one
        if one is not None:
            one.row = b
        if other is not None:
            other.row = a

    def _touch(self, occupant: Occupant) -> None:
        self._clock += 1
        occupant.last_used = self._clock

    def _reserve(self, length: int) -> None:
        rows, have = self.arrays.tokens.shape
        if length > have:
            extra = -(-(length - have) // _LENGTH_BLOCK) * _LENGTH_BLOCK
            more = np.zeros((rows, extra), self.arrays.tokens.dtype)
            self.arrays.tokens = np.concatenate((self.arrays.tokens, more), axis=1)
            more = np.zeros((rows, extra), self.arrays.logprobs.dtype)
            self.arrays.logprobs = np.concatenate((self.arrays.logprobs, more), axis=1)
