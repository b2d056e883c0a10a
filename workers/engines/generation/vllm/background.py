# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM in its own processes, for GPUs: they keep decoding while this process does other things.

    caller's thread:  requests and aborts -> loop's thread -> vLLM -> loop's thread -> one queue of
                      step outputs -> caller's thread, which alone knows the requests

vLLM's core client runs on an event loop in a thread. The caller posts to it and reads one queue:
the output of every decode step, and after a swap the new version. The threads share nothing else.

vLLM's own front end (``AsyncLLM.generate``) creates objects for every token and costs this process
80 microseconds of CPU time per token; the core client with log-probs costs 14. So only the core
client is used, and requests are built here.

Weights change during a pause. vLLM's pause returns once the outputs of all earlier steps are out,
and outputs keep their order, so whatever precedes the version in the queue was sampled under the
old one. From 0.32 on vLLM reports the version of each step, which is checked.

Every wait for vLLM's processes has a deadline. When they die, every wait ends with EngineDied. When
this process dies, they end by themselves (``processes``). Their phases at the start are reported as
work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.process import work
from protocol.errors import EngineDied, EngineProcessDied
from workers.engines.generation.vllm.core import CoreRequest, CoreSample
from workers.engines.generation.vllm.in_process import probe_params, sampling_params, spans_of
from workers.engines.generation.vllm.processes import PHASE_FILE
from workers.engines.model.weights_file import PublishedWeights, write_weights

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CALL_S = 120.0
"""Longest wait for an answer of vLLM's processes, except for loading weights."""
LOAD_S = 600.0
STAGE_S = 60.0
"""Longest wait for staging weights while decoding continues; a swap loads the rest."""
_STAGE_POLL_S = 0.02
_PROBE = "headrace-probe"
_STARTING_WORKER = "workers.engines.generation.vllm.starting_worker.StartingWorker"


class _Stream:
    def __init__(self, version: int) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.starts: list[tuple[int, int]] = [(version, 0)]
        self.num_cached_tokens = 0

    def sample(self, name: str, *, is_over: bool) -> CoreSample:
        tokens = np.array(self.tokens, np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        return CoreSample(
            name, tokens, logprobs, spans_of(self.starts, tokens.size), self.num_cached_tokens, is_over=is_over
        )


class BackgroundCore:
    """A :class:`core.Core` on the core client of vLLM's ``AsyncLLM``."""

    def __init__(self, arguments: Mapping[str, Any], *, temperature: float = 1.0) -> None:
        """Start vLLM's processes and load the model; ``temperature`` is for probes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # this process has threads, so a fork could deadlock
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._streams: dict[str, _Stream] = {}
        self._ended: list[CoreSample] = []
        self._prompt_logprobs: list[np.ndarray] = []
        self._version = -1
        self._num_steps = 0
        self._failure: EngineProcessDied | None = None
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        try:
            with _phases_reported() as report:
                arguments = {"worker_cls": _STARTING_WORKER, **arguments}
                # in a thread without a loop, so that AsyncLLM does not start reading the outputs itself
                self._engine: Any = self._call(
                    asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments)), LOAD_S, report
                )
            self._client: Any = self._engine.engine_core
            self._reader = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
            self.has_streams = all(self._call(self._engine.collective_rpc("headrace_begin", args=(temperature,))))
        except BaseException:
            self._stop_loop()
            raise
        self.block_tokens = int(self._engine.vllm_config.cache_config.block_size)
        self._reports_versions = hasattr(self._engine, "update_weight_version")

    @property
    def live(self) -> list[str]:
        """Names of requests that are neither finished nor cut."""
        return list(self._streams)

    def add(self, request: CoreRequest) -> None:
        self._streams[request.name] = _Stream(self._version)
        params = sampling_params(request, seeded=not self.has_streams)
        self._send(request.name, request.context, params, salt=request.salt)

    def step(self, timeout_s: float) -> list[CoreSample]:
        deadline = time.monotonic() + timeout_s
        while self._take(0.0 if self._ended else deadline - time.monotonic()) and time.monotonic() < deadline:
            pass
        ended, self._ended = self._ended, []
        return ended

    def sampled(self, name: str, start: int) -> Sequence[int]:
        return self._streams[name].tokens[start:]

    def cut(self, names: Sequence[str]) -> list[CoreSample]:
        self._take_all()
        cut = {name: self._streams.pop(name) for name in names if name in self._streams}
        if cut:
            self._post(self._client.abort_requests_async(list(cut)))
        samples = [sample for sample in self._ended if sample.name in names]
        self._ended = [sample for sample in self._ended if sample.name not in names]
        return samples + [stream.sample(name, is_over=False) for name, stream in cut.items() if stream.tokens]

    def stage(self, path: Path, policy_version: int) -> None:
        self._call(self._stage(path, policy_version), CALL_S)

    async def _stage(self, path: Path, policy_version: int) -> None:
        await self._engine.collective_rpc("headrace_stage", args=(str(path), policy_version))
        for _ in range(round(STAGE_S / _STAGE_POLL_S)):
            if all(await self._engine.collective_rpc("headrace_is_staged")):
                return
            await asyncio.sleep(_STAGE_POLL_S)

    def load(self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, recompute: bool) -> None:
        """Pause, change the weights on every rank, resume."""
        path = tensors.path if isinstance(tensors, PublishedWeights) else None
        if path is not None:
            self._call(self._swap(path, policy_version, recompute=recompute), LOAD_S)
        else:
            with tempfile.TemporaryDirectory(prefix="headrace-weights-") as folder:
                written = Path(folder) / "weights.safetensors"
                write_weights(written, tensors.items(), dtype="float32")
                self._call(self._swap(written, policy_version, recompute=recompute), LOAD_S)
        self._take_all()

    async def _swap(self, path: Path, policy_version: int, *, recompute: bool) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=recompute)
        await self._engine.collective_rpc("headrace_load_file", args=(str(path), policy_version))
        if self._reports_versions:
            await self._engine.update_weight_version(str(policy_version))
        # wait until the reader has taken the outputs of the steps before the pause
        while not self._client.outputs_queue.empty():  # noqa: ASYNC110  vLLM has no event for that
            await asyncio.sleep(0)
        self._outputs.put(policy_version)
        await self._engine.resume_generation()

    def probe(self, tokens: np.ndarray, timeout_s: float) -> tuple[np.ndarray, list[CoreSample]]:
        self._prompt_logprobs = []
        self._send(_PROBE, tokens, probe_params())
        deadline = time.monotonic() + timeout_s
        while sum(part.size for part in self._prompt_logprobs) < tokens.size - 1:
            if not self._take(deadline - time.monotonic()):
                raise self._died(f"it did not score a probe of {tokens.size} tokens within {timeout_s:g} s")
        ended, self._ended = self._ended, []
        return np.concatenate(self._prompt_logprobs), ended

    def num_steps(self) -> int:
        """Steps whose output was received; with data parallelism, the first engine's."""
        return self._num_steps

    def close(self) -> None:
        async def stop() -> None:
            # asked to end, vLLM's processes wait seconds for each other, and are then killed too
            for process in self._client.resources.engine_manager.processes:
                process.kill()
            self._engine.shutdown()
            _release_tracker()

        # a dead engine leaves processes behind, too
        self._failure = None
        try:
            with contextlib.suppress(EngineDied):
                self._call(stop())
        finally:
            self._stop_loop()

    # -- outputs, on the caller's thread --

    def _take(self, timeout_s: float) -> bool:
        """Process the next output; return whether one arrived in time. Raises EngineDied."""
        try:
            taken = self._outputs.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return False
        if isinstance(taken, BaseException):
            raise self._died(f"{type(taken).__name__}: {taken}") from taken
        if isinstance(taken, int):
            self._version = taken
            for stream in self._streams.values():
                stream.starts.append((taken, len(stream.tokens)))
        else:
            self._take_step(taken)
        return True

    def _take_all(self) -> None:
        for _ in range(self._outputs.qsize()):
            self._take(0.0)

    def _take_step(self, step: Any) -> None:
        """Process ``EngineCoreOutputs``: the new tokens of all requests in a step."""
        self._num_steps += step.engine_index == 0
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                if output.request_id == _PROBE and output.new_prompt_logprobs_tensors is not None:
                    # [tokens, 1 or more]: the token of the prompt comes first
                    self._prompt_logprobs.append(output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy())
                # otherwise the request was cut
                continue
            if self._reports_versions and step.weight_version != str(self._version):
                raise self._died(f"it sampled with version {step.weight_version}, expected version {self._version}")
            if output.prefill_stats is not None:
                stream.num_cached_tokens = output.prefill_stats.num_cached_tokens
            stream.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                # [tokens, 1 or more]: the sampled token comes first
                stream.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                if str(output.finish_reason) not in ("stop", "length"):
                    raise self._died(f"it ended request {output.request_id}: {output.finish_reason}")
                del self._streams[output.request_id]
                self._ended.append(stream.sample(output.request_id, is_over=True))

    # -- the loop --

    async def _read(self) -> None:
        """Move the output of each step to the caller's queue, until vLLM ends or dies."""
        try:
            while True:
                self._outputs.put(await self._client.get_output_async())
        except Exception as error:  # noqa: BLE001 -- raised on the caller's thread
            self._outputs.put(error)

    def _send(self, name: str, tokens: np.ndarray, params: Any, *, salt: str | None = None) -> None:
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tokens.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._post(self._client.add_request_async(request))

    def _post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine on the loop; coroutines start in the order they are posted."""

        def forward(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                self._outputs.put(error)

        asyncio.run_coroutine_threadsafe(coroutine, self._loop).add_done_callback(forward)

    def _call(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float = CALL_S,
        every_second: Callable[[], None] = lambda: None,
    ) -> T:
        """Run a coroutine on the loop. Raises EngineDied when vLLM is dead or late."""
        if self._failure is not None:
            coroutine.close()
            raise self._failure
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                if future.done():
                    raise
                every_second()
                if time.monotonic() >= deadline:
                    future.cancel()
                    raise self._died(f"it did not answer within {timeout_s:g} s") from None
            except Exception as error:
                if _is_death(error):
                    raise self._died(str(error)) from error
                raise

    def _died(self, reason: str) -> EngineProcessDied:
        self._failure = EngineProcessDied(f"vLLM's processes failed: {reason}; a new engine replaces them")
        return self._failure

    def _stop_loop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


def _release_tracker() -> None:
    """Let this process's resource tracker end with the processes that still use it; only it frees the
    shared memory of those that were killed. The next use starts another."""
    tracker: Any = resource_tracker._resource_tracker  # pyright: ignore[reportPrivateUsage]
    with tracker._lock:
        if tracker._fd is not None:
            os.close(tracker._fd)
            tracker._fd = tracker._pid = None


@contextlib.contextmanager
def _phases_reported() -> Generator[Callable[[], None]]:
    """Report the phases of a starting engine as work, one task each, when the given function is called.

    A start that has a deadline is no standstill until then."""
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as folder, contextlib.ExitStack() as task:
        path, num_told = Path(folder) / "phases", 0
        path.touch()
        os.environ[PHASE_FILE] = str(path)
        task.enter_context(work.task("vLLM: importing"))

        def report() -> None:
            nonlocal num_told
            work.step()
            phases = path.read_text(encoding="utf-8").splitlines()
            for phase in phases[num_told:]:
                task.close()
                task.enter_context(work.task(f"vLLM: {phase}"))
            num_told = len(phases)

        try:
            yield report
            report()
        finally:
            del os.environ[PHASE_FILE]


def _is_death(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return isinstance(error, EngineDeadError | EngineGenerateError)
