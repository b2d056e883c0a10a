"""The ledger of a simulated run: its rules, responses without text, and the time of its server."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.ledger.rules import GroupUnit, LedgerRules, TrajectoryUnit, UnitName, UnitRecord
from pipeline.ledger.types import DropReason, LedgerSpec, Refusal, Unit
from pipeline.plan.costs import LedgerCosts
from pipeline.plan.simulate.clock import Clock
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field

Segment = tuple[int, int]
"""A policy version, and the number of tokens it sampled."""

_CHUNK_BYTES = 512
_TOKEN_BYTES = 12
"""A token and its log-prob, and what else the blob of a chunk has."""
_SCORE_BYTES = 4


@dataclass(slots=True)
class Window(UnitRecord):
    """A stored chunk."""

    segments: Sequence[Segment] = ()
    num_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


@dataclass(slots=True)
class Response(TrajectoryUnit):
    length: int = 0
    """Tokens that it will have."""
    done: int = 0
    """Tokens that are stored."""
    live: int = 0
    """Stored chunks that no update has trained."""
    windows: list[ChunkId] = field(default_factory=list[ChunkId])


class SimulatedLedger(LedgerRules[GroupUnit, Response, Window]):
    """``length`` and ``accuracy`` are of a trajectory."""

    def __init__(
        self,
        spec: LedgerSpec,
        length: Callable[[TrajectoryId], int],
        accuracy: Callable[[TrajectoryId], float],
    ) -> None:
        super().__init__(spec)
        self._length = length
        self._accuracy = accuracy
        self._num_scored = len(spec.fields & {Field.REFERENCE, Field.VALUE})
        self.num_dropped: dict[DropReason, int] = {}
        self.num_changes = 0
        """Chunks and scores written: it stands still if the run does."""
        self.most_in_flight = 0
        """Largest credit in use beside what the published updates trained."""
        self.on_credit: Callable[[], None] = lambda: None
        """Called when a refused generator may be granted something."""

    def new_group(self, prompt: int) -> GroupUnit:
        return GroupUnit(live=self.spec.group_size, prompt=prompt)

    def new_trajectory(self) -> Response:
        return Response()

    def lease(self, max_trajectories: int, *, policy_version: int) -> tuple[list[TrajectoryId], Refusal | None]:
        leases: list[TrajectoryId] = []
        while len(leases) < max_trajectories:
            taken = self.take(is_behind=policy_version < self.version)
            if isinstance(taken, Refusal):
                return leases, taken
            response = self.trajectories[taken]
            if not response.length:
                response.length = self._length(taken)
            self.begin_age(taken, response.next)
            leases.append(taken)
            self._count_credit()
        return leases, None

    def write(self, name: TrajectoryId, segments: Sequence[Segment]) -> tuple[ChunkId, frozenset[Field], bool]:
        """Store the next window; return its chunk, the fields it needs and whether its generator continues it."""
        self.num_changes += 1
        response = self.trajectories[name]
        chunk = ChunkId(name, response.next)
        num_tokens = sum(tokens for _, tokens in segments)
        num_bytes = _CHUNK_BYTES + num_tokens * (_TOKEN_BYTES + _SCORE_BYTES * self._num_scored)
        self.chunks[chunk] = Window(segments=segments, num_bytes=num_bytes)
        self.stored_bytes += num_bytes
        response.next += 1
        response.done += num_tokens
        response.live += 1
        response.final = final = response.done >= response.length
        response.windows.append(chunk)
        fields = self.needed_fields(name, final=final, ends_turn=False, num_tokens=num_tokens)
        self.add_to_unit(chunk, segments[0][0], len(fields), final=final)
        continues = not final
        if continues and self.spec.unit is Unit.CHUNK:
            continues = self.continue_or_park(chunk, segments[-1][0])
            self._count_credit()
        return chunk, fields, continues

    def score(self, chunk: ChunkId, field: Field) -> None:
        """Write a field of a stored chunk."""
        self.num_changes += 1
        if chunk not in self.chunks:  # its group was dropped
            return
        self.record(self.unit_of(chunk)).missing -= 1
        if field is Field.REWARD and self.judge(chunk, self._accuracy(chunk.trajectory), masked=False):
            return
        self.ready_if_complete(chunk)

    def _count_credit(self) -> None:
        trained = self.version * self.spec.units_per_update
        self.most_in_flight = max(self.most_in_flight, self.used - trained)

    def advance(self, version: int) -> None:
        self.version = version
        self.on_credit()

    def segments_of(self, name: UnitName) -> list[Segment]:
        """Return what a unit's tokens were sampled with."""
        return [segment for chunk in self.chunks_of(name) for segment in self.chunks[chunk].segments]

    def chunks_of(self, name: UnitName) -> list[ChunkId]:
        if isinstance(name, ChunkId):
            return [name]
        names = self.members(name) if isinstance(name, int) else iter((name,))
        return [chunk for one in names for chunk in self.trajectories[one].windows]

    def end_unit(self, name: UnitName, reason: DropReason | None, made: int | None = None) -> None:
        self.leave(name, reason)
        if reason is not None:
            self.num_dropped[reason] = self.num_dropped.get(reason, 0) + 1
        chunks = self.chunks_of(name)
        for chunk in chunks:
            self.stored_bytes -= self.chunks.pop(chunk).num_bytes
            self.trajectories[chunk.trajectory].live -= 1
        for trajectory in {chunk.trajectory for chunk in chunks}:
            response = self.trajectories[trajectory]
            if response.final and not response.live:
                del self.trajectories[trajectory]
                group = self.groups[trajectory.group]
                group.live -= 1
                if not group.live:
                    del self.groups[trajectory.group]
        if reason is not None:
            self.on_credit()


class Server:
    """One core that answers all calls to the ledger in turn."""

    def __init__(self, clock: Clock, costs: LedgerCosts, num_workers: int) -> None:
        self._clock = clock
        self._costs = costs
        self._share = 1.0 - min(0.99, costs.worker_share * num_workers)
        self._free_s = 0.0
        self.busy_s = 0.0
        """Without heartbeats and polls."""

    @property
    def polls(self) -> float:
        """Share of the core that heartbeats and polls take."""
        return 1.0 - self._share

    def reply_s(self, num_tokens: float = 0.0, *, is_chunk: bool = False) -> float:
        """Return the seconds until an answer. A chunk's whole path counts when it is written."""
        now = self._clock.now
        if is_chunk:
            served_s = self._costs.served_s(num_tokens)
            self._free_s = max(now, self._free_s) + served_s / self._share
            self.busy_s += served_s
        return max(0.0, self._free_s - now) + self._costs.answer_s


class Versions:
    """Which version an engine used from which step on."""

    def __init__(self) -> None:
        self._steps = [0]
        self._versions = [0]

    def swap(self, step: int, version: int) -> None:
        self._steps.append(step)
        self._versions.append(version)

    def segments(self, begin: int, end: int) -> list[Segment]:
        """Return the versions of the steps from ``begin`` to ``end``."""
        found: list[Segment] = []
        place = bisect_right(self._steps, begin) - 1
        while begin < end:
            until = self._steps[place + 1] if place + 1 < len(self._steps) else end
            if min(until, end) > begin:
                found.append((self._versions[place], min(until, end) - begin))
            begin, place = max(begin, min(until, end)), place + 1
        return found
