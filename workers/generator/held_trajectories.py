"""The trajectories that a generator holds, each as a state machine.

A held trajectory is in one stage, and at most one window of it is in progress::

      hold               submit               sampled              take
    --------->  LEASED  --------->  SAMPLING ---------> SAMPLED  ---------> WRITING ----> leave
                  ^                                                            |
                  +------------------ extend: the lease goes on ---------------+

Invariants:

    one window    the engine never has two windows of one trajectory
    one writer    each window that the engine returns is taken once
    slots         a trajectory that has begun here keeps its slot, and thereby its KV cache, until its last
                  window is sampled; one that was leased ahead waits for a slot
    one lease     a lease that comes back replaces a trajectory that is LEASED or WRITING; the outcome of the
                  replaced window then changes nothing here"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from pipeline.config.data_sets import DataSetSection
from pipeline.config.schema import RunConfig
from pipeline.data.responses import RecordedResponses
from pipeline.ledger.types import EvaluationRequest, Lease
from protocol.errors import EngineError
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, GivenSpan, Prompt, TurnRequest
from workers.engines.generation.seam import SampledWindow, SamplingParams, WindowRequest


class Stage(StrEnum):
    LEASED = "leased"
    """Granted by a new lease, or by the answer to the last chunk; the engine can continue it."""
    SAMPLING = "sampling"
    SAMPLED = "sampled"
    """Out of the engine, but not taken by a writer yet."""
    WRITING = "writing"
    """On its way to the ledger, and then to the scorers."""


class Renewal(StrEnum):
    """What a granted lease means for the trajectories that are held already."""

    NEW = "new"
    """Nothing of this window is in progress here: hold it."""
    UNDER_WAY = "under_way"
    """This very window is in progress here: nothing to do."""
    ELSEWHERE = "elsewhere"
    """Another window is not written yet, and the ledger will refuse it: give the lease back."""


@dataclass(frozen=True, slots=True)
class Held:
    lease: Lease
    prompt: Prompt
    response_tokens: np.ndarray
    next_index: int
    stage: Stage = Stage.LEASED
    is_ended: bool = False
    """Whether the last window is sampled, so that the trajectory takes no slot of the engine."""
    granted_s: float = 0.0
    """When its next window was granted, on the generator's monotonic clock."""
    submitted_s: float = 0.0
    """When the engine got it, likewise."""
    given: tuple[GivenSpan, ...] = ()
    """The environment's tokens in ``response_tokens``."""
    asked: TurnRequest | None = None
    """``Turn.asks`` of the environment's last turn; None before the first."""

    @classmethod
    def of(cls, lease: Lease, prompt: Prompt, *, granted_s: float = 0.0) -> Held:
        """Return a leased trajectory after its last chunk and the environment's answer to that."""
        last, turn = lease.last_chunk, lease.turn
        if last is None:
            return cls(lease, prompt, np.empty(0, np.int32), lease.next_index, granted_s=granted_s)
        tokens, given = last.context_after(turn)
        asked = last.asked
        if turn is not None:
            asked = turn.asks
            if last.is_opening or turn.replaces:
                prompt = msgspec.structs.replace(prompt, tokens=turn.tokens, text=turn.text)
        return cls(
            lease,
            prompt,
            tokens,
            lease.next_index,
            granted_s=granted_s,
            given=given,
            asked=None if isinstance(asked, msgspec.UnsetType) else asked,
        )

    @property
    def turn_start(self) -> int:
        """Index in ``response_tokens`` of the first token after the environment's; 0 without an environment."""
        return max((span.start + span.num_tokens for span in self.given), default=0)

    @property
    def has_begun(self) -> bool:
        """Whether a window of it was sampled under this lease."""
        return self.next_index > self.lease.next_index

    @property
    def trajectory(self) -> TrajectoryId:
        return self.lease.trajectory

    def stop_strings(self, config: RunConfig) -> tuple[str, ...]:
        """Return the strings that end the response or the turn: the environment's, the data set's, or the run's."""
        if config.has_environment:
            return self.asked.stop_strings if self.asked else ()
        own = self._own(config)
        return config.generation.stop_strings if own is None or own.stop_strings is None else own.stop_strings

    def _own(self, config: RunConfig) -> EvaluationRequest | DataSetSection | None:
        data = config.data
        return self.lease.evaluation or (data.set_of(self.prompt.prompt_id) if data.sets else None)

    def request(self, config: RunConfig, responses: RecordedResponses | None = None) -> WindowRequest:
        """Return the request for the next window, with the run's or the evaluation's sampling.

        With recorded ``responses`` a training request carries its response."""
        generation, evaluation, own = config.generation, self.lease.evaluation, self._own(config)
        of = generation if evaluation is None else evaluation
        sampling = SamplingParams(
            temperature=of.temperature,
            top_p=of.top_p,
            top_k=of.top_k,
            min_p=of.min_p,
            repetition_penalty=of.repetition_penalty,
            presence_penalty=of.presence_penalty,
            frequency_penalty=of.frequency_penalty,
        )
        longest = (own and own.max_response_tokens) or generation.max_response_tokens
        if config.has_environment:
            # a prompt that took the place of the context may be longer than one of the data
            longest = min(longest, config.data.max_prompt_tokens + longest - self.prompt.tokens.size)
            if self.asked and self.asked.max_tokens:
                longest = min(longest, self.turn_start + self.asked.max_tokens)
        return WindowRequest(
            trajectory=self.trajectory,
            prompt_tokens=self.prompt.tokens,
            response_tokens=self.response_tokens,
            window_tokens=longest if self.asked and self.asked.whole else generation.window_tokens,
            max_response_tokens=longest,
            sampling=sampling,
            seed=config.run.seed,
            stop_strings=self.stop_strings(config),
            text_start=self.turn_start,
            sequence=self.asked.sequence if self.asked else 0,
            recorded=responses.at(self.prompt.prompt_id) if responses is not None and evaluation is None else None,
        )


class HeldTrajectories:
    """The trajectories that one generator holds, in the order in which their windows were granted."""

    def __init__(self, num_slots: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._num_slots, self._monotonic = num_slots, monotonic
        self._held: dict[TrajectoryId, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, trajectory: TrajectoryId) -> Held | None:
        return self._held.get(trajectory)

    @property
    def since_s(self) -> float | None:
        """When the oldest window in progress was granted; None if there is none."""
        return next((held.granted_s for held in self._held.values()), None)

    @property
    def num_free_slots(self) -> int:
        """Slots of the engine without a trajectory; negative for those that are leased ahead."""
        return self._num_slots - sum(not held.is_ended for held in self._held.values())

    @property
    def leased(self) -> list[Held]:
        """The LEASED trajectories, oldest grant first."""
        return [held for held in self._held.values() if held.stage is Stage.LEASED]

    @property
    def resumable(self) -> list[Held]:
        """The LEASED trajectories that have a slot, oldest grant first."""
        num_ahead = max(0, -self.num_free_slots)
        waiting = [held for held in self.leased if not held.has_begun]
        ahead = {held.trajectory for held in waiting[len(waiting) - num_ahead :]}
        return [held for held in self.leased if held.trajectory not in ahead]

    def renewal(self, lease: Lease) -> Renewal:
        """Return what a granted lease means here; one released by hand may come back at once."""
        held = self._held.get(lease.trajectory)
        if held is None:
            return Renewal.NEW
        if held.next_index == lease.next_index:
            return Renewal.UNDER_WAY
        return Renewal.ELSEWHERE if held.stage in (Stage.SAMPLING, Stage.SAMPLED) else Renewal.NEW

    def add(self, lease: Lease, prompt: Prompt) -> Held:
        """Hold a leased trajectory as LEASED, replacing one that is LEASED or WRITING."""
        before = self._held.pop(lease.trajectory, None)
        if before is not None and before.stage in (Stage.SAMPLING, Stage.SAMPLED):
            self._held[lease.trajectory] = before
            raise RuntimeError(_impossible(lease.trajectory, before, "LEASED or WRITING", "check `renewal` first"))
        held = self._held[lease.trajectory] = Held.of(lease, prompt, granted_s=self._monotonic())
        return held

    def submit(self, trajectory: TrajectoryId) -> Held:
        """Return a trajectory for the engine's next window; LEASED becomes SAMPLING."""
        held = self._held.get(trajectory)
        if held is None or held.stage is not Stage.LEASED:
            raise RuntimeError(_impossible(trajectory, held, "LEASED", "submit what is resumable"))
        return self._move(held, Stage.SAMPLING, submitted_s=self._monotonic())

    def sampled(self, window: SampledWindow) -> None:
        """SAMPLING becomes SAMPLED. Raises EngineError for a window that was not submitted."""
        held = self._held.get(window.trajectory)
        if held is None or held.stage is not Stage.SAMPLING:
            raise EngineError(_impossible(window.trajectory, held, "SAMPLING", "the engine returned it unasked"))
        reason = window.finish_reason
        self._move(held, Stage.SAMPLED, is_ended=held.is_ended or reason.is_final or reason is FinishReason.TURN)

    def start_writing(self, trajectory: TrajectoryId) -> Held:
        """Hand a sampled window's trajectory to a writer; SAMPLED becomes WRITING."""
        held = self._held.get(trajectory)
        if held is None or held.stage is not Stage.SAMPLED:
            raise RuntimeError(_impossible(trajectory, held, "SAMPLED", "take each window once"))
        return self._move(held, Stage.WRITING)

    def extend(self, writing: Held, tokens: np.ndarray) -> bool:
        """Continue after the written ``tokens``; WRITING becomes LEASED.

        Returns False if a newer lease has replaced the trajectory."""
        if self._held.get(writing.trajectory) is not writing:
            return False
        del self._held[writing.trajectory]
        self._held[writing.trajectory] = replace(
            writing,
            response_tokens=np.concatenate([writing.response_tokens, tokens]),
            next_index=writing.next_index + 1,
            stage=Stage.LEASED,
            is_ended=False,
            granted_s=self._monotonic(),
        )
        return True

    def leave(self, held: Held) -> bool:
        """Return False if the trajectory has changed since, or a newer lease has replaced it."""
        if self._held.get(held.trajectory) is not held:
            return False
        del self._held[held.trajectory]
        return True

    def _move(self, held: Held, stage: Stage, **changes: Any) -> Held:
        moved = self._held[held.trajectory] = replace(held, stage=stage, **changes)
        return moved


def _impossible(trajectory: TrajectoryId, held: Held | None, expected: str, action: str) -> str:
    stage = "not held" if held is None else held.stage.name
    return f"trajectory {trajectory} is {stage}; expected {expected}: {action}"
