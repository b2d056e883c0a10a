"""The life of a held trajectory, against a model of the ledger, the engine and the writers around
it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import EvaluationRequest, Lease
from protocol.errors import EngineError
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, Segment, TrajectoryChunk
from workers.engines.generation.seam import SampledWindow
from workers.generator.held_trajectories import Held, HeldTrajectories, Renewal, Stage

NUM_SLOTS = 3
PROMPT = Prompt(prompt_id="train:0", tokens=np.array([5, 9], np.int32), text="2+3=", answer="5", verifier="arithmetic")
TRAJECTORIES = [TrajectoryId("t", group, 0) for group in range(6)]
REASONS = [*[FinishReason.WINDOW] * 4, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]
"""Mostly the trajectory goes on."""


def lease_of(trajectory: TrajectoryId, index: int) -> Lease:
    """A lease after ``index`` chunks of one token each."""
    last = None
    if index:
        last = TrajectoryChunk(
            id=ChunkId(trajectory, index - 1),
            prompt=PROMPT,
            context_tokens=np.arange(index - 1, dtype=np.int32),
            tokens=np.array([index - 1], np.int32),
            behavior_logprobs=np.zeros(1, np.float32),
            segments=(Segment(0, 1),),
            finish_reason=FinishReason.WINDOW,
            response_text=None,
            worker="generator-1#1",
            created_s=0.0,
        )
    return Lease(trajectory, index, trajectory.group, last)


def window_of(trajectory: TrajectoryId, index: int, reason: FinishReason = FinishReason.WINDOW) -> SampledWindow:
    """The window ``index`` of a response whose tokens are their own positions."""
    return SampledWindow(trajectory, np.array([index], np.int32), np.zeros(1, np.float32), (Segment(0, 1),), reason)


@dataclass
class Under:
    """The model's record of a held trajectory's window that is under way."""

    index: int
    stage: Stage
    is_ended: bool = False


class Generation(RuleBasedStateMachine):
    """A generator's two loops in any interleaving, beside a ledger that may grant anything at any
    time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldTrajectories(NUM_SLOTS)
        self.model: dict[TrajectoryId, Under] = {}
        self.engine: dict[TrajectoryId, int] = {}
        self.queue: list[SampledWindow] = []
        self.writing: list[tuple[Held, SampledWindow, Under]] = []
        self.submitted = Counter[ChunkId]()
        self.taken = Counter[ChunkId]()

    @rule(trajectory=st.sampled_from(TRAJECTORIES), index=st.integers(0, 3))
    def lease(self, trajectory: TrajectoryId, index: int) -> None:
        """Grant a window: a new trajectory's, or of one that is held here already."""
        lease, under = lease_of(trajectory, index), self.model.get(trajectory)
        renewal = self.held.renewal(lease)
        if under is None:
            assert renewal is Renewal.NEW
        elif under.index == index:
            assert renewal is Renewal.UNDER_WAY
        elif under.stage in (Stage.SAMPLING, Stage.SAMPLED):
            assert renewal is Renewal.ELSEWHERE
            with pytest.raises(RuntimeError, match="expected LEASED or WRITING"):
                self.held.add(lease, PROMPT)
        else:
            assert renewal is Renewal.NEW
        if renewal is Renewal.NEW:
            self.held.add(lease, PROMPT)
            self.model[trajectory] = Under(index, Stage.LEASED)

    @precondition(lambda self: self.held.resumable)
    @rule()
    def submit_what_is_resumable(self) -> None:
        num_waiting = len(self.held.leased) - len(self.held.resumable)
        for held in self.held.resumable:
            submitted = self.held.submit(held.trajectory)
            assert held.trajectory not in self.engine, "the engine never has two windows of one trajectory"
            assert submitted.response_tokens.tolist() == list(range(submitted.next_index))
            self.engine[held.trajectory] = submitted.next_index
            self.model[held.trajectory].stage = Stage.SAMPLING
            self.submitted[ChunkId(held.trajectory, submitted.next_index)] += 1
        assert len(self.held.leased) == num_waiting and not self.held.resumable

    @precondition(lambda self: self.engine)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def end_a_window(self, data: st.DataObject, reason: FinishReason) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.engine)))
        index = self.engine.pop(trajectory)
        window = window_of(trajectory, index, reason)
        self.held.sampled(window)
        self.queue.append(window)
        self.model[trajectory].stage = Stage.SAMPLED
        self.model[trajectory].is_ended = reason.is_final

    @precondition(lambda self: self.queue)
    @rule()
    def take_a_window(self) -> None:
        window = self.queue.pop(0)
        held = self.held.start_writing(window.trajectory)
        assert held.next_index == window.tokens[0], "a writer has the trajectory of the window that it writes"
        self.taken[ChunkId(window.trajectory, held.next_index)] += 1
        under = self.model[window.trajectory]
        under.stage = Stage.WRITING
        self.writing.append((held, window, under))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), keeps_lease=st.sampled_from([True, True, True, False]))
    def end_a_write(self, data: st.DataObject, keeps_lease: bool) -> None:
        place = data.draw(st.integers(0, len(self.writing) - 1))
        held, window, under = self.writing.pop(place)
        # a newer lease of it may have come to a window of this index, too
        is_current = self.model.get(held.trajectory) is under
        is_final = window.finish_reason.is_final
        changed = self.held.leave(held) if is_final or not keeps_lease else self.held.extend(held, window.tokens)
        assert changed is is_current, "the outcome of a replaced window changes nothing"
        if not is_current:
            return
        if is_final or not keeps_lease:
            del self.model[held.trajectory]
        else:
            self.model[held.trajectory] = Under(held.next_index + 1, Stage.LEASED)

    @precondition(lambda self: self.held.leased)
    @rule(lets_go=st.sampled_from([False, False, False, True]))
    def let_go_what_is_leased(self, lets_go: bool) -> None:
        for held in self.held.leased if lets_go else ():
            assert self.held.leave(held)
            del self.model[held.trajectory]

    @invariant()
    def a_step_out_of_turn_is_refused(self) -> None:
        for trajectory in TRAJECTORIES:
            stage = self.model[trajectory].stage if trajectory in self.model else None
            if stage is not Stage.LEASED:
                with pytest.raises(RuntimeError, match="expected LEASED"):
                    self.held.submit(trajectory)
            if stage is not Stage.SAMPLING:
                with pytest.raises(EngineError, match="expected SAMPLING"):
                    self.held.sampled(window_of(trajectory, 0))
            if stage is not Stage.SAMPLED:
                with pytest.raises(RuntimeError, match="expected SAMPLED"):
                    self.held.start_writing(trajectory)

    @invariant()
    def each_held_trajectory_is_where_the_model_has_it(self) -> None:
        assert len(self.held) == len(self.model)
        for trajectory in TRAJECTORIES:
            held, under = self.held.get(trajectory), self.model.get(trajectory)
            assert (held is None) is (under is None)
            if held is not None and under is not None:
                assert (held.next_index, held.stage, held.is_ended) == (under.index, under.stage, under.is_ended)
                assert held.response_tokens.tolist() == list(range(held.next_index)), "its prefix is whole"

    @invariant()
    def no_window_is_lost_or_written_twice(self) -> None:
        queued = Counter(ChunkId(window.trajectory, int(window.tokens[0])) for window in self.queue)
        sampling = Counter(ChunkId(trajectory, index) for trajectory, index in self.engine.items())
        assert self.submitted == self.taken + queued + sampling

    @invariant()
    def the_engine_never_has_more_windows_than_slots(self) -> None:
        assert len(self.engine) <= NUM_SLOTS

    @invariant()
    def a_trajectory_takes_a_slot_until_its_last_window_is_sampled(self) -> None:
        assert self.held.num_free_slots == NUM_SLOTS - sum(not under.is_ended for under in self.model.values())


Generation.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestGeneration = Generation.TestCase


def test_a_resumable_trajectory_leased_anew_is_sampled_once_from_the_leases_place() -> None:
    trajectory, held = TRAJECTORIES[0], HeldTrajectories(NUM_SLOTS)
    held.add(lease_of(trajectory, 0), PROMPT)
    held.submit(trajectory)
    held.sampled(window_of(trajectory, 0))
    assert held.extend(held.start_writing(trajectory), np.array([0], np.int32))
    moved_on = lease_of(trajectory, 3)
    assert held.renewal(moved_on) is Renewal.NEW
    held.add(moved_on, PROMPT)
    assert [one.next_index for one in held.resumable] == [3]
    held.submit(trajectory)
    assert not held.resumable


def test_what_was_granted_first_is_resumed_first() -> None:
    held = HeldTrajectories(NUM_SLOTS)
    for trajectory in TRAJECTORIES[:3]:
        held.add(lease_of(trajectory, 0), PROMPT)
        held.submit(trajectory)
        held.sampled(window_of(trajectory, 0))
    for place in (2, 0, 1):
        held.extend(held.start_writing(TRAJECTORIES[place]), np.array([0], np.int32))
    assert [one.trajectory for one in held.resumable] == [TRAJECTORIES[place] for place in (2, 0, 1)]


def test_a_response_ends_by_the_settings_of_its_training_set_else_the_runs() -> None:
    sets = [
        {"name": "a", "train": ["x"], "stop_strings": ["Q:"], "max_response_tokens": 64},
        {"name": "b", "train": ["x"], "stop_strings": []},
        {"name": "c", "train": ["x"]},
    ]
    generation = {"stop_strings": ["END"], "max_response_tokens": 512}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"sets": sets}, "generation": generation})
    expected = {"a/b/1": (("Q:",), 64), "b/a/1": ((), 512), "c/1": (("END",), 512), "aa/1": (("END",), 512)}
    for prompt_id, (stop_strings, limit) in expected.items():
        prompt = msgspec.structs.replace(PROMPT, prompt_id=prompt_id)
        held = HeldTrajectories(NUM_SLOTS).add(lease_of(TRAJECTORIES[0], 1), prompt)
        request = held.request(config)
        assert (request.stop_strings, request.max_response_tokens) == (stop_strings, limit)
        assert held.stop_strings(config) == stop_strings
    asked = EvaluationRequest(0, 0, 1, 1, 0.0, stop_strings=("x",), max_response_tokens=7)
    lease = replace(lease_of(TRAJECTORIES[0], 0), evaluation=asked)
    request = HeldTrajectories(NUM_SLOTS).add(lease, msgspec.structs.replace(PROMPT, prompt_id="a/1")).request(config)
    assert (request.stop_strings, request.max_response_tokens) == (("x",), 7)
