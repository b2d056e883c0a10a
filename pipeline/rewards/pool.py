"""The verification engine: takes batches of responses, returns one outcome for each.

*Consumes* responses, each naming its verifier. *Produces* outcomes in the same order. *Waits for*
sandbox processes, each call within its time limit. Cheap built-in verifiers run here, on whole
batches. All others run in killable processes, with one response per call or as many as the verifier
accepts. There are as many concurrent calls as processes, which start when first needed. Batches may
be judged concurrently: they share the processes, and a call may contain responses of several.

If a call exceeds its limits, its responses have no verdict: they are late or over budget. When a
call with several responses fails or is late, each is judged again by itself, so that one response
cannot spoil others.

A verifier may start processes, which die with it. During calls they are counted a few times a
second, by session, and killed if there are too many. The kernel's own limit would not do: it counts
all processes of the account, and exempts root."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipeline.config.training import RewardSection
from pipeline.process import work
from pipeline.process.descendants import session_usage
from pipeline.rewards.process import SandboxProcess
from pipeline.rewards.registry import ENDPOINT, VerifierSpec, load, resolve, resolve_judgments, resolve_named
from pipeline.rewards.signature import RewardFunction
from pipeline.rewards.verifier import (
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
    checked,
    not_judged,
)
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.rewards.endpoint import Budget, Count, RewardEndpoint

MEMORY_BYTES = 2 << 30
"""Private memory that one sandbox process may use."""

MAX_PROCESSES = 64
"""Processes that one sandbox may have at once, including itself."""
_COUNT_EVERY_S = 0.25
_COUNTING_SHARE = 0.05
"""Largest share of a core spent on counting processes; very many are counted less often."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    responses: Sequence[Response]
    outcomes: list[VerifierOutcome | None]
    report_judged: Callable[[int], None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all have an outcome, or one is waiting for a call again."""

    @property
    def is_judged(self) -> bool:
        return None not in self.outcomes


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A response that waits for a call."""

    batch: _Batch
    index: int

    @property
    def response(self) -> Response:
        return self.batch.responses[self.index]

    @property
    def share(self) -> float:
        """Its share of the batch."""
        return 1.0 / len(self.batch.outcomes)

    def finish(self, outcome: VerifierOutcome) -> None:
        self.batch.outcomes[self.index] = outcome
        self.batch.report_judged(1)
        if self.batch.is_judged:
            self.batch.changed.set()


class VerifierPool:
    """Scores batches. Use as a context manager, or call ``start`` and ``aclose``."""

    def __init__(
        self,
        config: RewardSection,
        *,
        configured: Container[str] = (),
        memory_bytes: int = MEMORY_BYTES,
        max_processes: int = MAX_PROCESSES,
        code: Path | None = None,
        budget: Budget | None = None,
        count: Count | None = None,
    ) -> None:
        """``configured``: import paths that the configuration names; no others are called.
        ``code``: a version of their modules that takes precedence. ``budget`` and ``count`` are
        passed to endpoints."""
        self._configured = configured
        self._max_processes = max_processes
        self._timeout_s, self._wait_s = config.timeout_s, config.longest_wait_s
        self._processes = [SandboxProcess(memory_bytes, config.path, code) for _ in range(config.processes)]
        # last in, first out, to prefer a warm process over starting another
        self._idle: asyncio.LifoQueue[SandboxProcess] = asyncio.LifoQueue(maxsize=config.processes)
        for process in self._processes:
            self._idle.put_nowait(process)
        self._waiting: dict[VerifierSpec, deque[_Job]] = {}
        self._counted_s = 0.0
        self._in_process: dict[str, RewardFunction] = {}
        self._endpoints = _endpoints(config, budget, count)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def trouble(self) -> str:
        """How an endpoint misbehaves while responses wait for it, or ""."""
        return next(filter(None, (endpoint.trouble for endpoint in self._endpoints.values())), "")

    async def start(self, verifiers: Iterable[str] = (), *, whole_group: bool = False) -> None:
        """Load the named verifiers now, so that a wrong name or a failing import is reported at
        once. Raises ConfigError if a verifier does not exist, cannot be imported, or should judge a
        ``whole_group`` but takes one response per call."""
        await self._start({replace(resolve(name), whole_group=whole_group) for name in verifiers})

    async def start_judgments(self, name: str) -> None:
        """Load the source of judgments with this name, or test its endpoint. Raises ConfigError like ``start``."""
        await self._start({resolve_judgments(name)})

    async def _start(self, specs: Iterable[VerifierSpec]) -> None:
        for spec in specs:
            if spec.name.startswith(ENDPOINT):
                if spec.whole_group:
                    raise ConfigError(f"{spec.name} judges one response per request; remove whole_group")
                await self._endpoint(spec.name).check()
                continue
            if not spec.sandboxed:
                self._function(spec)
                continue
            process = await self._idle.get()
            try:
                async with self._limiting_processes():
                    failure = await process.load(spec)
            finally:
                self._idle.put_nowait(process)
            if failure is not None:
                is_missing = failure.kind is VerifierFailureKind.UNKNOWN_VERIFIER
                head = "" if is_missing else f"verifier {spec.name!r} cannot be loaded: "
                raise ConfigError(head + failure.error)

    def is_quick(self, verifier: str, *, judgments: bool = False) -> bool:
        """Return whether it judges in this process without delay, needing no sandbox and no
        request. True for an unknown name, which fails at once."""
        try:
            spec = resolve_judgments(verifier) if judgments else resolve_named(verifier, self._configured)
        except ConfigError:
            return True
        return not (spec.sandboxed or spec.name in self._endpoints)

    async def score(
        self,
        responses: Sequence[Response],
        *,
        on_judged: Callable[[int], None] | None = None,
        any_number: bool = False,
    ) -> list[VerifierOutcome]:
        """Judge every response with the verifier that it names; return outcomes in the same order.

        ``on_judged`` receives the number of responses that have just got their outcome. With
        ``any_number`` accuracies need not be in [0, 1]. Whatever a verifier does, nothing is
        raised: errors become the VerifierFailure of their response."""

        def found(response: Response) -> VerifierSpec:
            return replace(resolve_named(response.verifier, self._configured), any_number=any_number)

        return await self._outcomes(responses, found, on_judged or (lambda _: None))

    async def judgments(self, name: str, responses: Sequence[Response]) -> list[VerifierOutcome]:
        """Return what is wrong with each response, in order, as the reason of a verdict; ``name``
        is the source of judgments. A failure says why there is none. Never raises."""
        return await self._outcomes(responses, lambda _: resolve_judgments(name), lambda _: None)

    async def _outcomes(
        self,
        responses: Sequence[Response],
        found: Callable[[Response], VerifierSpec],
        report_judged: Callable[[int], None],
    ) -> list[VerifierOutcome]:
        """Judge each response with the verifier that ``found`` returns for it; its ConfigError becomes a failure."""
        batch = _Batch(responses, [None] * len(responses), report_judged)
        outcomes = batch.outcomes
        jobs: dict[VerifierSpec, list[_Job]] = {}
        batches: dict[VerifierSpec, list[int]] = {}
        remote: dict[VerifierSpec, list[int]] = {}
        for index, response in enumerate(responses):
            try:
                spec = found(response)
                if spec.name.startswith(ENDPOINT):
                    self._endpoint(spec.name)
            except ConfigError as error:
                outcomes[index] = VerifierFailure(kind=VerifierFailureKind.UNKNOWN_VERIFIER, error=str(error))
                continue
            if spec.name in self._endpoints:
                remote.setdefault(spec, []).append(index)
            elif spec.sandboxed:
                jobs.setdefault(spec, []).append(_Job(batch, index))
            else:
                batches.setdefault(spec, []).append(index)
        batch.report_judged(len(responses) - sum(map(len, (*remote.values(), *batches.values(), *jobs.values()))))
        for spec, indices in batches.items():
            returned = self._function(spec)([responses[index] for index in indices], judgments=spec.judgments)
            judged = checked(
                returned, len(indices), who=spec.name, any_number=spec.any_number, judgments=spec.judgments
            )
            for index, outcome in zip(indices, judged, strict=True):
                outcomes[index] = outcome
            batch.report_judged(len(indices))
        if remote:
            await self._ask_endpoints(batch, remote)
        if jobs:
            await self._judge_in_sandboxes(batch, jobs)
        return [outcome for outcome in outcomes if outcome is not None]

    async def score_group(self, verifier: str, responses: Sequence[Response]) -> list[VerifierOutcome]:
        """Judge the responses of one group in one sandbox call; numbers may be outside [0, 1]. If
        the call fails or is late, every response gets that failure."""
        try:
            spec = replace(resolve_named(verifier, self._configured), any_number=True, whole_group=True)
        except ConfigError as error:
            return [VerifierFailure(kind=VerifierFailureKind.UNKNOWN_VERIFIER, error=str(error))] * len(responses)
        process = await self._idle.get()
        try:
            async with self._limiting_processes():
                return await process.call(spec, responses, self._timeout_s, wait_s=self._wait_s)
        finally:
            self._idle.put_nowait(process)
            work.step()

    async def _ask_endpoints(self, batch: _Batch, jobs: Mapping[VerifierSpec, Sequence[int]]) -> None:
        """Send responses to endpoints, all concurrently. Each endpoint limits its requests in
        flight, and each request has a deadline."""

        async def ask(spec: VerifierSpec, index: int) -> None:
            endpoint = self._endpoints[spec.name]
            outcome = await (endpoint.judgment if spec.judgments else endpoint.score)(batch.responses[index])
            (batch.outcomes[index],) = checked(
                [outcome], 1, who=spec.name, any_number=spec.any_number, judgments=spec.judgments
            )
            work.step(1.0 / len(batch.outcomes))
            batch.report_judged(1)

        async with asyncio.TaskGroup() as tasks:
            for spec, indices in jobs.items():
                for index in indices:
                    tasks.create_task(ask(spec, index))

    def _endpoint(self, name: str) -> RewardEndpoint:
        if name not in self._endpoints:
            known = ", ".join(self._endpoints) or "none"
            raise ConfigError(
                f"verifier {name!r} is not an endpoint; [reward.endpoints] has {known}: add a table with that name"
            )
        return self._endpoints[name]

    async def aclose(self) -> None:
        """End every child process and connection. May be called more than once."""
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        for process in self._processes:
            await process.kill()

    @asynccontextmanager
    async def _limiting_processes(self) -> AsyncIterator[None]:
        """Count each sandbox's processes while the block runs, and end a sandbox that has too many.
        Every call in the block must have a time limit."""
        failed: Exception | None = None
        async with work.within_its_limit(), asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._count())
            try:
                yield
            except Exception as error:  # noqa: BLE001  re-raised below, because a TaskGroup would wrap it
                failed = error
            finally:
                counting.cancel()
        if failed is not None:
            raise failed

    async def _count(self) -> None:
        pause_s = _COUNT_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(_COUNT_EVERY_S, await self._count_once() / _COUNTING_SHARE)

    async def _count_once(self) -> float:
        """Count for all calls, unless that was done just now; return how many seconds it took."""
        began = time.perf_counter()
        if began - self._counted_s < _COUNT_EVERY_S:
            return 0.0
        self._counted_s = began
        sandboxes = {process.pid: process for process in self._processes if process.pid is not None}
        for pid, usage in (await asyncio.to_thread(session_usage, sandboxes.keys())).items():
            # the child may have been replaced meanwhile
            if sandboxes[pid].pid != pid:
                continue
            if usage.num_processes > self._max_processes:
                most = f"at most {self._max_processes} are allowed at once"
                sandboxes[pid].end_overrun(f"had {usage.num_processes} processes, {most}; all were killed")
            else:
                sandboxes[pid].record_usage(usage)
        return time.perf_counter() - began

    async def _judge_in_sandboxes(self, batch: _Batch, jobs: Mapping[VerifierSpec, Sequence[_Job]]) -> None:
        """Wait until all jobs of a batch have outcomes, from its own tasks or those of other
        batches that take its jobs along. Every call ahead has a time limit."""
        num_jobs = sum(map(len, jobs.values()))
        for spec, added in jobs.items():
            self._waiting.setdefault(spec, deque()).extend(added)
        try:
            while not batch.is_judged:
                batch.changed.clear()
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(len(self._processes), num_jobs)):
                        tasks.create_task(self._judge_waiting(batch))
                if not batch.is_judged:
                    await batch.changed.wait()
        finally:
            for spec in jobs:
                if left := [job for job in self._waiting.get(spec, ()) if job.batch is not batch]:
                    self._waiting[spec] = deque(left)
                else:
                    self._waiting.pop(spec, None)

    async def _judge_waiting(self, batch: _Batch) -> None:
        """Take jobs, also of other batches, until there are none left or ``batch`` is judged."""
        process = await self._idle.get()
        try:
            async with self._limiting_processes():
                while (
                    not batch.is_judged and (spec := next(filter(self._waiting.get, self._waiting), None)) is not None
                ):
                    await self._judge_next(process, spec)
            # even short calls may leave processes behind
            await self._count_once()
        finally:
            self._idle.put_nowait(process)

    async def _judge_next(self, process: SandboxProcess, spec: VerifierSpec) -> None:
        """Judge the first waiting job of a verifier, with as many others as one call takes. If the
        call is cancelled, its jobs wait again."""
        waiting = self._waiting[spec]
        jobs = [waiting.popleft()]
        try:
            if (failure := await process.load(spec)) is not None:
                work.step(jobs[0].share)
                jobs[0].finish(failure)
                return
            share = -(-(len(waiting) + 1) // len(self._processes))
            while waiting and len(jobs) < min(process.max_batch(spec), share):
                jobs.append(waiting.popleft())
            await self._judge(process, spec, jobs)
        finally:
            for job in jobs:
                if job.batch.outcomes[job.index] is None:
                    self._waiting.setdefault(spec, deque()).appendleft(job)
                    job.batch.changed.set()

    async def _judge(self, process: SandboxProcess, spec: VerifierSpec, jobs: Sequence[_Job]) -> None:
        """Judge in one call, or one by one if that call fails or is late. Each call counts as progress."""
        judged = await process.call(spec, [job.response for job in jobs], self._timeout_s, wait_s=self._wait_s)
        if len(jobs) > 1 and not any(map(_is_answer, judged)):
            work.step()
            for job in jobs:
                await self._judge(process, spec, [job])
            return
        if spec.sound and len(jobs) == 1 and _has_died(judged[0]):
            work.step()
            # try once more, because it may have been killed from outside
            judged = await process.call(spec, [jobs[0].response], self._timeout_s, wait_s=self._wait_s)
            if isinstance(again := judged[0], VerifierFailure) and _has_died(again):
                judged = [not_judged(again.error)]
        work.step(sum(job.share for job in jobs))
        for job, outcome in zip(jobs, judged, strict=True):
            job.finish(outcome)

    def _function(self, spec: VerifierSpec) -> RewardFunction:
        if spec.path not in self._in_process:
            judge = load(spec.path)
            if judge.is_async:
                raise ConfigError(f"verifier {spec.name!r} is async; register it with sandboxed=True")
            self._in_process[spec.path] = judge
        return self._in_process[spec.path]


def _endpoints(config: RewardSection, budget: Budget | None, count: Count | None) -> dict[str, RewardEndpoint]:
    if not config.endpoints:
        return {}
    # imports an HTTP client, so only where it is used
    from pipeline.rewards.endpoint import RewardEndpoint

    return {
        ENDPOINT + name: RewardEndpoint(name, settings, budget=budget, count=count)
        for name, settings in config.endpoints.items()
    }


def _is_answer(outcome: VerifierOutcome) -> bool:
    if isinstance(outcome, Verdict):
        return outcome.judged
    return outcome.kind is VerifierFailureKind.NOTHING_FOUND


def _has_died(outcome: VerifierOutcome) -> bool:
    return isinstance(outcome, VerifierFailure) and outcome.kind is VerifierFailureKind.DIED
