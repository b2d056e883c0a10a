# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM's async engine beside this process, for GPUs. Its workers decode on while this process does
other things.

Every wait for vLLM's processes has a deadline. When they die, every wait ends with EngineDied.

vLLM's client lives on an event loop on a thread of this core's own. The caller's thread posts to it
and reads from one queue. Tokens are reported as they come.

Each report is stamped with the version that was loaded when it was handled. That is right because
weights change only in a pause. A pause ends when the reports of every step before it are out, and
the loop handles them in order. Where vLLM reports versions itself
(``CompletionOutput.weight_versions``, from 0.32), its spans are taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from protocol.errors import EngineDied
from workers.engines.generation.vllm.core import CoreRequest, CoreSample
from workers.engines.generation.vllm.in_process import probe_params, prompt_logprobs, sampling_params, spans_of
from workers.engines.model.weights_file import PublishedWeights, write_weights

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CALL_S = 120.0
"""Longest wait for an answer of vLLM's processes, but for weights."""
LOAD_S = 600.0
"""Longest wait for weights to be taken."""
STAGE_S = 60.0
"""Longest wait for weights to come to the devices beside decoding; a swap waits for the rest."""
_STAGE_POLL_S = 0.02
_PROBE = "headrace-probe"


class _RequestOutput:
    """The state of one request's output."""

    def __init__(self, version: int) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.starts: list[tuple[int, int]] = [(version, 0)]
        self.num_cached_tokens = 0
        self.is_cut = False

    def sample(self, name: str, spans: tuple[tuple[int, int], ...] | None, *, is_over: bool) -> CoreSample:
        tokens = np.array(self.tokens, np.int32)
        spans = spans_of(self.starts, tokens.size) if spans is None else spans
        return CoreSample(
            name, tokens, np.array(self.logprobs, np.float32), spans, self.num_cached_tokens, is_over=is_over
        )


class BackgroundCore:
    """A :class:`workers.engines.generation.vllm.core.Core` on vLLM's ``AsyncLLM``."""

    def __init__(self, arguments: Mapping[str, Any], *, temperature: float = 1.0) -> None:
        """Start vLLM's processes and load the model; ``temperature`` is that of probes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # this process has threads: a fork could deadlock
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        self._over: queue.SimpleQueue[CoreSample | BaseException] = queue.SimpleQueue()
        self._streams: dict[str, _RequestOutput] = {}
        self._version = -1
        self._num_steps = 0
        self._failure: EngineDied | None = None

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        try:
            self._engine: Any = self._call(start(), LOAD_S)
            self.has_streams = all(self._call(self._engine.collective_rpc("headrace_begin", args=(temperature,))))
        except BaseException:
            self._stop_loop()
            raise
        self.block_tokens = int(self._engine.vllm_config.cache_config.block_size)
        self._reports_versions = hasattr(self._engine, "update_weight_version")

    @property
    def live(self) -> list[str]:
        """Names of requests that are neither over nor cut."""
        return list(self._streams)

    def add(self, request: CoreRequest) -> None:
        """Queue a request."""
        self._streams[request.name] = _RequestOutput(self._version)
        params = sampling_params(request, seeded=not self.has_streams, as_they_come=True)
        asyncio.run_coroutine_threadsafe(self._follow(request, params), self._loop)

    def step(self, timeout_s: float) -> list[CoreSample]:
        """Wait up to ``timeout_s`` for a request to end; return all ended. Raises EngineDied."""
        samples: list[CoreSample] = []
        try:
            samples.append(self._taken(self._over.get(timeout=timeout_s)))
            while True:
                samples.append(self._taken(self._over.get_nowait()))
        except queue.Empty:
            return [sample for sample in samples if self._streams.pop(sample.name, None) is not None]

    def sampled(self, name: str, start: int) -> Sequence[int]:
        """Return the tokens of a live request that were reported by now, from ``start`` on."""
        return self._streams[name].tokens[start:]

    def cut(self, names: Sequence[str]) -> list[CoreSample]:
        """End requests at the present token; return those with a token, ended ones among them."""

        async def abort() -> None:
            await self._engine.abort(list(names))
            # the followers' last reports
            for _ in range(3):
                await asyncio.sleep(0)

        for name in names:
            self._streams[name].is_cut = True
        self._call(abort())
        ended = {sample.name: sample for sample in self._drained()}
        samples: list[CoreSample] = []
        for name in names:
            sample = ended.get(name) or self._streams[name].sample(name, None, is_over=False)
            del self._streams[name]
            if sample.tokens.size:
                samples.append(sample)
        for name, sample in ended.items():
            if name not in names:
                self._over.put(sample)
        return samples

    def stage(self, path: Path, policy_version: int) -> None:
        """Have every rank bring a version to its device, and wait until all have; on any thread."""
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
            return
        with tempfile.TemporaryDirectory(prefix="headrace-weights-") as folder:
            written = Path(folder) / "weights.safetensors"
            write_weights(written, tensors.items(), dtype="float32")
            self._call(self._swap(written, policy_version, recompute=recompute), LOAD_S)

    async def _swap(self, path: Path, policy_version: int, *, recompute: bool) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=recompute)
        await self._engine.collective_rpc("headrace_load_file", args=(str(path), policy_version))
        if self._reports_versions:
            await self._engine.update_weight_version(str(policy_version))
        for stream in self._streams.values():
            stream.starts.append((policy_version, len(stream.tokens)))
        self._version = policy_version
        await self._engine.resume_generation()

    def probe(self, tokens: np.ndarray, timeout_s: float) -> tuple[np.ndarray, list[CoreSample]]:
        """Score a sequence; live requests go on meanwhile."""

        async def score() -> Any:
            last = None
            async for output in self._engine.generate({"prompt_token_ids": tokens.tolist()}, probe_params(), _PROBE):
                last = output
            return last

        scored = prompt_logprobs(self._call(score(), timeout_s), tokens)
        return scored, self.step(0.0)

    def num_steps(self) -> int:
        """Return the tokens of the request that is there longest: vLLM reports no steps."""
        return self._num_steps

    def close(self) -> None:
        """End vLLM's processes."""

        async def stop() -> None:
            self._engine.shutdown()

        # a dead engine has leftovers too
        self._failure = None
        try:
            with contextlib.suppress(EngineDied):
                self._call(stop())
        finally:
            self._stop_loop()

    # -- on the loop's thread --

    async def _follow(self, request: CoreRequest, params: Any) -> None:
        """Read the reports of one request until it is over."""
        prompt = {"prompt_token_ids": request.context.tolist(), "cache_salt": request.salt}
        stream = self._streams[request.name]
        spans: tuple[tuple[int, int], ...] | None = None
        try:
            async for output in self._engine.generate(prompt, params, request.name):
                completion = output.outputs[0]
                stream.tokens += completion.token_ids
                stream.logprobs += [
                    row[token].logprob
                    for token, row in zip(completion.token_ids, completion.logprobs or (), strict=True)
                ]
                stream.num_cached_tokens = output.num_cached_tokens or 0
                if request.name == next(iter(self._streams), ""):
                    self._num_steps += len(completion.token_ids)
                reported = getattr(completion, "weight_versions", None)
                if reported is not None and self._reports_versions:
                    spans = tuple(
                        (int(span.version), span.end - span.start) for span in reported if span.end > span.start
                    )
        except Exception as error:  # noqa: BLE001 -- raised on the caller's thread
            if not stream.is_cut:
                self._over.put(error)
            return
        if not stream.is_cut:
            self._over.put(stream.sample(request.name, spans, is_over=True))

    # -- on the caller's thread --

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
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
                if time.monotonic() >= deadline:
                    future.cancel()
                    raise self._died(f"it did not answer within {timeout_s:g} s") from None
            except Exception as error:
                if _is_death(error):
                    raise self._died(str(error)) from error
                raise

    def _drained(self) -> list[CoreSample]:
        samples: list[CoreSample] = []
        while not self._over.empty():
            samples.append(self._taken(self._over.get_nowait()))
        return samples

    def _taken(self, item: CoreSample | BaseException) -> CoreSample:
        if isinstance(item, BaseException):
            raise self._died(f"{type(item).__name__}: {item}") from item
        return item

    def _died(self, reason: str) -> EngineDied:
        self._failure = EngineDied(f"vLLM's processes failed: {reason}; a new engine takes their place")
        return self._failure

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


def _is_death(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return isinstance(error, EngineDeadError | EngineGenerateError)
