# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The code inside vLLM's workers: it takes weights, and draws tokens from trajectories' streams.

Calls arrive by name (``collective_rpc``), logits at every decode step. Each token comes with its
log-prob under the distribution that it was drawn from.

vLLM seeds a generator for each request and draws from it in order. A trajectory that goes on in
another request, batch or process would draw other numbers. So the sampler of vLLM's first model
runner is replaced by that of the local engine (``workers.engines.generation.sampling``,
``streams``). The number for response position p is a function of (run seed, trajectory, p) alone.
So a trajectory goes on identically on every engine, as far as two kernels compute the same logits.
Batches in which no row is ours (vLLM's own warm-up, a benchmark's plain requests) are left to
vLLM's sampler. A probe's row among ours is sampled as ours are, from a stream of its own.

vLLM's second model runner (some models on GPUs) samples in a kernel of its own, which is not
replaced. It keys its numbers by the request's seed and the position in the sequence, and every
window of a trajectory has the same seed. So a trajectory goes on identically within vLLM, with
other numbers than the local engine's."""

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
"""In a request's ``extra_args``: (key of the random stream, number of prompt tokens)."""


class _Row(NamedTuple):
    """The sampling parameters of a request's row."""

    stream: tuple[int, int] | None
    """Key of the random stream, number of prompt tokens; None for a request that is not ours."""
    sampling: SamplingParams


class StreamSampler(Sampler):
    """vLLM's sampler for batches without a stream; ours for those in which a row has one."""

    def __init__(self, runner: Any) -> None:
        """Sample for the rows of ``runner.input_batch``."""
        super().__init__("processed_logprobs")
        self._runner = runner
        self._rows: dict[str, _Row] = {}
        self._names: list[str] = []
        self._keys = np.empty(0, np.uint64)
        self._offsets = np.empty(0, np.int64)
        self._lines = np.empty(0, np.int64)
        self._distributions: Distributions | None = None
        self.journal: LogprobJournal | None = None
        """Where an engine in this process reads log-probs; None when vLLM is to report them."""
        self.temperature = 1.0
        """Of prompt log-probs; sampled ones have their request's own."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any) -> SamplerOutput:
        """Sample one token per row of ``logits`` [rows, vocabulary]."""
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
        """Gather each given token's log-prob, without ranks: their kernel would be compiled."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        ranks = torch.zeros(token_ids.shape[0], dtype=torch.int64, device=token_ids.device)
        return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)

    def _context(self, row: int, outputs: list[list[int]], length: int) -> tuple[np.ndarray, int]:
        """Return a row's whole context, and the size of its prompt.

        To vLLM an earlier response is a part of the prompt. It keeps ``outputs`` while a row has a
        penalty."""
        tokens = [*self._runner.requests[self._names[row]].prompt_token_ids, *outputs[row]]
        if len(tokens) != length or min(tokens) < 0:
            raise RuntimeError(
                f"vLLM reports {len(tokens)} tokens of {self._names[row]}, the least {min(tokens)}; expected {length} from 0 "
                "on, which penalties count: set the penalties to their defaults, or generation.engine to local"
            )
        return np.array(tokens), int(self._offsets[row])

    def _look_at(self, names: list[str], logits: torch.Tensor) -> None:
        """Gather the rows' streams and distributions, once for every change of the batch."""
        if names == self._names:
            return
        self._names = list(names)
        vocabulary = logits.shape[-1]
        # most of a batch was in the one before: a request is read once
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
    """Methods that vLLM mixes into its worker class; called on every rank at once."""

    model_runner: Any

    def headrace_begin(self, temperature: float) -> bool:
        """Take over sampling; return whether that is possible. ``temperature`` is for prompts."""
        runner = self.model_runner
        if not (isinstance(getattr(runner, "sampler", None), Sampler) and hasattr(runner, "input_batch")):
            return False
        runner.sampler = StreamSampler(runner)
        runner.sampler.temperature = temperature
        return True

    def headrace_keep_logprobs(self) -> LogprobJournal | None:
        """Keep log-probs of tokens with a stream here from now on; return where, for this process.

        None where that waits for a device in every step, or steps overlap: then vLLM reports them.
        """
        runner = self.model_runner
        if torch.device(runner.device).type != "cpu" or getattr(runner, "use_async_scheduling", True):
            return None
        runner.sampler.journal = LogprobJournal(runner.max_model_len)
        return runner.sampler.journal

    def headrace_stage(self, path: str, policy_version: int) -> bool:
        """Begin to bring a version to this rank's device; return whether there is room for it."""
        return self._headrace_staging().start_reading(Path(path), policy_version)

    def headrace_is_staged(self) -> bool:
        """Whether the staging has ended."""
        return self._headrace_staging().is_over

    def headrace_load_file(self, path: str, policy_version: int) -> None:
        """Take a version: its staged tensors, else its file, of which each rank has its share."""
        staged = self._headrace_staging().pop(policy_version)
        self.headrace_load((staged or read_weights(Path(path))).items())

    def headrace_load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take weights by their Hugging Face names. They were checked against the model before."""
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(tensors))
            repack_tied_head(self.model_runner.get_model())

    def _headrace_staging(self) -> Staging:
        # a mixin has no constructor of its own
        if not hasattr(self, "_staging"):
            self._staging = Staging(torch.device(self.model_runner.device))
        return self._staging


def repack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output layer again.

    On a CPU vLLM keeps a packed copy of the output layer. A reload packs every layer whose weights
    came; a tied layer's never come (they are the embedding's), so its copy would silently stay old.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear") or not getattr(model.config, "tie_word_embeddings", False):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
