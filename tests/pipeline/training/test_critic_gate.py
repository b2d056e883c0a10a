"""Claims about when the policy may start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.learning import ValueSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS, CriticGate, opens, view_critic
from protocol.ids import Incarnation, Role

SETTINGS = ValueSection(min_explained_variance=0.1, explained_variance_steps=3, pretrain_steps=50)
CONFIG = RunConfig(model=ModelSection(path=Path("m")), data=DataSection(train=(Path("d"),)), value=SETTINGS)


@pytest.mark.parametrize(
    ("explained", "num_steps", "expected"),
    [
        ([], 0, False),
        # too few to be sure of
        ([0.9, 0.9], 2, False),
        ([0.1, 0.1, 0.1], 3, True),
        ([0.0, 0.1, 0.1], 3, False),
        # only the last three count
        ([-1.0, 0.1, 0.1, 0.2], 4, True),
        ([0.9, 0.9, -1.6], 3, False),
        ([0.0, 0.0, 0.0], 49, False),
        ([0.0, 0.0, 0.0], 50, True),
    ],
)
def test_the_gate_opens_for_a_good_critic_or_after_its_time(
    explained: list[float], num_steps: int, expected: bool
) -> None:
    assert opens(explained, num_steps=num_steps, settings=SETTINGS) is expected


def test_without_a_bound_even_a_perfect_critic_gets_all_its_steps() -> None:
    gate = CriticGate(ValueSection(pretrain_steps=50))
    assert not any(gate.observe(1.0, num_steps=step) for step in range(1, 50))
    assert gate.observe(1.0, num_steps=50)


def test_without_pretraining_the_gate_is_open_at_once() -> None:
    assert CriticGate(ValueSection(pretrain_steps=0)).is_open
    assert not CriticGate(SETTINGS).is_open


@given(st.lists(st.floats(-2.0, 1.0), max_size=60), st.integers(0, 60))
def test_the_gate_opens_once_and_for_good_and_a_restart_changes_nothing(explained: list[float], cut: int) -> None:
    whole, openings = CriticGate(SETTINGS), 0
    restarted = CriticGate(SETTINGS)
    for step, value in enumerate(explained, start=1):
        was_open = whole.is_open
        openings += whole.observe(value, num_steps=step)
        restarted.observe(value, num_steps=step)
        if step == cut:
            restarted = CriticGate(
                SETTINGS,
                is_open=restarted.is_open,
                explained_variances=restarted.explained_variances,
                num_steps=step,
            )
        assert whole.is_open >= was_open
        assert (restarted.is_open, restarted.mean) == (whole.is_open, whole.mean)
    assert openings == whole.is_open


def beat(counters: dict[str, float], *, silent_s: float = 1.0) -> Heartbeat:
    return Heartbeat(
        who=Incarnation(Role.VALUE, "value", 1),
        pid=1,
        host="here",
        at_s=100.0,
        started_s=0.0,
        progress=1,
        progress_at_s=100.0,
        waiting_for=WaitingFor.INPUT,
        counters=counters,
        silent_s=silent_s,
    )


def test_the_learner_is_told_how_far_the_critic_is() -> None:
    counters = {GATE_OPEN: 0.0, VALUE_STEPS: 3.0, EXPLAINED_VARIANCE: 0.0204}
    view = view_critic([beat(counters)], CONFIG)
    assert (view.is_open, view.is_live) == (False, True)
    assert view.detail == "critic: explained variance 0.02 of 0.1, step 3 of 50"
    assert view_critic([beat(counters | {GATE_OPEN: 1.0})], CONFIG).is_open


def test_a_value_worker_that_is_silent_or_not_there_is_named() -> None:
    nobody = view_critic([], CONFIG)
    assert not nobody.is_open and not nobody.is_live and "no heartbeat" in nobody.detail
    silent = view_critic([beat({GATE_OPEN: 0.0}, silent_s=12.0)], CONFIG)
    assert not silent.is_live and silent.detail == "the value worker: silent for 12 s"
    starting = view_critic([beat({})], CONFIG)
    assert not starting.is_open and starting.is_live and starting.detail == "the value worker to start"
