# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM in this process, stepped on the caller's thread: the fastest core on a CPU, and for tests.

Partial output is read from vLLM's request states, since reporting every token would cost a tenth of
a small model's decode step, and vLLM's log-probs about as much again. If the model is on this CPU,
the sampler keeps log-probs in a journal instead."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.errors import EngineDied
from workers.engines.generation.vllm.core import CoreRequest, CoreSample
from workers.engines.generation.vllm.worker import STREAM

if TYPE_CHECKING:
    import torch

    from workers.engines.generation.vllm.journal import LogprobJournal

_PROBE = "headrace-probe"


class InProcessCore:
    """A :class:`core.Core` on vLLM's ``LLMEngine``."""

    def __init__(self, arguments: Mapping[str, Any], *, temperature: float = 1.0) -> None:
        """Load the model; ``temperature`` is for probes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.has_streams = all(self._engine.collective_rpc("headrace_begin", args=(temperature,)))
        self.block_tokens = int(self._engine.vllm_config.cache_config.block_size)
        self._journal: LogprobJournal | None = None
        if self.has_streams:
            (self._journal,) = self._engine.collective_rpc("headrace_keep_logprobs")
        self._starts: dict[str, int] = {}
        self._version = -1
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._inner: dict[str, str] = {}
        self._num_steps = 0

    @property
    def llm(self) -> Any:
        return self._engine

    @property
    def live(self) -> list[str]:
        return list(self._inner)

    def add(self, request: CoreRequest) -> None:
        self._spans[request.name] = [(self._version, 0)]
        self._inner[request.name] = (
            self._engine.add_request(
                request.name,
                {"prompt_token_ids": request.context.tolist(), "cache_salt": request.salt},
                sampling_params(request, seeded=not self.has_streams, logprobs=self._journal is None),
            )
            or request.name
        )
        self._starts[request.name] = request.context.size

    def step(self, timeout_s: float) -> list[CoreSample]:
        del timeout_s
        return [self._sample(output) for output in self._step()]

    def sampled(self, name: str, start: int) -> Sequence[int]:
        return self._state(name).detokenizer.output_token_ids[start:]

    def cut(self, names: Sequence[str]) -> list[CoreSample]:
        samples = [sample for sample in map(self._partial, names) if sample.tokens.size]
        self._engine.abort_request(list(names))
        for name in names:
            del self._spans[name]
            self._forget(name)
        return samples

    def stage(self, path: Path, policy_version: int) -> None: ...

    def load(self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, recompute: bool) -> None:
        for name, spans in self._spans.items():
            spans.append((policy_version, self._num_sampled(name)))
        self._version = policy_version
        self._engine.collective_rpc("headrace_load", args=(list(tensors.items()),))
        if recompute:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def probe(self, tokens: np.ndarray, timeout_s: float) -> tuple[np.ndarray, list[CoreSample]]:
        self._engine.add_request(_PROBE, {"prompt_token_ids": tokens.tolist()}, probe_params())
        over: list[CoreSample] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            outputs = self._step()
            found = next((output for output in outputs if output.request_id == _PROBE), None)
            over += [self._sample(output) for output in outputs if output is not found]
            if found is not None:
                return prompt_logprobs(found, tokens), over
        self._engine.abort_request([_PROBE])
        raise EngineDied(
            f"vLLM did not score a probe of {tokens.size} tokens within {timeout_s:g} s; it hangs or is overloaded"
        )

    def num_steps(self) -> int:
        return self._num_steps

    def close(self) -> None:
        """Does nothing: the end of this process frees the model faster than vLLM would."""

    def _step(self) -> list[Any]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise EngineDied(f"vLLM failed in a decode step: {type(error).__name__}: {error}") from error
        self._num_steps += 1
        return outputs

    def _num_sampled(self, name: str) -> int:
        return self._state(name).detokenizer.num_output_tokens()

    def _state(self, name: str) -> Any:
        return self._engine.output_processor.request_states[self._inner[name]]

    def _partial(self, name: str) -> CoreSample:
        state = self._state(name)
        tokens = np.asarray(state.detokenizer.output_token_ids[:], np.int32)
        logprobs = self._logprobs(name, tokens.size, state.logprobs_processor.logprobs)
        return CoreSample(name, tokens, logprobs, spans_of(self._spans[name], tokens.size), 0, is_over=False)

    def _sample(self, output: Any) -> CoreSample:
        name, completion = output.request_id, output.outputs[0]
        tokens = np.asarray(completion.token_ids, np.int32)
        logprobs = self._logprobs(name, tokens.size, completion.logprobs)
        self._forget(name)
        spans = spans_of(self._spans.pop(name), tokens.size)
        return CoreSample(name, tokens, logprobs, spans, output.num_cached_tokens or 0, is_over=True)

    def _logprobs(self, name: str, num_tokens: int, reported: Any) -> np.ndarray:
        if self._journal is not None:
            return self._journal.read(self._inner[name], self._starts[name], num_tokens)
        return np.asarray(reported.logprobs[:num_tokens], np.float32)

    def _forget(self, name: str) -> None:
        inner = self._inner.pop(name)
        del self._starts[name]
        if self._journal is not None:
            self._journal.forget(inner)


def sampling_params(request: CoreRequest, *, seeded: bool, logprobs: bool = True) -> Any:
    """Return vLLM's sampling parameters for a request.

    ``seeded`` means that vLLM draws the tokens instead of our sampler. A seed costs vLLM a
    generator per request, which must be rewound when a context is prefilled in parts; generators on
    a CPU cannot do that."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        # stop_token_ids has all of ours
        ignore_eos=True,
        # vLLM takes signed 64 bits
        seed=request.stream >> 1 if seeded else None,
        logprobs=0 if logprobs else None,
        flat_logprobs=logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={STREAM: (request.stream, request.num_prompt_tokens)},
    )


def probe_params() -> Any:
    """Return vLLM's parameters for a probe: score the prompt without the cache; the sampled token
    is discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )  # fmt: skip


def prompt_logprobs(output: Any, tokens: np.ndarray) -> np.ndarray:
    """Return float32 [tokens - 1] from a probe's output."""
    rows = output.prompt_logprobs[1:]
    return np.array([row[int(token)].logprob for row, token in zip(rows, tokens[1:], strict=True)], np.float32)


def spans_of(starts: Sequence[tuple[int, int]], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Turn (version, tokens sampled before it) into (version, tokens sampled under it), without
    empty spans."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    return tuple((version, end - start) for (version, start), end in zip(starts, ends, strict=True) if end > start)
