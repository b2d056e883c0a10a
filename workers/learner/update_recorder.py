"""Writes the run's update log: the units of every update and digests of the weights it made.

    compute thread         batch, outcome     of update n; its version is lent to the publication
    publication's thread   digested           the outcome is written, before the version is announced
    compute thread         batch              of update n + 1; written behind that outcome

A full or failing disk never stops training. The log ends there, reports it once, and starts again
at the next checkpoint, from which ``headrace run replay`` can continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from pipeline.config.changing import changed_since
from pipeline.config.import_path import own_sources
from pipeline.config.load import to_toml
from pipeline.ledger.types import Claim, ClaimedUnit
from pipeline.ledger.version_history import VersionHistory
from pipeline.training.checkpoints import list_checkpoints
from pipeline.training.spikes import NO_LIMITS, StepLimits
from pipeline.training.update_log.folder import UPDATES_FOLDER, LogWriter
from pipeline.training.update_log.records import Batch, Digests, Origin, Start, UpdateOutcome, pack_units
from protocol.ids import Incarnation
from workers.engines.training.seam import TrainingBackend
from workers.learner.policy_update import Prepared, Stepped

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

SEGMENT_KEY = "update_log_segment"
"""Key in a checkpoint's state: number of the log segment that begins with it."""

_log = structlog.get_logger(__name__)


class UpdateRecorder:
    """Writes the update log of one learner. Blocking; called from its compute thread, except ``digested``."""

    def __init__(self, config: RunConfig, run_dir: Path, who: Incarnation, backend: TrainingBackend) -> None:
        self._config = config
        self._run_dir = run_dir
        self._who = who
        self._backend = backend
        self._writer: LogWriter | None = None
        self._origin = Origin.START_MODEL
        self._has_failed = False
        self._has_begun = False
        """Whether the next batch belongs to a segment that has a Start."""
        self._checkpoint: str | None = None
        self._state_version = 0
        self._changed: dict[str, str] = {}
        self._lock = RLock()
        self._awaited: UpdateOutcome | None = None
        """An outcome whose digests are still to come."""
        self._behind: list[Callable[[], None]] = []
        """Writes of what was recorded after it, in order."""
        self._digests: Digests | None = None
        """Of the weights now; None if they are not known."""
        self.history = VersionHistory()
        """Restarts of the run, recorded at the start of each segment."""
        # read now: a file may change after the learner imported it
        self._sources = own_sources(dict(config.algorithm), config.algorithm.path)

    def start_log(self, origin: Origin, checkpoint: Path | None, state_version: int) -> None:
        """Record which state the updates start from: start model, checkpoint or snapshot."""
        self._origin = origin
        self._checkpoint = checkpoint.name if checkpoint else None
        self._state_version = state_version
        if self._config.replay.record:
            self._try(self._open)

    def apply_settings(self, config: RunConfig) -> None:
        """Record following updates as made with ``config``, stored as a difference from the start."""
        self._changed = changed_since(self._config, config)

    def batch(
        self,
        claim: Claim,
        units: Sequence[ClaimedUnit],
        update: int,
        policy_version: int,
        limits: StepLimits = NO_LIMITS,
    ) -> None:
        """Record an update's units before it is made from the weights of ``policy_version``."""
        batch = Batch(
            update=update,
            policy_version=policy_version,
            claim=claim.claim_id,
            units=tuple(unit.name for unit in units),
            at_s=time.time(),
            settings=self._changed,
            loss_limit=limits.loss,
            grad_norm_limit=limits.grad_norm,
        )
        with self._lock:
            if not self._config.replay.record or self._has_failed:
                return
            # made now, as it may be written while the batch is trained on
            start = None if self._has_begun else self._start(num_updates=update - 1, policy_version=policy_version)
            if start is not None:
                self._has_begun, self._origin = True, Origin.CONTINUED
            self._try(self._write_batch, start, batch, units)

    def outcome(self, prepared: Prepared, stepped: Stepped, update: int, policy_version: int) -> None:
        """Record a result. If it made ``policy_version``, it is written when that version is ``digested``;
        without an applied step, version and weights are the old ones."""
        results = stepped.results
        outcome = UpdateOutcome(
            update=update,
            policy_version=policy_version,
            refused=tuple(refused.unit for refused in prepared.refused),
            losses=tuple(result.loss for result in results),
            grad_norms=tuple(result.grad_norm for result in results),
            applied=tuple(result.applied for result in results),
            digests={},
        )
        with self._lock:
            if any(outcome.applied):
                self._digests = None
            self._try(self._take_outcome, outcome)

    def digested(self, policy_version: int, digests: Digests) -> None:
        """Write the outcome that made ``policy_version``, and what was recorded behind it. For any thread,
        before the version is announced."""
        with self._lock:
            awaited = self._awaited
            if awaited is not None and awaited.policy_version != policy_version:
                return
            self._digests = digests
            behind, self._awaited, self._behind = self._behind, None, []
            if awaited is not None:
                self._try(self._write_outcome, awaited)
            for write in behind:
                write()

    def cut(self) -> int:
        """End the segment at a checkpoint, behind the outcome that is awaited; return the next segment's number.

        A log above its size limit is trimmed to the segments that the remaining checkpoints need."""
        with self._lock:
            self._has_failed = self._has_begun = False
            self._try(self._seal)
            return self._writer.next_segment if self._writer else 0

    def close(self) -> None:
        with self._lock:
            self._awaited, self._behind = None, []
            if self._writer is not None:
                self._writer.close()

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if not self._config.replay.record or self._has_failed:
                return
            if self._awaited is not None:
                self._behind.append(partial(self._try, write, *arguments))
                return
            try:
                write(*arguments)
            except OSError as error:
                self._has_failed, self._has_begun = True, False
                self._origin = Origin.AFTER_FAILURE
                self.close()
                _log.error(
                    "update_log_stopped",
                    reason=str(error),
                    action="training goes on; updates from here to the next checkpoint cannot be replayed: make room",
                )

    def _open(self) -> None:
        self._writer = LogWriter(self._run_dir / UPDATES_FOLDER, epoch=self._who.epoch)

    def _write_batch(self, start: Start | None, batch: Batch, units: Sequence[ClaimedUnit]) -> None:
        if self._writer is None:
            self._open()
        assert self._writer is not None
        if start is not None:
            self._writer.begin(replace(start, digests=self._digests or self._backend.digests()))
        self._writer.append(batch)
        for record in pack_units(units):
            self._writer.append(record)

    def _start(self, *, num_updates: int, policy_version: int) -> Start:
        config = self._config
        has_loaded = self._origin in (Origin.START_MODEL, Origin.CHECKPOINT, Origin.SNAPSHOT)
        without_address = config.model_copy(update={"ledger": config.ledger.model_copy(update={"url": None})})
        return Start(
            run=config.run.name,
            learner=str(self._who),
            origin=self._origin,
            checkpoint=self._checkpoint if self._origin is Origin.CHECKPOINT else None,
            state_version=self._state_version if has_loaded else policy_version,
            policy_version=policy_version,
            num_updates=num_updates,
            config=to_toml(without_address),
            environment=self._backend.environment(),
            seed=config.run.seed,
            random_state=self._backend.random_state(),
            digests={},
            at_s=time.time(),
            sources=self._sources,
            restarts=tuple((one.policy_version, one.num_updates) for one in self.history.restarts),
        )

    def _take_outcome(self, outcome: UpdateOutcome) -> None:
        if any(outcome.applied):
            self._awaited = outcome
        else:
            self._write_outcome(outcome)

    def _write_outcome(self, outcome: UpdateOutcome) -> None:
        assert self._writer is not None, "a batch comes before its outcome"
        self._writer.append(replace(outcome, digests=self._digests or self._backend.digests()))

    def _seal(self) -> None:
        if self._writer is None:
            return
        self._writer.seal()
        if self._writer.num_bytes > self._config.replay.keep_mb << 20:
            kept = list_checkpoints(self._run_dir / "checkpoints")
            first = min((int(checkpoint.state.get(SEGMENT_KEY, 0)) for checkpoint in kept), default=0)
            if removed := self._writer.trim(first):
                _log.info("update_log_trimmed", segments=removed, first_kept=first)
