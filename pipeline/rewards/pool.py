"""The verification engine: batches of responses in, one outcome for each out.

*Consumes* responses, each naming its verifier. *Produces* outcomes in the same order. *Waits for* sandbox processes, each call
within its time limit. Cheap built-in verifiers run here, by the batch; everything else runs in killable processes, one
response a call, as many at once as there are processes. Processes start when first needed.

A verifier may start processes of its own, which die with it. While calls run, they are counted a few times a second, by
session, and too many are killed: the kernel's own limit counts the account's other processes, too, and exempts root.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

from pipeline import work
from pipeline.descendants import session_sizes
from pipeline.rewards.process import SandboxProcess
from pipeline.rewards.registry import VerifierSpec, load, resolve, resolve_named
from pipeline.rewards.verifier import FailureKind, Outcome, Response, VerifierFailure, checked
from protocol.errors import ConfigError

MEMORY_BYTES = 2 << 30
"""Private memory that one sandbox process may hold."""

MAX_PROCESSES = 64
"""That one sandbox process may have at once, itself included."""
_COUNT_EVERY_S = 0.25
_COUNTING_SHARE = 0.05
"""Of a core: where there are very many processes to look at, they are counted less often."""

Job = tuple[int, VerifierSpec, Response]


class PoolConfig(Protocol):
    """What the pool reads of the configuration's reward section."""

    @property
    def timeout_s(self) -> float:
        """Time limit of one verifier call."""
        ...

    @property
    def processes(self) -> int:
        """Sandbox processes."""
        ...


class VerifierPool:
    """Scores batches. Use as ``async with VerifierPool(config.reward) as pool`` or call ``start`` and ``aclose``."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        configured: Container[str] = (),
        memory_bytes: int = MEMORY_BYTES,
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        """``configured``: import paths that the configuration names; a response that names another one is not scored."""
        self._configured = configured
        self._max_processes = max_processes
        self._timeout_s = config.timeout_s
        self._processes = [SandboxProcess(memory_bytes) for _ in range(config.processes)]
        # Last in, first out: a loaded, warm process is preferred to starting another.
        self._idle: asyncio.LifoQueue[SandboxProcess] = asyncio.LifoQueue(maxsize=config.processes)
        for process in self._processes:
            self._idle.put_nowait(process)
        self._in_process: dict[str, Callable[..., Any]] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def pids(self) -> list[int]:
        """Process ids of the living children."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self, verifiers: Iterable[str] = ()) -> None:
        """Load the named verifiers now, so that a wrong name or a module that fails to import is told at once.

        Raises:
            ConfigError: a verifier does not exist or cannot be imported.
        """
        for spec in {resolve(name) for name in verifiers}:
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
                is_missing = failure.kind is FailureKind.UNKNOWN_VERIFIER
                raise ConfigError(
                    failure.error if is_missing else f"verifier {spec.name!r} cannot be loaded: {failure.error}"
                )

    async def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """Judge every response by the verifier that it names; outcomes come in the same order.

        Nothing that a verifier does raises here: it becomes the VerifierFailure of its response.
        """
        outcomes: list[Outcome | None] = [None] * len(responses)
        batches: dict[VerifierSpec, list[int]] = {}
        jobs: list[Job] = []
        for index, response in enumerate(responses):
            try:
                spec = resolve_named(response.verifier, self._configured)
            except ConfigError as error:
                outcomes[index] = VerifierFailure(kind=FailureKind.UNKNOWN_VERIFIER, error=str(error))
                continue
            if spec.sandboxed:
                jobs.append((index, spec, response))
            else:
                batches.setdefault(spec, []).append(index)
        for spec, indices in batches.items():
            returned = self._function(spec)([responses[index] for index in indices])
            for index, outcome in zip(indices, checked(returned, len(indices)), strict=True):
                outcomes[index] = outcome
        if jobs:
            queue = iter(jobs)
            async with self._counted(), asyncio.TaskGroup() as tasks:
                for _ in range(min(len(self._processes), len(jobs))):
                    tasks.create_task(self._work(queue, outcomes))
        return [outcome for outcome in outcomes if outcome is not None]

    async def aclose(self) -> None:
        """End every child process. Repeated calls do nothing."""
        for process in self._processes:
            await process.kill()

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count the processes of every sandbox while the block runs, and end a sandbox that has too many."""
        failed: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
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
            began = time.perf_counter()
            sandboxes = {process.pid: process for process in self._processes if process.pid is not None}
            for pid, number in (await asyncio.to_thread(session_sizes, sandboxes.keys())).items():
                if number > self._max_processes:
                    sandboxes[pid].end_overrun(
                        f"had {number} processes, at most {self._max_processes} are allowed at once; all were killed"
                    )
            pause_s = max(_COUNT_EVERY_S, (time.perf_counter() - began) / _COUNTING_SHARE)

    async def _work(self, jobs: Iterator[Job], outcomes: list[Outcome | None]) -> None:
        """Take jobs from the iterator that the tasks of one batch share, until it is empty."""
        process = await self._idle.get()
        try:
            for index, spec, response in jobs:
                (outcomes[index],) = await process.call(spec, (response,), self._timeout_s)
                work.step(1.0 / len(outcomes))
        finally:
            self._idle.put_nowait(process)

    def _function(self, spec: VerifierSpec) -> Callable[..., Any]:
        if spec.name not in self._in_process:
            self._in_process[spec.name] = load(spec.path)
        return self._in_process[spec.name]
