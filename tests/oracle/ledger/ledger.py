"""The ledger in this process: the contract as a pure state machine with an injected clock.

No method awaits, so each is atomic on an event loop. It runs a whole pipeline inside one process,
and is the oracle of the Redis ledger's tests. It stores the same bytes as Redis, so that both
refuse writes for lack of memory at the same point."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from pipeline.ledger.stored import read_chunk, read_shown, read_turn
from pipeline.ledger.types import (
    Audit,
    ChunkWrite,
    Claim,
    ClaimedUnit,
    ClaimRefused,
    ClaimWait,
    DeadLetter,
    DropReason,
    EvaluationRequest,
    EvaluationState,
    FinishedClaim,
    Lease,
    LeaseGrant,
    LedgerSpec,
    QueueStat,
    Refusal,
    Restart,
    ScoredChunk,
    ShownResponse,
    Totals,
    Unit,
    UnitLetter,
    WriteStatus,
)
from pipeline.ledger.validation import (
    check_chunk,
    check_evaluation,
    check_spec,
    check_value_batch,
    claim_gone,
    mismatch,
    nothing_kept,
    parse_chunk,
    unmarked,
)
from protocol.codec import Encoded, to_blob
from protocol.errors import Fenced, LedgerError
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, FinishReason, RewardScore, Score, TrajectoryChunk, Turn, field_of
from tests.oracle.ledger import scoring
from tests.oracle.ledger.lives import plain
from tests.oracle.ledger.records import ChunkRecord, ClaimRecord, EvaluationRecord, TrajectoryRecord
from tests.oracle.ledger.state import LedgerState
from tests.oracle.ledger.units import add_to_unit, cancel_windows, chunks_of, continue_or_park, record_sample
from tests.oracle.ledger.views import audit_of, bytes_of, queues_of, totals_of


class MemoryLedger:
    """``pipeline.ledger.contract.Ledger`` in this process.

    ``epoch_of`` returns a worker's newest epoch in the registry, 0 when it never registered."""

    def __init__(self, epoch_of: Callable[[str], int], clock: Callable[[], float] = time.time) -> None:
        self._epoch_of = epoch_of
        self.clock = clock
        self._opened: LedgerState | None = None
        self._claim_numbers = itertools.count()

    async def open(self, spec: LedgerSpec) -> None:
        """Create or join the ledger. Raises LedgerMismatch, ConfigError for a useless spec."""
        check_spec(spec)
        if self._opened is None:
            self._opened = LedgerState(spec, self.clock)
        elif self._opened.spec != spec:
            raise mismatch(self._opened.spec, spec)

    # -- generation ------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Lease trajectories: evaluation, then open ones, then new groups."""
        s, now = self._enter(who)
        self._touch(s, who, now)
        for holder, until in sorted(s.holders.items()):
            worker, _, epoch = holder.rpartition("#")
            if until <= now or self._epoch_of(worker) > int(epoch):
                s.reopen_all(holder, now)
                del s.holders[holder]
        leases: list[Lease] = []
        refused: Refusal | None = None
        is_behind = policy_version is not None and policy_version < s.version
        while len(leases) < max_trajectories:
            taken = s.take(is_behind=is_behind)
            if isinstance(taken, Refusal):
                refused = taken
                break
            s.hold(taken, str(who), now)
            leases.append(self._lease_of(s, taken))
        return LeaseGrant(tuple(leases), refused)

    def _lease_of(self, s: LedgerState, trajectory: TrajectoryId) -> Lease:
        record = s.trajectories[trajectory]
        last = turn = None
        if record.next:
            stored = s.chunks.get(ChunkId(trajectory, record.next - 1))
            last = read_chunk(record.last if stored is None else stored.blob)
            turn = record.last_turn if stored is None else stored.scores.get(Field.TURN)
        evaluation = s.evaluations[int(trajectory.lane[1:])].request if trajectory.is_evaluation else None
        answer = read_turn(turn) if turn else None
        return Lease(trajectory, record.next, s.prompt_of(trajectory), last, evaluation, answer)

    async def renew(self, who: Incarnation) -> None:
        """Extend the lease on all that ``who`` holds."""
        s, now = self._enter(who)
        self._touch(s, who, now)

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Open held trajectories at once; return their number."""
        s, now = self._enter(who)
        if trajectories is None:
            return s.reopen_all(str(who), now)
        held = [trajectory for trajectory in trajectories if trajectory in s.held.get(str(who), ())]
        for trajectory in held:
            s.reopen(trajectory, str(who), now)
        return len(held)

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        """Store a chunk once and index it for its scorers. Raises ValueError for a bad chunk."""
        check_chunk(chunk, self.state.spec.fields)
        s, now = self._enter(who)
        trajectory, index, blob = chunk.trajectory, chunk.id.index, to_blob(encoded or chunk)
        t = s.trajectories.get(trajectory)
        if t is None:
            return ChunkWrite(WriteStatus.FENCED, keeps_lease=False)
        holds = t.holder == str(who)
        if index < t.next:
            stored = s.chunks.get(chunk.id)
            there = stored.blob if stored is not None else (t.last if index == t.next - 1 else b"")
            if there == blob or (not there and holds):
                return ChunkWrite(WriteStatus.DUPLICATE, keeps_lease=holds)
            return ChunkWrite(WriteStatus.FENCED, keeps_lease=False)
        if index > t.next or not holds:
            return ChunkWrite(WriteStatus.FENCED, keeps_lease=False)

        final, ends_turn = chunk.finish_reason.is_final, chunk.finish_reason is FinishReason.TURN
        oldest = (
            chunk.oldest_version if trajectory.is_evaluation else min(map(s.version_history.updates, chunk.versions))
        )
        by = " ".join(map(str, (plain(str(who)), *chunk.versions)))
        c = ChunkRecord(blob=blob, num_tokens=chunk.num_tokens, final=final, written_s=now, by=by)
        s.store_chunk(chunk.id, c)
        if not chunk.is_opening:
            c.oldest = oldest
            t.newest = max(t.newest, chunk.newest_version)
            t.lower_oldest(oldest)
        t.num_tokens += chunk.num_tokens
        t.next, t.since_s, t.final = index + 1, now, final
        t.waits, t.opened = ends_turn, t.opened or chunk.is_opening
        self._touch(s, who, now)
        s.stored_by[str(who)] += chunk.num_tokens
        if final or ends_turn:
            s.let_go(trajectory, str(who))
        needed = s.needed_fields(trajectory, final=final, ends_turn=ends_turn, num_tokens=chunk.num_tokens)
        for field in needed - {Field.GUIDANCE}:
            s.due[field][chunk.id] = now + s.spec.scoring_deadline_s
        if trajectory.is_evaluation:
            if index:
                s.forget_chunk(ChunkId(trajectory, index - 1))
        else:
            s.admitted["tokens"] += chunk.num_tokens
            add_to_unit(s, chunk, oldest, len(needed))
            if s.spec.unit is Unit.CHUNK and not (final or ends_turn):
                continue_or_park(s, chunk, str(who))
        return ChunkWrite(WriteStatus.STORED, keeps_lease=t.holder == str(who))

    # -- scoring ---------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Fill a field of a chunk once; complete units become ready, or are dropped."""
        s, now = self._enter(who)
        field, c = field_of(score), s.chunks.get(chunk)
        if c is None:
            return WriteStatus.UNKNOWN
        if field in c.scores:
            return WriteStatus.DUPLICATE
        if not scoring.may_fill(s, chunk, field):
            return WriteStatus.UNKNOWN
        if isinstance(score, RewardScore) and chunk.trajectory.is_evaluation:
            record_sample(s, chunk, score)
            return WriteStatus.STORED
        blob = scoring.fill(s, who, chunk, score, now)
        if isinstance(score, Turn):
            scoring.take_turn(s, chunk, score, now)
            if chunk.trajectory.is_evaluation:
                return WriteStatus.STORED
        t = s.trajectories[chunk.trajectory]
        # an opening chunk has no tokens to learn from
        if s.spec.value_training and c.num_tokens and not t.spoiled:
            if field is Field.VALUE:
                s.finished.keep_value(chunk, blob, now)
            elif field is Field.REWARD:
                s.finished.keep_end(chunk, t.next - t.opened, c.blob, blob, now)
        if isinstance(score, RewardScore) and s.judge(chunk, score.accuracy, score.masked):
            return WriteStatus.STORED
        s.ready_if_complete(chunk)
        return WriteStatus.STORED

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
        """Return overdue chunks, oldest first, guidance with its reward; extend their deadlines."""
        s, now = self._enter(who)
        return scoring.overdue(s, field, max_chunks, now)

    async def finished_group(self, who: Incarnation, group: int, *, num_members: int) -> list[TrajectoryChunk]:
        """Give a group that has ended to one scorer: its final chunks; else nothing."""
        s, now = self._enter(who)
        return scoring.finished_group(s, who, group, num_members, now, self._epoch_of)

    async def extend_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> None:
        """Extend the deadlines of chunks that ``who`` scores, and of its groups."""
        s, now = self._enter(who)
        scoring.extend(s, who, field, chunks, now)

    async def expire_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> int:
        """Make chunks of a lost scorer due at once; return how many were not."""
        s, now = self._enter(who)
        return scoring.expire(s, field, chunks, now)

    async def spend(self, who: Incarnation, name: str, *, limit: int) -> bool:
        """Take one of ``limit`` for the whole run; return whether one was left."""
        s, _ = self._enter(who)
        return scoring.spend(s, name, limit)

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Count a failure; after ``max_attempts`` the chunk is a dead letter."""
        s, now = self._enter(who)
        return scoring.fail(s, who, chunk, field, error, now)

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters first."""
        return self.state.dead[:limit]

    # -- learning --------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Drop too stale ready units, the oldest first; claim one update's units or return why."""
        s, now = self._enter(who)
        names = s.claim(policy_version)
        if isinstance(names, ClaimWait):
            oldest = s.running.first
            return ClaimRefused(names, len(s.ready), s.num_needed, None if oldest is None else str(oldest))
        for name in names:
            s.record(name).claimed_s = now
        claim_id = f"{who}/{next(self._claim_numbers)}"
        s.claims[claim_id] = ClaimRecord(policy_version, names)
        return Claim(claim_id, policy_version, tuple(map(str, names)))

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        """Read a claim's units. Raises LedgerError when it was settled, returned or cancelled."""
        s = self.state
        record = s.claims.get(claim.claim_id)
        if record is None:
            raise claim_gone(claim)
        names = [name for text in claim.units if (name := s.name(text)) in record.units]
        return [ClaimedUnit(str(name), tuple(map(tuple, chunks_of(s, name)))) for name in names]

    async def drop(
        self, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None = None
    ) -> None:
        """Drop one unit out of a claim; its credit returns. A repeat changes nothing."""
        s, now = self._enter(who)
        scoring.drop(s, who, claim, unit, reason, letter, now)

    async def return_claim(self, who: Incarnation, claim_id: str) -> int:
        """Return a claim's units to ready, and their number."""
        s, _ = self._enter(who)
        record = s.claims.pop(claim_id, None)
        returned = [] if record is None else record.units
        for name in returned:
            s.make_ready(name)
        return len(returned)

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        """Make ``policy_version`` the one that admission counts from. It only grows."""
        s, _ = self._enter(who)
        s.version = max(s.version, policy_version)

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        """Mark claims trained and forget their data; return how many were not yet settled."""
        s, _ = self._enter(who)
        there = [claim for claim in dict.fromkeys(claims) if claim in s.claims]
        for record in map(s.claims.pop, there):
            for name in record.units:
                s.end_unit(name, None, s.version_history.updates(record.policy_version))
        if num_updates is not None and (there or num_updates not in s.milestones):
            s.mark(num_updates)
        return len(there)

    async def make_durable(self, who: Incarnation) -> bool:
        """Return True: nothing survives this process, nor has to."""
        self._enter(who)
        return True

    async def recover(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle a checkpoint's claims, keep a snapshot's; return the number of other units."""
        s, _ = self._enter(who)
        await self.settle(who, applied)
        return sum([await self.return_claim(who, claim) for claim in [*s.claims] if claim not in kept])

    async def missing(self, claims: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these claims that are not there."""
        return tuple(claim for claim in claims if claim not in {*self.state.claims, *self.state.finished.claims})

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        """Count from these weights on; return the credit of the trained units given up."""
        s, _ = self._enter(who)
        is_back = any(updates > restart.num_updates for updates in s.milestones)
        if is_back and restart.num_updates and restart.num_updates not in s.milestones:
            raise unmarked(restart.num_updates)
        given_up = s.go_back(restart.num_updates)
        s.version_history = s.version_history.after(restart)
        s.closed = False
        s.version = max(s.version, restart.policy_version)
        return given_up

    async def restarts(self) -> tuple[Restart, ...]:
        """Return all restarts, by version."""
        return self.state.version_history.restarts

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim finished trajectories for the value model, or return how many there are."""
        s, _ = self._enter(who)
        check_value_batch(num_trajectories)
        if not s.spec.value_training:
            raise nothing_kept(f"claim_finished for {who}")
        return s.finished.claim(f"{who}/{next(self._claim_numbers)}", num_trajectories)

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Forget trained value batches; return how many were not yet settled."""
        s, _ = self._enter(who)
        return s.finished.settle(claims)

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle a checkpoint's value batches, keep a snapshot's; return the number of others."""
        s, _ = self._enter(who)
        return s.finished.recover(applied, kept)

    async def close_admission(self, who: Incarnation) -> None:
        """Give no new credit from now on."""
        s, _ = self._enter(who)
        s.closed = True

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop all work that is not trained; return the number of groups."""
        s, _ = self._enter(who)
        groups = sorted(s.groups)
        for number in groups:
            if s.is_untrained(number):
                s.again.add(s.groups[number].prompt)
            if s.spec.unit is Unit.GROUP:
                s.end_unit(number, reason)
                continue
            for trajectory in s.members(number):
                if trajectory not in s.trajectories:
                    continue
                if s.spec.unit is Unit.TRAJECTORY:
                    s.end_unit(trajectory, reason)
                else:
                    cancel_windows(s, trajectory, reason)
        s.claims.clear()
        s.finished.cancel(reason)
        return len(groups)

    async def take_shown(self, who: Incarnation) -> tuple[ShownResponse, ...]:
        """Return responses that are kept for people to read, and forget them."""
        s, _ = self._enter(who)
        taken = tuple(read_shown(kind, *row) for kind, rows in s.shown.items() for row in rows)
        for rows in s.shown.values():
            rows.clear()
        return taken

    # -- evaluation ------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories. A repeat of the same number changes nothing."""
        check_evaluation(request)
        s, now = self._enter(who)
        if request.number in s.evaluations:
            return
        s.evaluations[request.number] = EvaluationRecord(request)
        for prompt in range(request.num_prompts):
            for sample in range(request.samples_per_prompt):
                trajectory = TrajectoryId(f"e{request.number}", prompt, sample)
                s.trajectories[trajectory] = TrajectoryRecord(since_s=now)
                s.open_evaluation(trajectory)

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return an evaluation's progress; None when it was never requested."""
        record = self.state.evaluations.get(number)
        if record is None:
            return None
        samples = sorted(record.samples, key=lambda sample: (sample.prompt, sample.sample))
        return EvaluationState(record.request, tuple(samples), record.num_failed)

    # -- views -----------------------------------------------------------------------------------

    async def totals(self) -> Totals:
        """Return the counters."""
        return totals_of(self.state)

    async def audit(self) -> Audit:
        """Count both sides of the conservation law at one moment."""
        return audit_of(self.state)

    async def queues(self) -> list[QueueStat]:
        """Return every ledger queue's depth, limit, oldest age and consumer."""
        return queues_of(self.state, self.clock())

    async def peek(self, key: str) -> list[bytes]:
        """Return the stored bytes of a chunk, then of its scores; empty when unknown."""
        chunk = parse_chunk(key)
        return [] if chunk is None else bytes_of(self.state, chunk)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""

    @property
    def state(self) -> LedgerState:
        """The whole state, for ``tests.oracle.ledger.admin``."""
        if self._opened is None:
            raise LedgerError("the ledger was not opened; call open(spec) first")
        return self._opened

    def _enter(self, who: Incarnation) -> tuple[LedgerState, float]:
        newest = self._epoch_of(who.worker)
        if newest > who.epoch:
            raise Fenced(f"{who} is not the newest incarnation of {who.worker}: epoch {newest} exists; stop at once")
        return self.state, self.clock()

    def _touch(self, s: LedgerState, who: Incarnation, now: float) -> None:
        s.holders[str(who)] = now + s.spec.lease_s
