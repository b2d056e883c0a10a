"""The verification engine: batches of responses in, one outcome for each out.

*Consumes* responses, each naming its verifier. *Produces* outcomes in the same order. *Waits for*
sandbox processes, each call within its time limit. Cheap built-in verifiers run here, by the batch.
All others run in killable processes, one response a call or as many as the verifier takes. There
are as many calls at once as processes, which start when first needed. Batches may be judged at
once: they share the processes, and a call may have responses of several.

An answer that is not judged within the limits of its call has no verdict: the call is late, or over
its budget. When a call with several responses fails or is late, each is judged by itself, so that one response
spoils no other.

A verifier may start processes of its own, which die with it. While calls run, they are counted a
few times a second, by session, and too many are killed. The kernel's own limit would not do: it
counts the account's other processes, too, and exempts root."""

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
"""Private memory that one sandbox process may hold."""

MAX_PROCESSES = 64
"""Processes that one sandbox may have at once, the sandbox process included."""
_COUNT_EVERY_S = 0.25
_COUNTING_SHARE = 0.05
"""Largest share of a core for counting processes; with very many they are counted less often."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Responses and their outcomes so far."""

    responses: Sequence[Response]
    outcomes: list[VerifierOutcome | None]
    report_judged: Callable[[int], None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all have an outcome, or one waits for a call again."""

    @property
    def is_judged(self) -> bool:
        return None not in self.outcomes


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A response of a batch that waits for a call."""

    batch: _Batch
    index: int

    @property
    def response(self) -> Response:
        return self.batch.responses[self.index]

    @property
    def share(self) -> float:
        """Its part of the batch."""
        return 1.0 / len(self.batch.outcomes)

    def finish(self, outcome: VerifierOutcome) -> None:
        """Set its outcome."""
        self.batch.outcomes[self.index] = outcome
        self.batch.report_judged(1)
        if self.batch.is_judged:
            self.batch.changed.set()


class VerifierPool:
    """Scores batches, as a context manager or between ``start`` and ``aclose``."""

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
        """``configured``: import paths that the configuration names; no other one is called.
        ``code``: a version of their modules, which comes before all others. ``budget`` and
        ``count`` are for endpoints."""
        self._configured = configured
        self._max_processes = max_processes
        self._timeout_s, self._wait_s = config.timeout_s, config.longest_wait_s
        self._processes = [SandboxProcess(memory_bytes, config.path, code) for _ in range(config.processes)]
        # Last in, first out: a loaded, warm process is preferred to starting another.
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
        """Process ids of the living children."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def trouble(self) -> str:
        """How an endpoint behaves for which responses wait, if not well; or empty."""
        return next(filter(None, (endpoint.trouble for endpoint in self._endpoints.values())), "")

    async def start(self, verifiers: Iterable[str] = (), *, whole_group: bool = False) -> None:
        """Load the named verifiers now, so that a wrong name or a failing import is reported at
        once. Raises ConfigError: a verifier does not exist, cannot be imported, or takes one
        response a call where it is to judge a ``whole_group``."""
        await self._start({replace(resolve(name), whole_group=whole_group) for name in verifiers})

    async def start_judgments(self, name: str) -> None:
        """Load what writes judgments under that name, or look for its endpoint. Raises ConfigError
        as ``start`` does."""
        await self._start({resolve_judgments(name)})

    async def _start(self, specs: Iterable[VerifierSpec]) -> None:
        for spec in specs:
            if spec.name.startswith(ENDPOINT):
                if spec.whole_group:
                    raise ConfigError(f"{spec.name} judges one response a request; take whole_group off")
                await self._endpoint(spec.name).check()
                continue
            if not spec.sandboxed:
                self._function(spec)
                continue
            process = await self._idle.get()
            try:
                async with self._counted():
                    failure = await process.load(spec)
            finally:
                self._idle.put_nowait(process)
            if failure is not None:
                is_missing = failure.kind is VerifierFailureKind.UNKNOWN_VERIFIER
                head = "" if is_missing else f"verifier {spec.name!r} cannot be loaded: "
                raise ConfigError(head + failure.error)

    def is_quick(self, verifier: str, *, judgments: bool = False) -> bool:
        """Return whether it judges here and at once: without a process or a request, or not at all,
        since the name is unknown."""
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
        """RewardFunction every response by the verifier that it names; outcomes come in the same order.
        ``on_judged`` receives the number of responses that have just got their outcome. With
        ``any_number`` accuracies need not be in [0, 1]. Nothing that a verifier does raises here:
        it becomes the VerifierFailure of its response."""

        def found(response: Response) -> VerifierSpec:
            return replace(resolve_named(response.verifier, self._configured), any_number=any_number)

        return await self._outcomes(responses, found, on_judged or (lambda _: None))

    async def judgments(self, name: str, responses: Sequence[Response]) -> list[VerifierOutcome]:
        """Return what is wrong with each response, as the reason of a verdict, by what writes
        judgments under that name; in order. A failure says why there is no judgment. Nothing raises."""
        return await self._outcomes(responses, lambda _: resolve_judgments(name), lambda _: None)

    async def _outcomes(
        self,
        responses: Sequence[Response],
        found: Callable[[Response], VerifierSpec],
        report_judged: Callable[[int], None],
    ) -> list[VerifierOutcome]:
        """Ask for the outcome of each response where it is ``found``; a ConfigError is one too."""
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
            await self._call_for(batch, jobs)
        return [outcome for outcome in outcomes if outcome is not None]

    async def score_group(self, verifier: str, responses: Sequence[Response]) -> list[VerifierOutcome]:
        """RewardFunction the responses of one group by one call in a sandbox; numbers may be any. A call
        that fails or is late gives each response that outcome."""
        try:
            spec = replace(resolve_named(verifier, self._configured), any_number=True, whole_group=True)
        except ConfigError as error:
            return [VerifierFailure(kind=VerifierFailureKind.UNKNOWN_VERIFIER, error=str(error))] * len(responses)
        process = await self._idle.get()
        try:
            async with self._counted():
                return await process.call(spec, responses, self._timeout_s, wait_s=self._wait_s)
        finally:
            self._idle.put_nowait(process)
            work.step()

    async def _ask_endpoints(self, batch: _Batch, jobs: Mapping[VerifierSpec, Sequence[int]]) -> None:
        """RewardFunction responses by endpoints, all at once; each endpoint has its limit of requests in
        flight, and each judgement its deadline."""

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
            there = ", ".join(self._endpoints) or "none"
            raise ConfigError(
                f"verifier {name!r} is not an endpoint; [reward.endpoints] has {there}: add a table with that name"
            )
        return self._endpoints[name]

    async def aclose(self) -> None:
        """End every child process and connection. Repeated calls do nothing."""
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        for process in self._processes:
            await process.kill()

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count each sandbox's processes while the block runs; end a sandbox that has too many. Each
        call in the block has its time limit."""
        failed: Exception | None = None
        async with work.within_its_limit(), asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._count())
            try:
                yield
            except Exception as error:  # noqa: BLE001  the block's own, which a TaskGroup would wrap
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
        """Count for all calls, unless that was done just now; return the seconds that it took."""
        began = time.perf_counter()
        if began - self._counted_s < _COUNT_EVERY_S:
            return 0.0
        self._counted_s = began
        sandboxes = {process.pid: process for process in self._processes if process.pid is not None}
        for pid, usage in (await asyncio.to_thread(session_usage, sandboxes.keys())).items():
            # it may have been replaced meanwhile
            if sandboxes[pid].pid != pid:
                continue
            if usage.num_processes > self._max_processes:
                most = f"at most {self._max_processes} are allowed at once"
                sandboxes[pid].end_overrun(f"had {usage.num_processes} processes, {most}; all were killed")
            else:
                sandboxes[pid].used(usage)
        return time.perf_counter() - began

    async def _call_for(self, batch: _Batch, jobs: Mapping[VerifierSpec, Sequence[_Job]]) -> None:
        """Wait until all jobs of a batch have outcomes: by its own tasks, or by those of others
        that took its jobs along. Every call in front has its time limit."""
        num_jobs = sum(map(len, jobs.values()))
        for spec, added in jobs.items():
            self._waiting.setdefault(spec, deque()).extend(added)
        try:
            while not batch.is_judged:
                batch.changed.clear()
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(len(self._processes), num_jobs)):
                        tasks.create_task(self._work(batch))
                if not batch.is_judged:
                    await batch.changed.wait()
        finally:
            for spec in jobs:
                if left := [job for job in self._waiting.get(spec, ()) if job.batch is not batch]:
                    self._waiting[spec] = deque(left)
                else:
                    self._waiting.pop(spec, None)

    async def _work(self, batch: _Batch) -> None:
        """Take jobs, those of other batches along, until there are none or ``batch`` is judged."""
        process = await self._idle.get()
        try:
            async with self._counted():
                while (
                    not batch.is_judged and (spec := next(filter(self._waiting.get, self._waiting), None)) is not None
                ):
                    await self._take(process, spec)
            # short calls, too, may leave processes
            await self._count_once()
        finally:
            self._idle.put_nowait(process)

    async def _take(self, process: SandboxProcess, spec: VerifierSpec) -> None:
        """RewardFunction the first job of a verifier, with as many as one call takes. A cancelled call's
        jobs wait again."""
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
        """RewardFunction by one call; by one each, where it fails or is late. A call is a piece of work."""
        judged = await process.call(spec, [job.response for job in jobs], self._timeout_s, wait_s=self._wait_s)
        if len(jobs) > 1 and not any(map(_is_answer, judged)):
            work.step()
            for job in jobs:
                await self._judge(process, spec, [job])
            return
        if spec.sound and len(jobs) == 1 and _has_died(judged[0]):
            work.step()
            # once more: it may have been killed from outside
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
    # an HTTP client is imported only where it is used
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
