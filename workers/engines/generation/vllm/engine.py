"""The vLLM engine: windows, segments and endings around a sampling *core*, and its parity check.

    advance = feed (requests into free slots) -> core.step -> windows of what finished, again

Each wait for the core has a deadline.

**New weights** take effect between two tokens. With pause mode ``keep``, live windows continue
under them. With ``wait`` they finish first. With ``abort`` they are cut where they are, and their
trajectories are continued later.

With KV policy ``keep``, a live window keeps its keys and values, and a trajectory whose last window
was sampled here finds its cached blocks again. With ``recompute``, every live context is prefilled
again, and nothing cached before the update is used after it. Prefixes are shared through vLLM's
cache only among requests with the same *salt*, which names the policy version that they began
under.

**Parity.** Published weights carry a probe: a sequence and the learner's own log-probs of it. The
engine scores it after every update, before any token of the new version leaves. An engine that
disagrees is quarantined: it says so, keeps the old version's number, and refuses to continue."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from pipeline.process import work
from protocol.errors import Diverged, EngineDied, EngineError, ParityFailed
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment
from workers.engines.generation.seam import EngineStats, SampledWindow, WindowRequest
from workers.engines.generation.torch_weights import TorchWeights
from workers.engines.generation.vllm.core import Core, CoreRequest, CoreSample
from workers.engines.generation.windows import StopSearch, check_request, is_live_already, stop_search
from workers.engines.model.rng import stream_key
from workers.engines.model.weights_file import ParityProbe, PublishedWeights, fit_weights

if TYPE_CHECKING:
    from pipeline.data.tokenizer import TextTokenizer

TURN_S = 0.02
"""Longest wait per step for a core in the background."""
DRAIN_S = 600.0
"""Longest wait for live windows to end, in pause mode ``wait``."""
PROBE_S = 120.0

PauseMode = Literal["keep", "wait", "abort"]


class VllmEngine(TorchWeights):
    """A :class:`workers.engines.generation.seam.GenerationEngine`. Not thread-safe."""

    def __init__(
        self,
        core: Core,
        state: Mapping[str, torch.Tensor],
        *,
        num_slots: int,
        vocabulary: int,
        positions: int,
        stop_token_ids: Iterable[int] = (),
        kv_policy: Literal["keep", "recompute"] = "keep",
        pause: PauseMode = "keep",
        tolerance: float = 1e-3,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """Drive a core, whose weights are used only after the first ``load_weights``.

        ``state`` gives names and shapes, as ``state_dict(keep_vars=True)`` of transformers' model.
        ``tolerance`` is the largest mean difference to the learner's log-probs, in nats. Requests
        with stop strings need the tokenizer."""
        self._core = core
        self._state = state
        self._num_slots = num_slots
        self._vocabulary = vocabulary
        self._positions = positions
        self._stop = tuple(sorted(set(stop_token_ids)))
        self._kv_policy = kv_policy
        self._pause: PauseMode = pause
        self._tolerance = tolerance
        self._tokenizer = tokenizer
        self._searches: dict[TrajectoryId, StopSearch] = {}
        self._policy_version = -1
        self._waiting: deque[WindowRequest] = deque()
        self._live: dict[str, WindowRequest] = {}
        self._names: dict[TrajectoryId, str] = {}
        self._ready: list[SampledWindow] = []
        self._salts: dict[TrajectoryId, str] = {}
        self._numbers = itertools.count()
        self._nonce = secrets.token_hex(4)
        self._failure: EngineError | None = None
        self._num_sampled_tokens = self._num_prefill_tokens = 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def stats(self) -> EngineStats:
        """Return counters; tokens are counted when their window is finished."""
        return EngineStats(
            num_live=len(self._live) + len(self._waiting) + len(self._ready),
            num_decode_steps=self._core.num_steps(),
            num_sampled_tokens=self._num_sampled_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
        )

    def close(self) -> None:
        self._core.close()

    # -- requests --

    def unserved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Always empty: ``load_weights`` compares log-probs with the learner's."""
        del tensors
        return []

    def submit(self, request: WindowRequest) -> None:
        check_request(request, vocabulary=self._vocabulary, positions=self._positions)
        name = request.trajectory
        if name in self._names or any(waiting.trajectory == name for waiting in self._waiting):
            raise is_live_already(request)
        if request.stop_strings:
            self._searches[name] = stop_search(request, self._tokenizer)
        self._waiting.append(request)

    def forget(self, trajectory: TrajectoryId) -> None:
        self._waiting = deque(request for request in self._waiting if request.trajectory != trajectory)
        self._ready = [window for window in self._ready if window.trajectory != trajectory]
        self._salts.pop(trajectory, None)
        self._searches.pop(trajectory, None)
        name = self._names.pop(trajectory, None)
        if name is not None:
            del self._live[name]
            self._core.cut([name])

    def cut(self) -> list[SampledWindow]:
        self._waiting.clear()
        windows, self._ready = [*self._ready, *self._cut_live()], []
        self._searches.clear()
        return windows

    def _cut_live(self) -> list[SampledWindow]:
        windows = self._windows(self._core.cut(list(self._live))) if self._live else []
        for request in self._live.values():
            self._searches.pop(request.trajectory, None)
        self._live.clear()
        self._names.clear()
        return windows

    # -- computing --

    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Raises EngineError before the first weights, EngineDied when vLLM is dead or hangs (live
        trajectories continue elsewhere), and Diverged when log-probs are not finite."""
        if self._failure is not None:
            raise self._failure
        if self._policy_version < 0:
            raise EngineError("the engine was advanced before its first weights; call load_weights first")
        finished, self._ready = self._ready, []
        for _ in range(max_steps):
            self._feed()
            if not self._live:
                break
            finished += self._step()
            if finished and len(self._live) + len(self._waiting) < self._num_slots:
                break
        return finished

    def _feed(self) -> None:
        while self._waiting and len(self._live) < self._num_slots:
            request = self._waiting.popleft()
            name = f"{request.trajectory}/{next(self._numbers)}"
            used = request.response_tokens.size
            self._core.add(
                CoreRequest(
                    name=name,
                    context=np.concatenate([request.prompt_tokens, request.response_tokens]).astype(np.int32),
                    num_prompt_tokens=request.prompt_tokens.size,
                    max_tokens=min(request.window_tokens, request.max_response_tokens - used),
                    sampling=request.sampling,
                    stop_token_ids=self._stop,
                    stream=stream_key(request.seed, request.trajectory, request.sequence),
                    salt=self._salt(request.trajectory),
                )
            )
            self._live[name] = request
            self._names[request.trajectory] = name

    def _salt(self, trajectory: TrajectoryId) -> str:
        """With ``keep``, return the salt that a trajectory sampled here began with."""
        salt = f"{self._nonce}/{self._policy_version}"
        if self._kv_policy == "recompute":
            return salt
        salt = self._salts.pop(trajectory, salt)
        self._salts[trajectory] = salt
        # the oldest ones have continued elsewhere
        while len(self._salts) > 8 * self._num_slots:
            del self._salts[next(iter(self._salts))]
        return salt

    def _step(self) -> list[SampledWindow]:
        try:
            before = self._core.num_steps()
            windows = self._turn()
        except EngineDied as error:
            self._failure = error
            raise
        # a core that decodes on its own may have made no step
        if self._core.num_steps() != before:
            work.step()
        return windows

    def _turn(self) -> list[SampledWindow]:
        windows = self._windows(self._core.step(TURN_S))
        ended: list[str] = []
        for trajectory, search in self._searches.items():
            name = self._names.get(trajectory)
            if name is not None and search.feed(self._core.sampled(name, search.num_tokens)) is not None:
                ended.append(name)
        return [*windows, *self._windows(self._core.cut(ended))] if ended else windows

    def _windows(self, samples: Iterable[CoreSample]) -> list[SampledWindow]:
        windows: list[SampledWindow] = []
        for sample in samples:
            request = self._live.pop(sample.name)
            del self._names[request.trajectory]
            search = self._searches.pop(request.trajectory, None)
            # vLLM may have sampled beyond the end of the response
            end = search.feed(sample.tokens[search.num_tokens :].tolist()) if search is not None else None
            kept = sample if end is None else sample.up_to(end)
            windows.append(self._window(request, kept, is_stopped=end is not None))
        return windows

    def _window(self, request: WindowRequest, sample: CoreSample, *, is_stopped: bool) -> SampledWindow:
        if not np.isfinite(sample.logprobs).all():
            raise Diverged(
                f"policy version {sample.spans[-1][0]} gives log-probs that are not finite: training has diverged; lower "
                "learner.learning_rate, and resume from a checkpoint of an earlier version (remove the later ones)"
            )
        length = request.response_tokens.size + sample.tokens.size
        if is_stopped or (sample.is_over and sample.tokens[-1] in self._stop):
            reason = FinishReason.STOP
        elif sample.is_over and length >= request.max_response_tokens:
            reason = FinishReason.LENGTH
        else:
            reason = FinishReason.WINDOW
        if reason.is_final:
            self._salts.pop(request.trajectory, None)
        self._num_sampled_tokens += sample.tokens.size
        self._num_prefill_tokens += request.prompt_tokens.size + request.response_tokens.size - sample.num_cached_tokens
        return SampledWindow(
            trajectory=request.trajectory,
            tokens=sample.tokens,
            behavior_logprobs=sample.logprobs,
            segments=tuple(Segment(version, num) for version, num in sample.spans),
            finish_reason=reason,
        )

    # -- weights --

    def stage_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        if isinstance(tensors, PublishedWeights) and tensors.path is not None:
            self._core.stage(tensors.path, policy_version)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Raises WeightsRejected when the weights do not fit (the old ones stay), and ParityFailed
        when vLLM then computes other log-probs than the learner (the engine is quarantined)."""
        if self._failure is not None:
            raise self._failure
        chosen = fit_weights(self._state, tensors)
        path = tensors.path if isinstance(tensors, PublishedWeights) else None
        try:
            if self._pause == "wait":
                self._ready += self._finish_live()
            elif self._pause == "abort":
                self._ready += self._cut_live()
            self._core.load(
                PublishedWeights(chosen, path=path), policy_version, recompute=self._kv_policy == "recompute"
            )
            if isinstance(tensors, PublishedWeights) and tensors.probe is not None:
                self._check_parity(tensors.probe, policy_version)
        except (EngineDied, ParityFailed) as error:
            self._failure = error
            raise
        self._policy_version = policy_version

    def _finish_live(self) -> list[SampledWindow]:
        windows: list[SampledWindow] = []
        turns = 0
        while self._live:
            windows += self._turn()
            turns += 1
            if turns * TURN_S > DRAIN_S and not windows:
                raise EngineDied(f"no live window ended within {DRAIN_S:g} s; vLLM hangs: a new engine replaces it")
        return windows

    def _check_parity(self, probe: ParityProbe, policy_version: int) -> None:
        """Compare vLLM's log-probs with the learner's; keep samples that finish meanwhile."""
        scored, over = self._core.probe(probe.tokens, PROBE_S)
        difference = float(np.abs(scored - probe.logprobs).mean())
        if not difference <= self._tolerance:
            raise ParityFailed(
                f"with the weights of version {policy_version} vLLM's log-probs of the probe differ from the learner's by "
                f"{difference:.3g} nats per token, but at most {self._tolerance:g} is allowed: vLLM did not load every weight, "
                "or computes in a coarser type than generation.vllm.parity_tolerance was set for; no token of this version "
                "was kept"
            )
        self._ready += self._windows(over)
