"""The local generation engine: continuous batching over slots, for any causal language model.

    advance = admit (revive retained rows, prefill new ones) -> decode one token per live row -> settle what has ended, again

A request waits for a free slot, and enters together with a few others or at most a few steps later.
A request that ends at its window leaves its cache row behind, so the trajectory's next window needs
no prefill unless another request took the slot in between.

New weights take effect between two tokens. With the KV policy ``keep``, later tokens attend to keys
and values of earlier weights; with ``recompute``, every live context is prefilled again first. In
both cases a token's log-prob is that of the distribution it was drawn from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from protocol.errors import Diverged, EngineError
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason
from workers.engines.generation.local.cache import SharedStep
from workers.engines.generation.local.forward import SlotForward, make_forward
from workers.engines.generation.local.lone import LoneForward
from workers.engines.generation.local.slots import Occupant, SlotTable
from workers.engines.generation.sampling import Distributions, sample
from workers.engines.generation.seam import EngineStats, SampledWindow, WindowRequest
from workers.engines.generation.torch_weights import TorchWeights
from workers.engines.generation.windows import StopSearch, check_request, is_live_already, stop_search
from workers.engines.model.loading import load_model, load_structure, resolve_device, resolve_dtype
from workers.engines.model.rng import uniforms

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.data.tokenizer import TextTokenizer


ADMIT_SHARE = 16
"""New requests enter once 1 / ADMIT_SHARE of the slots is free: any prefill costs about a step."""
ADMIT_PATIENCE = 4
"""Decode steps after which a waiting request enters any free slot."""


class LocalEngine(TorchWeights):
    """A :class:`workers.engines.generation.seam.GenerationEngine` in this process. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        stop_token_ids: Iterable[int] = (),
        kv_policy: Literal["keep", "recompute"] = "keep",
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """``model``'s own weights are not used; requests with stop strings need the tokenizer."""
        self._forward = make_forward(model, num_slots)
        self._slots = SlotTable(num_slots, self._forward.cache, self._forward.prompts)
        self._waiting: deque[WindowRequest] = deque()
        self._waiting_names: set[TrajectoryId] = set()
        self._steps_held = 0
        self._kv_policy = kv_policy
        self._tokenizer = tokenizer
        self._searches: dict[TrajectoryId, StopSearch] = {}
        self._must_recompute = False
        self.num_slots = num_slots
        self.policy_version = -1
        self._vocabulary = int(self._forward.config.vocab_size)
        self._is_stop = np.zeros(self._vocabulary, bool)
        self._is_stop[list(stop_token_ids)] = True
        self._distributions: Distributions | None = None
        self._shared: SharedStep | None = None
        self._num_decode_steps = self._num_sampled_tokens = self._num_prefill_tokens = 0

    @property
    def forward(self) -> SlotForward | LoneForward:
        return self._forward

    @property
    def cache_bytes(self) -> int:
        return self._forward.cache_bytes

    # -- requests --

    def submit(self, request: WindowRequest) -> None:
        positions = getattr(self._forward.config, "max_position_embeddings", None)
        check_request(request, positions=positions, vocabulary=self._vocabulary)
        held = self._slots.find(request.trajectory)
        if (held is not None and held.is_live) or request.trajectory in self._waiting_names:
            raise is_live_already(request)
        if request.stop_strings:
            self._searches[request.trajectory] = stop_search(request, self._tokenizer)
        self._waiting.append(request)
        self._waiting_names.add(request.trajectory)

    @torch.inference_mode()
    def forget(self, trajectory: TrajectoryId) -> None:
        self._searches.pop(trajectory, None)
        if trajectory in self._waiting_names:
            self._waiting_names.remove(trajectory)
            self._waiting = deque(request for request in self._waiting if request.trajectory != trajectory)
        held = self._slots.find(trajectory)
        if held is None:
            return
        if held.is_live:
            self._slots.end(held, retain=False)
            self._settle()
        else:
            self._slots.evict(held)
            self._distributions = None

    @torch.inference_mode()
    def cut(self) -> list[SampledWindow]:
        self._waiting.clear()
        self._waiting_names.clear()
        self._searches.clear()
        live = self._slots.live()
        lengths = self._slots.arrays.lengths
        windows = [self._window(o, FinishReason.WINDOW) for o in live if lengths[o.row] > o.start]
        for occupant in reversed(live):
            self._slots.end(occupant, retain=not self._must_recompute)
        self._settle()
        return windows

    def stats(self) -> EngineStats:
        num_live = self._slots.num_live + len(self._waiting)
        return EngineStats(num_live, self._num_decode_steps, self._num_sampled_tokens, self._num_prefill_tokens)

    def close(self) -> None: ...

    # -- weights --

    def stage_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Does nothing: this engine and its caller are one process."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self._forward.load_weights(tensors)
        self.policy_version = policy_version
        self._slots.outdate_prompts(recompute=self._kv_policy == "recompute")
        for occupant in self._slots.live():
            occupant.versions.append((int(self._slots.arrays.lengths[occupant.row]), policy_version))
        if self._kv_policy == "recompute":
            self._slots.evict_retained()
            self._distributions = None
            self._must_recompute = self._slots.num_live > 0

    def unserved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return self._forward.unserved(tensors)

    # -- computing --

    @torch.inference_mode()
    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Raises EngineError before the first weights, Diverged when logits are not finite."""
        if self.policy_version < 0:
            raise EngineError("the engine was advanced before its first weights; call load_weights first")
        finished: list[SampledWindow] = []
        for _ in range(max_steps):
            self._admit()
            if self._slots.num_live == 0:
                break
            finished += self._step()
            if finished and self._slots.num_live + len(self._waiting) < self.num_slots:
                break
        return finished

    def _admit(self) -> None:
        stale = self._slots.live() if self._must_recompute else []
        self._must_recompute = False
        entered = self._take_waiting()
        # after all rows have their places
        self._prefill([*stale, *entered])

    def _take_waiting(self) -> list[Occupant]:
        """Give waiting requests free slots, if it is time; return those to be prefilled."""
        free = self.num_slots - self._slots.num_live
        if not self._waiting or free == 0:
            self._steps_held = 0
            return []
        together = min(len(self._waiting), -(-self.num_slots // ADMIT_SHARE))
        if self._slots.num_live and free < together and self._steps_held < ADMIT_PATIENCE:
            self._steps_held += 1
            return []
        self._steps_held = 0
        # retained rows first: they cost nothing, and so none of them is evicted for a new request
        revived_rows: list[Occupant] = []
        for request in [r for r in self._waiting if self._slots.find(r.trajectory) is not None][:free]:
            revived = self._slots.revive(request, _context_of(request))
            if revived is not None:
                self._waiting.remove(request)
                revived_rows.append(revived)
        fresh: list[Occupant] = []
        while self._waiting and self._slots.num_live < self.num_slots:
            request = self._waiting.popleft()
            is_group = any(np.array_equal(other.prompt_tokens, request.prompt_tokens) for other in self._waiting)
            fresh.append(self._slots.admit(request, _context_of(request), is_group=is_group))
        for occupant in revived_rows + fresh:
            occupant.versions = [(occupant.start, self.policy_version)]
            self._waiting_names.remove(occupant.trajectory)
        self._distributions = None
        return fresh

    def _prefill(self, occupants: list[Occupant]) -> None:
        """Fill rows with their contexts: prompts are shared or copied from another row, all else is computed."""
        fresh: list[Occupant] = []
        for occupant in occupants:
            context, prompt = self._slots.context(occupant.row), occupant.request.prompt_tokens
            is_new = occupant.prompt is None and context.size == prompt.size > 1
            held = self._slots.row_of_prompt(prompt) if is_new else None
            # the state of a recurrent layer has no first tokens
            if held is None or not isinstance(self._forward, SlotForward):
                fresh.append(occupant)
            else:
                self._forward.copy_start(occupant.row, held, prompt.size - 1)
        if fresh:
            rows = [occupant.row for occupant in fresh]
            contexts = [self._slots.context(row) for row in rows]
            self._num_prefill_tokens += self._forward.prefill(contexts, rows, [occupant.prompt for occupant in fresh])
        for occupant in occupants:
            occupant.has_current_prompt = True

    def _step(self) -> list[SampledWindow]:
        """Sample one token for every live row; return the windows that end with it."""
        slots, n = self._slots, self._slots.num_live
        arrays, rows = slots.arrays, np.arange(slots.num_live)
        lengths = arrays.lengths[:n]
        if self._distributions is None:
            self._shared = self._forward.share([occupant.prompt for occupant in slots.live()])
        logits = self._forward.decode(arrays.tokens[rows, lengths - 1].astype(np.int64), lengths - 1, self._shared)
        if self._distributions is None:
            params = [occupant.request.sampling for occupant in slots.live()]
            self._distributions = Distributions.of(params, self._vocabulary, logits.device)
        uniform = torch.from_numpy(uniforms(arrays.keys[:n], lengths - arrays.offsets[:n])).to(logits.device)
        chosen, chosen_logprobs = sample(logits, self._distributions, uniform, self._context)
        tokens, logprobs = chosen.cpu().numpy(), chosen_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise Diverged(
                f"policy version {self.policy_version} gives logits that are not finite: training has diverged; lower "
                "learner.learning_rate, and resume from a checkpoint of an earlier version (remove the later ones)"
            )
        arrays.tokens[rows, lengths] = tokens
        arrays.logprobs[rows, lengths] = logprobs
        lengths += 1
        self._num_decode_steps += 1
        self._num_sampled_tokens += n
        stopped = self._is_stop[tokens] | self._complete_stop_strings(tokens)
        over = stopped | (lengths == arrays.ends[:n])
        return self._finish(np.flatnonzero(over), stopped) if over.any() else []

    def _complete_stop_strings(self, tokens: np.ndarray) -> np.ndarray:
        stopped = np.zeros(tokens.size, bool)
        if self._searches:
            for occupant in self._slots.live():
                search = self._searches.get(occupant.trajectory)
                stopped[occupant.row] = search is not None and search.feed([int(tokens[occupant.row])]) is not None
        return stopped

    def _context(self, row: int) -> tuple[np.ndarray, int]:
        return self._slots.context(row), int(self._slots.arrays.offsets[row])

    def _finish(self, rows: np.ndarray, stopped: np.ndarray) -> list[SampledWindow]:
        ending: list[Occupant] = []
        windows: list[SampledWindow] = []
        for row in rows.tolist():
            occupant = self._slots.occupants[row]
            assert occupant is not None, "live rows are occupied"
            request, length = occupant.request, int(self._slots.arrays.lengths[row])
            if stopped[row]:
                reason = FinishReason.STOP
            elif length - request.prompt_tokens.size >= request.max_response_tokens:
                reason = FinishReason.LENGTH
            else:
                reason = FinishReason.WINDOW
            windows.append(self._window(occupant, reason))
            ending.append(occupant)
            self._searches.pop(occupant.trajectory, None)
        for occupant, window in zip(ending, windows, strict=True):
            self._slots.end(occupant, retain=not window.finish_reason.is_final)
        self._settle()
        return windows

    def _window(self, occupant: Occupant, reason: FinishReason) -> SampledWindow:
        arrays = self._slots.arrays
        length = int(arrays.lengths[occupant.row])
        return SampledWindow(
            trajectory=occupant.trajectory,
            tokens=arrays.tokens[occupant.row, occupant.start : length].copy(),
            behavior_logprobs=arrays.logprobs[occupant.row, occupant.start : length].copy(),
            segments=occupant.segments(length),
            finish_reason=reason,
        )

    def _settle(self) -> None:
        self._slots.settle()
        self._distributions = None


def _context_of(request: WindowRequest) -> np.ndarray:
    return np.concatenate([request.prompt_tokens, request.response_tokens]).astype(np.int32)


def build_local(config: RunConfig, model_path: Path) -> LocalEngine:
    """Build an engine around a folder's model. Raises DataError, ConfigError or EngineError."""
    generation = config.generation
    device = resolve_device(generation.device)
    if device.type == "cpu":
        torch.set_num_threads(generation.threads)
    # on a joined host the folder has no weights; they come with the learner's first version
    load = load_model if any(model_path.glob("*.safetensors")) else load_structure
    model = load(model_path, resolve_dtype(config.types.generator), device)
    tokenizer = load_text_tokenizer(model_path)
    return LocalEngine(
        model,
        num_slots=generation.num_slots,
        stop_token_ids=end_tokens(model_path, tokenizer, generation.stop_token_ids),
        kv_policy=generation.kv_policy,
        tokenizer=tokenizer,
    )
