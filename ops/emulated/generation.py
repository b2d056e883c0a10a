"""The emulated generation engine: continuous batching over slots, without a model.

Tokens and lengths of the windows are known beforehand (``ops.emulated.law``). Each ``advance`` sleeps for the
rest of the time that its steps would take.

A decode step costs ``a + b * live slots`` seconds. A context that has lost its slot costs a prefill for each of
its tokens, as on a real engine; a trajectory that returns while its slot is free costs none. Steps in which
nothing can end are taken together, so that dozens of such engines fit on a core. Temperature, top-k and top-p
change nothing."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ops.emulated.journal import SamplingJournal
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.pace import Pace
from ops.emulated.weights import check_tensors, view_weights
from pipeline.weights.tensorfile import Publication
from protocol.errors import EngineError, WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason
from workers.engines.generation.seam import EngineStats, SampledWindow, WindowRequest
from workers.engines.generation.windows import check_request, is_live_already, segments


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Costs in seconds."""

    decode_base_s: float = 0.0
    """a: for a decode step"""
    decode_slot_s: float = 0.0
    """b: for each live slot in a decode step"""
    prefill_token_s: float = 0.0
    weights_load_s: float = 0.0


@dataclass(slots=True)
class _Slot:
    """A live request. Positions are counted in response tokens."""

    request: WindowRequest
    length: int
    """Where the response would end by itself."""
    end: int
    """Where this window ends."""
    place: int
    """The position to sample next."""
    versions: list[tuple[int, int]]
    """(position, policy version): from there on, tokens are of that version."""

    @property
    def start(self) -> int:
        """Where this window began."""
        return self.request.response_tokens.size


class EmulatedEngine:
    """A :class:`workers.engines.generation.seam.GenerationEngine` of samples drawn beforehand."""

    def __init__(
        self,
        *,
        num_slots: int,
        lengths: LengthLaw,
        tokens: TokenLaw,
        vocabulary: int,
        positions: int | None = None,
        costs: EngineCosts | None = None,
        num_weights: int = 1,
        journal: SamplingJournal | None = None,
    ) -> None:
        """Make an engine without weights, for contexts of up to ``positions`` tokens (None: any). ``journal``
        receives each turn's samples before they are returned."""
        self.num_slots = num_slots
        self._lengths = lengths
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._positions = positions
        self._costs = costs or EngineCosts()
        self._num_weights = num_weights
        self._journal = journal
        self._pace = Pace()
        self.policy_version = -1
        self._live: dict[TrajectoryId, _Slot] = {}
        self._waiting: dict[TrajectoryId, WindowRequest] = {}
        self._order: deque[TrajectoryId] = deque()
        self._kept: OrderedDict[TrajectoryId, np.ndarray] = OrderedDict()
        """Contexts that are still in a free slot, least recently used first."""
        self._num_decode_steps = self._num_sampled_tokens = self._num_prefill_tokens = 0

    def view_weights(self, data: np.ndarray, path: Path) -> Mapping[str, Any]:
        del path
        return view_weights(data)

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        """Refuse an adapter: emulated weights have only whole versions."""
        del adapter, base, dtype
        raise WeightsRejected(
            f"an adapter on weights with digest {base_digest} was published, expected emulated weights; learner and "
            "generators must be emulated alike"
        )

    def stage_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Do nothing: weights are used where they lie."""

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Take new weights between two tokens. If they do not fit, raises WeightsRejected and changes nothing."""
        check_tensors(tensors, self._num_weights)
        self._pace.spend(self._costs.weights_load_s)
        self.policy_version = policy_version
        for slot in self._live.values():
            slot.versions.append((slot.place, policy_version))

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return nothing: it computes with no weights."""
        del tensors
        return []

    def submit(self, request: WindowRequest) -> None:
        check_request(request, positions=self._positions, vocabulary=self._vocabulary)
        if request.trajectory in self._live or request.trajectory in self._waiting:
            raise is_live_already(request)
        self._waiting[request.trajectory] = request
        self._order.append(request.trajectory)

    def advance(self, max_steps: int) -> list[SampledWindow]:
        if self.policy_version < 0:
            raise EngineError("the engine was advanced before its first weights; call load_weights first")
        started = time.monotonic()
        finished: list[SampledWindow] = []
        seconds, left = 0.0, max_steps
        while left > 0:
            seconds += self._admit() * self._costs.prefill_token_s
            if not self._live:
                break
            steps = min(left, *(slot.end - slot.place for slot in self._live.values()))
            seconds += steps * (self._costs.decode_base_s + self._costs.decode_slot_s * len(self._live))
            left -= steps
            self._num_decode_steps += steps
            self._num_sampled_tokens += steps * len(self._live)
            for slot in self._live.values():
                slot.place += steps
                if self._journal is not None:
                    self._journal.note(slot.request.trajectory, slot.place - steps, slot.place)
            finished += [self._end(slot) for slot in list(self._live.values()) if slot.place == slot.end]
            if finished and len(self._live) + len(self._waiting) < self.num_slots:
                break
        if self._journal is not None:
            self._journal.flush()
        self._pace.spend(seconds - (time.monotonic() - started))
        return finished

    def cut(self) -> list[SampledWindow]:
        self._waiting.clear()
        self._order.clear()
        windows = [self._window(slot, FinishReason.WINDOW) for slot in self._live.values() if slot.place > slot.start]
        for window in windows:
            self._keep(self._live[window.trajectory], window)
        self._live.clear()
        return windows

    def forget(self, trajectory: TrajectoryId) -> None:
        if self._waiting.pop(trajectory, None) is not None:
            self._order.remove(trajectory)
        self._live.pop(trajectory, None)
        self._kept.pop(trajectory, None)

    def close(self) -> None:
        """Do nothing: there is only this process."""

    def stats(self) -> EngineStats:
        num_live = len(self._live) + len(self._waiting)
        return EngineStats(num_live, self._num_decode_steps, self._num_sampled_tokens, self._num_prefill_tokens)

    def _admit(self) -> int:
        """Give free slots to waiting requests, in order; return the number of tokens to prefill."""
        before = self._num_prefill_tokens
        while self._order and len(self._live) < self.num_slots:
            name = self._order.popleft()
            request = self._waiting.pop(name)
            context = np.concatenate([request.prompt_tokens, request.response_tokens])
            kept = self._kept.pop(name, None)
            if kept is None or not np.array_equal(kept, context):
                # the last token is decoded, not prefilled
                self._num_prefill_tokens += context.size - 1
            start = request.response_tokens.size
            length = self._lengths.end_after(request.seed, name, start)
            end = min(start + request.window_tokens, request.max_response_tokens)
            if self._tokens.stop is not None:
                end = min(end, length)
            self._live[name] = _Slot(request, length, end, start, [(start, self.policy_version)])
            while len(self._kept) > self.num_slots - len(self._live):
                self._kept.popitem(last=False)
        return self._num_prefill_tokens - before

    def _end(self, slot: _Slot) -> SampledWindow:
        if slot.end == slot.length and self._tokens.stop is not None:
            reason = FinishReason.STOP
        elif slot.end >= slot.request.max_response_tokens:
            reason = FinishReason.LENGTH
        else:
            reason = FinishReason.WINDOW
        window = self._window(slot, reason)
        del self._live[slot.request.trajectory]
        if not reason.is_final:
            self._keep(slot, window)
        return window

    def _keep(self, slot: _Slot, window: SampledWindow) -> None:
        request = slot.request
        context = np.concatenate([request.prompt_tokens, request.response_tokens, window.tokens])
        self._kept[request.trajectory] = context
        while len(self._kept) > self.num_slots:
            self._kept.popitem(last=False)

    def _window(self, slot: _Slot, reason: FinishReason) -> SampledWindow:
        request, begin, end = slot.request, slot.start, slot.place
        return SampledWindow(
            trajectory=request.trajectory,
            tokens=self._tokens.tokens(request.seed, request.trajectory, begin, end, length=slot.length),
            behavior_logprobs=self._tokens.logprobs(request.seed, request.trajectory, begin, end),
            segments=segments(slot.versions, end),
            finish_reason=reason,
        )
