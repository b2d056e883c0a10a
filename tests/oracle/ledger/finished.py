"""The in-memory ledger's lane for the value worker: finished trajectories, apart from their chunks.

A trajectory becomes claimable with the write of its last value or its reward, whichever is later.
The Redis ledger has the same in its ``finished:*`` keys."""

from __future__ import annotations

from collections import Counter

from pipeline.ledger.sorted_set import SortedSet
from pipeline.ledger.stored import read_finished
from pipeline.ledger.types import Balance, DropReason, FinishedClaim
from protocol.ids import ChunkId, TrajectoryId
from tests.oracle.ledger.records import CHUNK_OVERHEAD_BYTES, FinishedRecord


class FinishedLane:
    """Trajectories stored for the value worker, whatever becomes of their units."""

    def __init__(self) -> None:
        self.records: dict[TrajectoryId, FinishedRecord] = {}
        """Claimed, waiting, and incomplete ones; the ledger still holds the incomplete ones."""
        self.waiting: SortedSet[TrajectoryId] = SortedSet()
        self.claims: dict[str, list[TrajectoryId]] = {}
        self.num_bytes = 0
        self.num_admitted = 0
        self.num_trained = 0
        self._dropped: Counter[str] = Counter()

    def keep_value(self, chunk: ChunkId, blob: bytes, now: float) -> None:
        """Keep a chunk's values."""
        record = self._record(chunk.trajectory)
        record.values[chunk.index] = blob
        self.num_bytes += len(blob)
        self._admit_if_complete(chunk.trajectory, record, now)

    def keep_end(self, chunk: ChunkId, num_chunks: int, final: bytes, reward: bytes, now: float) -> None:
        """Keep the final chunk and its reward."""
        record = self._record(chunk.trajectory)
        record.num_chunks, record.final, record.reward = num_chunks, final, reward
        self.num_bytes += len(final) + len(reward)
        self._admit_if_complete(chunk.trajectory, record, now)

    def claim(self, claim_id: str, num_trajectories: int) -> FinishedClaim | int:
        """Claim exactly so many, in order of admission; or return how many there are."""
        if len(self.waiting) < num_trajectories:
            return len(self.waiting)
        names = [name for name, _ in zip(self.waiting, range(num_trajectories), strict=False)]
        for name in names:
            self.waiting.discard(name)
        self.claims[claim_id] = names
        kept = [self.records[name] for name in names]
        read = [
            read_finished(one.final, one.reward, [one.values[index] for index in sorted(one.values)]) for one in kept
        ]
        return FinishedClaim(claim_id, tuple(read))

    def settle(self, claims: tuple[str, ...]) -> int:
        """Forget what was trained on; return how many claims were there."""
        there = [claim for claim in dict.fromkeys(claims) if claim in self.claims]
        for claim in there:
            for name in self.claims.pop(claim):
                self._forget(name)
                self.num_trained += 1
        return len(there)

    def recover(self, applied: tuple[str, ...], kept: tuple[str, ...]) -> int:
        """Settle ``applied``; all claims' trajectories but those of ``kept`` wait again; return
        their number."""
        self.settle(applied)
        lost = [claim for claim in self.claims if claim not in kept]
        returned = [name for claim in lost for name in self.claims.pop(claim)]
        for name in returned:
            self.waiting.add(name)
        return len(returned)

    def discard(self, trajectory: TrajectoryId, reason: DropReason) -> None:
        """Forget a trajectory that no critic may learn from, even a claimed one."""
        record = self.records.get(trajectory)
        if record is None or (reason is DropReason.CANCELLED and self._is_claimed(trajectory)):
            return
        if record.is_complete:
            self._dropped[reason.value] += 1
        self.waiting.discard(trajectory)
        for names in self.claims.values():
            if trajectory in names:
                names.remove(trajectory)
        self._forget(trajectory)

    def cancel(self, reason: DropReason) -> None:
        """Forget all but claimed trajectories: the value worker has trained on those."""
        for trajectory in list(self.records):
            if not self._is_claimed(trajectory):
                self.discard(trajectory, reason)

    @property
    def num_claimed(self) -> int:
        """Trajectories in claims."""
        return sum(map(len, self.claims.values()))

    def balance(self) -> Balance:
        """Count both sides of the law: all that became claimable, and where it is, by walking."""
        claimed = {name for names in self.claims.values() for name in names}
        found = Counter(
            "claimed" if name in claimed else "waiting" for name, record in self.records.items() if record.is_complete
        )
        return Balance(self.num_admitted, self.num_trained, dict(+self._dropped), dict(found))

    def _is_claimed(self, trajectory: TrajectoryId) -> bool:
        return any(trajectory in names for names in self.claims.values())

    def _record(self, trajectory: TrajectoryId) -> FinishedRecord:
        record = self.records.get(trajectory)
        if record is None:
            record = self.records[trajectory] = FinishedRecord()
            self.num_bytes += CHUNK_OVERHEAD_BYTES
        return record

    def _admit_if_complete(self, trajectory: TrajectoryId, record: FinishedRecord, now: float) -> None:
        if record.is_complete:
            record.ready_s = now
            self.waiting.add(trajectory)
            self.num_admitted += 1

    def _forget(self, trajectory: TrajectoryId) -> None:
        self.num_bytes -= self.records.pop(trajectory).num_bytes
