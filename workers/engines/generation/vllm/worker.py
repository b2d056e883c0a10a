# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Code that runs inside vLLM's workers: loads weights, and draws tokens from the trajectories'
random streams.

Calls arrive by name (``collective_rpc``), logits at every decode step. Each token is returned with
its log-prob under the distribution that it was drawn from.

vLLM seeds a generator per request and draws from it in order, so a trajectory that continues in
another request, batch or process would get other numbers. Therefore the sampler of vLLM's first
model runner is replaced by the local engine's (``workers.engines.generation.sampling``). Its number
for response position p depends only on (run seed, trajectory, p), so a trajectory continues
identically on every engine, as far as two kernels compute the same logits. Batches without any of
our rows (vLLM's warm-up, a benchmark's plain requests) are left to vLLM's sampler. A probe among
our rows is sampled like them, from its own stream.

vLLM's second model runner (some models on GPUs) samples in its own kernel, which is not replaced.
It derives its numbers from the request's seed and the position in the sequence, and every window of
a trajectory has the same seed. So a trajectory continues identically within vLLM, but with other
numbers than on the local engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from workers.engines.generation.sampling import Distributions, sample
from workers.engines.generation.seam import SamplingParams
from workers.engines.generation.vllm.journal import LogprobJournal
from workers.engines.generation.vllm.staging import Staging
from workers.engines.model.rng import uniforms
from workers.engines.model.weights_file import read_weights

STREAM = "headrace_stream"
"""Key in a request's ``extra_args``: (key of the random stream, number of prompt tokens)."""


class _Row(NamedTuple):
    stream: tuple[int, int] | None
    """Key of the random stream, number of prompt tokens; None for a request that is not ours."""
    sampling: SamplingParams


class StreamSampler(Sampler):
    """vLLM's sampler for batches without a stream; ours if any row has one."""

    def __init__(self, runner: Any) -> None:
        super().__init__("processed_logprobs")
        self._runner = runner
        self._rows: dict[str, _Row] = {}
        self._names: list[str] = []
        self._keys = np.empty(0, np.uint64)
        self._offsets = np.empty(0, np.int64)
        self._lines = np.empty(0, np.int64)
        self._distributions: Distributions | None = None
        self.journal: LogprobJournal | None = None
        """Where an engine in this process reads log-probs; None if vLLM reports them."""
        self.temperature = 1.0
        """For prompt log-probs; sampled tokens have their request's own."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any) -> SamplerOutput:
        batch = self._runner.input_batch
        self._look_at(batch.req_ids[: batch.num_reqs], logits)
        if self._distributions is None or logits.shape[0] != self._keys.size:
            return super().forward(logits, sampling_metadata, *args, **options)
        places = batch.num_tokens_no_spec[: self._keys.size]
        uniform = torch.from_numpy(uniforms(self._keys, places - self._offsets)).to(logits.device)
        outputs = sampling_metadata.output_token_ids
        tokens, logprobs = sample(
            logits, self._distributions, uniform, lambda row: self._context(row, outputs, int(places[row]))
        )
        if self.journal is not None:
            self.journal.write(self._lines, places, logprobs.numpy())
        chosen = tokens.to(torch.int32).unsqueeze(-1)
        if sampling_metadata.max_num_logprobs is None:
            return SamplerOutput(chosen, None)
        ranks = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        return SamplerOutput(chosen, LogprobsTensors(chosen, logprobs.unsqueeze(-1), ranks))

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probs [rows, vocabulary] at the probe's temperature."""
        return (logits.float() / self.temperature).log_softmax(dim=-1)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """Gather each given token's log-prob, without ranks, whose kernel would be compiled."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        ranks = torch.zeros(token_ids.shape[0], dtype=torch.int64, device=token_ids.device)
        return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)

    def _context(self, row: int, outputs: list[list[int]], length: int) -> tuple[np.ndarray, int]:
        """Return a row's whole context, and the size of its prompt. To vLLM an earlier response is
        part of the prompt. It keeps ``outputs`` only while a row has a penalty."""
        tokens = [*self._runner.requests[self._names[row]].prompt_token_ids, *outputs[row]]
        if len(tokens) != length or min(tokens) < 0:
            raise RuntimeError(
                f"vLLM reports {len(tokens)} tokens for {self._names[row]}, the smallest {min(tokens)}; penalties need all "
                f"{length}, none below 0: set the penalties to their defaults, or generation.engine to local"
            )
        return np.array(tokens), int(self._offsets[row])

    def _look_at(self, names: list[str], logits: torch.Tensor) -> None:
        """Collect the rows' streams and distributions, once for every change of the batch."""
        if names == self._names:
            return
        self._names = list(names)
        vocabulary = logits.shape[-1]
        # most rows were in the previous batch; each request is read once
        self._rows = {name: self._rows.get(name) or self._read(name, vocabulary) for name in names}
        rows = self._rows.values()
        self._distributions = None
        if all(row.stream is None for row in rows):
            return
        streams = [row.stream or (0, 0) for row in rows]
        if self.journal is not None:
            self._lines = self.journal.lines([name if row.stream else None for name, row in self._rows.items()])
        self._keys = np.array([stream[0] for stream in streams], np.uint64)
        self._offsets = np.array([stream[1] for stream in streams], np.int64)
        self._distributions = Distributions.of([row.sampling for row in rows], vocabulary, logits.device)

    def _read(self, name: str, vocabulary: int) -> _Row:
        params = self._runner.requests[name].sampling_params
        sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k if 0 < params.top_k < vocabulary else 0,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )
        return _Row((params.extra_args or {}).get(STREAM), sampling)


class WorkerExtension:
    """Methods that vLLM mixes into its worker class; called on all ranks at once."""

    model_runner: Any

    def headrace_begin(self, temperature: float) -> bool:
        """Take over sampling, and return whether that is possible. ``temperature`` is for prompts."""
        runner = self.model_runner
        if not (isinstance(getattr(runner, "sampler", None), Sampler) and hasattr(runner, "input_batch")):
            return False
        runner.sampler = StreamSampler(runner)
        runner.sampler.temperature = temperature
        return True

    def headrace_keep_logprobs(self) -> LogprobJournal | None:
        """Keep the log-probs of our tokens in a journal, and return it, for use in this process.

        None if the journal would wait for a device in every step, or steps overlap; vLLM then
        reports them."""
        runner = self.model_runner
        if torch.device(runner.device).type != "cpu" or getattr(runner, "use_async_scheduling", True):
            return None
        runner.sampler.journal = LogprobJournal(runner.max_model_len)
        return runner.sampler.journal

    def headrace_stage(self, path: str, policy_version: int) -> bool:
        """Start staging a version on this rank's device; return whether there is room."""
        return self._headrace_staging().start_reading(Path(path), policy_version)

    def headrace_is_staged(self) -> bool:
        return self._headrace_staging().is_over

    def headrace_load_file(self, path: str, policy_version: int) -> None:
        """Load a version from its staged tensors, else from its file; each rank takes its share."""
        staged = self._headrace_staging().pop(policy_version)
        self.headrace_load((staged or read_weights(Path(path))).items())

    def headrace_load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by Hugging Face name."""
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(tensors))
            repack_tied_head(self.model_runner.get_model())

    def _headrace_staging(self) -> Staging:
        # a mixin has no constructor
        if not hasattr(self, "_staging"):
            self._staging = Staging(torch.device(self.model_runner.device))
        return self._staging


def repack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output layer again.

    On a CPU vLLM keeps a packed copy of the output layer. A reload packs every layer whose weights
    arrived; a tied layer's never do (they are the embedding's), so its copy would silently stay
    old."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear") or not getattr(model.config, "tie_word_embeddings", False):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
