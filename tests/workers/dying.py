"""A learner that can be killed between any two of its steps, with a ledger in memory and real
checkpoint folders.

Its weights are the list of all responses that they were trained on. So a checkpoint shows by itself
whether a response is in it twice, or missing. Files are not forced to the disk: a process that dies
takes none of its written files with it."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest
from structlog.typing import FilteringBoundLogger

import pipeline.training.checkpoints
import workers.learner.learner
import workers.learner.restore
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.data_sets import EvaluationSection
from pipeline.config.learning import algorithm_settings
from pipeline.config.runtime import CheckpointSection, ReplaySection, RunSection, WeightsSection
from pipeline.config.schema import RunConfig
from pipeline.data.source import HeldOutSource
from pipeline.ledger.types import LedgerSpec
from pipeline.observability.history import EvaluationRow, RefusedRow, UpdateRow, ValueRow, run_history
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.training.live_states import BufferPages, LiveState, StateLoan
from pipeline.training.snapshots import KeptState, SnapshotFolder
from pipeline.training.spikes import NO_LIMITS, StepLimits
from pipeline.weights.store import StoredWeights, WeightsStore
from pipeline.weights.tensorfile import Publication, TensorSpec
from protocol.ids import Role
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import GENERATOR, SCORER, make_chunk, make_spec, reward
from tests.pipeline.runtime.fakes import small_config
from tests.transports import zmq_transport
from workers.engines.training.seam import StepResult
from workers.learner.learner import Learner
from workers.snapshots import SnapshotWriter

_LOOKS = {"fetch", "totals", "weights", "heartbeats", "restarts"}
"""Calls that change nothing: dying after one is dying before the next."""

GROUP_SIZE = 2
GROUPS_PER_UPDATE = 2
BATCH = GROUP_SIZE * GROUPS_PER_UPDATE


_COPY, _SEAL, _TAKE = StateLoan.copy, SnapshotFolder.seal, SnapshotWriter.start_snapshot


async def _take_to_the_end(writer: SnapshotWriter, *args: Any, **kwargs: Any) -> None:
    """Take a snapshot that is sealed at once, so that every life has the same points."""
    await _TAKE(writer, *args, **kwargs)
    while writer._task is not None and not writer._task.done():
        await writer.wait()


class Killed(BaseException):
    """The process is dead: nothing may catch this."""


class Reaper:
    """Counts the points at which a process could die, and kills it at one of them."""

    def __init__(self, at: int | None, name: str | None = None) -> None:
        """Kill at point ``at``, of those called ``name`` when it is given; at none for None."""
        self._at = at
        self._name = name
        self.points: list[str] = []
        self.is_dead = False

    def point(self, name: str) -> None:
        """Die here, if this is the chosen point; a dead process gets no further anywhere."""
        if self._name in (None, name):
            self.points.append(name)
        if self.is_dead or (len(self.points) - 1 == self._at and self.points[-1] == name):
            self.is_dead = True
            raise Killed(name)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a blocking call begin, and end, at points."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.point(f"before {name}")
            result = function(*args, **kwargs)
            self.point(f"after {name}")
            return result

        return call


def chosen(points: Sequence[str], turn: str, number: int) -> list[int]:
    """Return every point of one turn, which begins with the point ``turn`` for the time ``number``,
    and the first point of each name that this turn has not. All turns have the same points."""
    starts = [at for at, name in enumerate(points) if name == turn]
    there = range(starts[number - 1], starts[number])
    names = {points[at] for at in there}
    return [at for at, name in enumerate(points) if at in there or (name not in names and points.index(name) == at)]


class Mortal:
    """Everything of ``target``, with a point before and after each awaited call."""

    def __init__(self, target: Any, name: str, reaper: Reaper) -> None:
        self._target, self._name, self._reaper = target, name, reaper

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._target, method)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._reaper.point(f"before {self._name}.{method}")
            result = await found(*args, **kwargs)
            if method not in _LOOKS:
                self._reaper.point(f"after {self._name}.{method}")
            return result

        return call


class Quiet:
    """A log without readers."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda *_, **__: None


class MortalContext(ActorContext):
    """An actor's surroundings with a point before and after each piece of blocking work."""

    reaper: Reaper

    async def compute(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return await self._mortal(super().compute, function, args)

    async def store(self, function: Callable[..., Any], /, *args: Any) -> Any:
        return await self._mortal(super().store, function, args)

    def end_threads(self) -> None:
        """Wait for what a dead process would not do any more: it uses files that are closed next,
        whose numbers are then another's."""
        for thread in (self._compute_thread, self._storage_thread):
            thread.shutdown(cancel_futures=True)

    async def _mortal(self, run: Callable[..., Awaitable[Any]], function: Callable[..., Any], args: Any) -> Any:
        name = getattr(function, "__name__", "work")
        self.reaper.point(f"before {name}")
        result = await run(function, *args)
        self.reaper.point(f"after {name}")
        return result


class Memory:
    """A training backend whose weights are the list of its training samples."""

    def __init__(
        self, stepped: list[str], is_bad: Callable[[list[str]], bool], norm_of: Callable[[list[str]], float]
    ) -> None:
        self.trained: list[str] = []
        self.rate = 0.0
        self._stepped, self._is_bad, self._norm_of = stepped, is_bad, norm_of

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return [sample.behavior_logprobs for sample in samples]

    def step(self, samples: Sequence[TrainingSample], rule: object, limits: StepLimits = NO_LIMITS) -> StepResult:
        names = [sample.name for sample in samples]
        loss, norm = (math.nan, math.inf) if self._is_bad(names) else (0.0, self._norm_of(names))
        if not limits.allow(loss, norm):
            return StepResult(False, loss, norm, 1e-3, {}, len(samples))
        self.trained += names
        self._stepped += names
        return StepResult(True, loss, norm, 1e-3, {}, len(samples))

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rate = learning_rate

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield "weights", list(self.trained)

    def base_publication(self) -> None:
        return None

    def publication(self, base_digest: str | None = None) -> Publication:
        return named_publication(self.trained)

    def digests(self) -> dict[str, bytes]:
        return digests_of(self.trained)

    def environment(self) -> dict[str, str]:
        return {}

    def random_state(self) -> dict[str, bytes]:
        return {}

    def snapshot(self) -> Callable[[Path], None]:
        text = json.dumps(self.trained)

        def write(folder: Path) -> None:
            (folder / "weights.json").write_text(text)

        return write

    def load(self, folder: Path) -> None:
        self.trained = json.loads((folder / "weights.json").read_text())

    def live_state(self) -> LiveState:
        text = np.frombuffer(json.dumps(self.trained).encode(), np.uint8)

        def copy(pages: BufferPages) -> None:
            pages.arrays[0][:] = text

        return LiveState((TensorSpec("trained", "U8", (text.size,)),), "", copy)

    def put_back(self, kept: KeptState) -> None:
        self.trained = json.loads(bytes(kept.tensors["trained"][1]))

    def close(self) -> None:
        pass


def digests_of(trained: Sequence[str]) -> dict[str, bytes]:
    return {"weights": json.dumps(list(trained)).encode()}


@dataclass
class World:
    """The things that outlive every process: the ledger, the registry, the disk."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    num_updates: int = 5
    eta: int = 1
    num_evaluation_prompts: int = 0
    """Evaluated after every update, when there are any."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """More settings of ``[evaluation]``."""
    accuracy_of: Callable[[int], float] = lambda version: 0.0
    """Held-out accuracy by policy version."""
    sampler: str = ""
    """Incarnation that samples the chunks, for the check of log-probs."""
    published: dict[int, list[str]] = field(default_factory=dict)
    """Version -> the weights of that name."""
    num_lives: int = 0
    snapshots: Literal["on", "off"] = "on"
    seals_at_once: bool = True
    """Whether an update waits for the seal of its snapshot, so that every life has the same
    points."""
    stepped: list[str] = field(default_factory=list[str])
    """Trained on in any life, in this order."""
    num_minibatches: int = 1
    is_bad: Callable[[list[str]], bool] = lambda names: False
    """Whether a step on these responses is not finite."""
    norm_of: Callable[[list[str]], float] = lambda names: 1.0
    """Gradient norm of a step on these responses."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``[learner]``."""
    records: bool = False
    """Whether it has an update log."""

    def __post_init__(self) -> None:
        self.registry = MemoryRegistry(RealClock())
        self.epochs = {GENERATOR.worker: 1, SCORER.worker: 1}
        self.ledger = MemoryLedger(lambda worker: self.epochs.get(worker, 0))
        self.spec: LedgerSpec = make_spec(
            group_size=GROUP_SIZE, units_per_update=BATCH, eta=self.eta, lease_s=1e6, scoring_deadline_s=1e6
        )
        self.config: RunConfig = small_config(self.folder).model_copy(
            update={
                "run": RunSection(name="test", dir=self.folder, num_updates=self.num_updates),
                "algorithm": algorithm_settings(
                    name="grpo",
                    group_size=GROUP_SIZE,
                    groups_per_update=GROUPS_PER_UPDATE,
                    max_generation_batches=0,
                    num_minibatches=self.num_minibatches,
                ),
                "checkpoint": CheckpointSection(every_updates=2, keep=2, snapshots=self.snapshots),
                "evaluation": EvaluationSection(every_updates=1, **self.evaluation),
                "learner": small_config(self.folder).learner.model_copy(update=self.learner),
                "weights": WeightsSection(shared_memory=False),
                "replay": ReplaySection(record=self.records),
            }
        )
        patch = self.monkeypatch.setattr
        patch(os, "fsync", lambda _: None)
        source = SimpleNamespace(evaluation_sets=(HeldOutSource("", 0, self.num_evaluation_prompts),))
        patch(workers.learner.learner, "load_text_tokenizer", lambda _: None)
        patch(workers.learner.learner, "PromptSource", lambda *_: source)
        patch(workers.learner.learner, "ledger_spec", lambda *_: self.spec)
        patch(
            workers.learner.restore,
            "build_training_backend",
            lambda _: Memory(self.stepped, self.is_bad, self.norm_of),
        )
        patch(workers.learner.restore, "snapshots_folder", lambda _: self.folder / "snapshots")
        publish = WeightsStore.publish

        def note(store: WeightsStore, version: int, publication: Publication) -> StoredWeights:
            # written by a learner that died before it announced them, the same number may come
            # again
            self.published[version] = json.loads(publication.head)
            return publish(store, version, publication)

        patch(WeightsStore, "publish", note)

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    async def sample(self) -> None:
        """Do the work of generators and reward workers whenever there is credit."""
        while (grant := await self.ledger.lease(GENERATOR, max_trajectories=64)).leases:
            for lease in grant.leases:
                version = self.ledger.state.version
                chunk = msgspec.structs.replace(make_chunk(lease.trajectory, version=version), worker=self.sampler)
                await self.ledger.write_chunk(GENERATOR, chunk)
                asked = lease.evaluation
                accuracy = self.accuracy_of(asked.policy_version) if asked else lease.trajectory.member % 2
                await self.ledger.write_score(SCORER, chunk.id, reward(accuracy))

    async def live(self, reaper: Reaper) -> bool:
        """Be one learner's process, from its start to its good end or its death; return whether it
        ended well."""
        who = await self.registry.register(Role.LEARNER, "learner")
        self.epochs["learner"] = who.epoch
        self.num_lives += 1
        restore = mortal_disk(reaper)
        if self.seals_at_once:
            mortal_snapshots(self.monkeypatch, reaper)
        learner: Learner | None = None
        context: MortalContext | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                context = MortalContext(
                    config=self.config,
                    run_dir=self.folder,
                    who=who,
                    ledger=cast("Any", Mortal(_Sampled(self), "ledger", reaper)),
                    registry=cast("Any", Mortal(self.registry, "registry", reaper)),
                    transport=zmq_transport(),
                    log=cast("FilteringBoundLogger", Quiet()),
                    clock=RealClock(),
                    tasks=tasks,
                )
                context.reaper = reaper
                learner = Learner(context)
                await learner.setup()
                await learner.run()
                await learner.drain()
        except BaseExceptionGroup as group:
            if not reaper.is_dead:
                raise
            assert group.subgroup(Killed) is not None
            return False
        else:
            return True
        finally:
            restore()
            if context is not None:
                context.end_threads()
                context.close()
            for part in ("_folder", "_publisher"):
                if hasattr(learner, part):
                    getattr(learner, part).close()

    async def live_until_done(self, reaper: Reaper) -> list[str]:
        """Die once, then be started again until the run is done; return the weights of the last
        checkpoint."""
        while not await self.live(reaper):
            reaper = Reaper(None)
        newest = pipeline.training.checkpoints.latest_checkpoint(self.root)
        assert newest is not None
        return json.loads((newest.path / "weights.json").read_text())

    def history(self) -> list[UpdateRow | RefusedRow | EvaluationRow]:
        """Return the rows that a learner writes; one of a value worker is a failure."""
        rows: list[UpdateRow | RefusedRow | EvaluationRow] = []
        for row in run_history(self.folder / "history.jsonl").read_strictly():
            assert not isinstance(row, ValueRow)
            rows.append(row)
        return rows

    def rows(self) -> list[UpdateRow]:
        return [row for row in self.history() if isinstance(row, UpdateRow)]


def named_publication(trained: list[str]) -> Publication:
    """Return the publication of weights that are names."""
    head = json.dumps(trained).encode()
    return Publication(head, len(head), iter(()))


def mortal_snapshots(monkeypatch: pytest.MonkeyPatch, reaper: Reaper) -> None:
    """Put points around copy and seal of a snapshot, which are waited for."""
    monkeypatch.setattr(StateLoan, "copy", reaper.around("copy", _COPY))
    monkeypatch.setattr(SnapshotFolder, "seal", reaper.around("seal", _SEAL))
    monkeypatch.setattr(SnapshotWriter, "start_snapshot", _take_to_the_end)


def mortal_disk(reaper: Reaper) -> Callable[[], None]:
    """Put points around every step of a checkpoint's way to the disk."""
    real = (pipeline.training.checkpoints._fsync, Path.rename, pipeline.training.checkpoints.shutil.rmtree)
    pipeline.training.checkpoints._fsync = reaper.around("flush", real[0])
    cast("Any", Path).rename = reaper.around("rename", real[1])
    cast("Any", pipeline.training.checkpoints.shutil).rmtree = reaper.around("remove", real[2])

    def restore() -> None:
        pipeline.training.checkpoints._fsync = real[0]
        cast("Any", Path).rename = real[1]
        cast("Any", pipeline.training.checkpoints.shutil).rmtree = real[2]

    return restore


class _Sampled:
    """The ledger, before each of whose answers all other workers have done their work."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.ledger, name)

    async def claim(self, who: Any, *, policy_version: int) -> Any:
        await self._world.sample()
        return await self._world.ledger.claim(who, policy_version=policy_version)

    async def request_evaluation(self, who: Any, request: Any) -> None:
        await self._world.ledger.request_evaluation(who, request)
        await self._world.sample()
