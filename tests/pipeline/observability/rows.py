"""Rows of a run's history for tests, and the data of a page that was made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.observability.history import EvaluationRow, UpdateRow, ValueRow


def update_row(update: int, *, accuracy: float = 0.5, version: int | None = None) -> UpdateRow:
    return UpdateRow(
        update=update,
        policy_version=update if version is None else version,
        at_s=1000.0 + update,
        num_trajectories=64,
        num_response_tokens=640,
        num_trained_tokens=600,
        reward=0.0,
        accuracy=accuracy,
        response_length=10.0,
        staleness_mean=0.5,
        staleness_max=1,
        num_segments_mean=1.1,
        loss=0.1,
        grad_norm=1.0,
        learning_rate=1e-3,
        num_refused_steps=0,
        wait_s=0.25,
        logprob_s=0.25,
        step_s=0.25,
        publish_s=0.25,
        metrics={"entropy": 0.1},
    )


def evaluation_row(number: int, version: int, accuracy: float) -> EvaluationRow:
    return EvaluationRow(number, version, 1000.0, 256, 0, accuracy, 12.0, version, version)


def value_row(step: int) -> ValueRow:
    return ValueRow(
        step=step,
        value_version=step,
        at_s=1000.0 + step,
        num_trajectories=8,
        num_tokens=80,
        loss=0.2,
        explained_variance=0.1,
        mean_explained_variance=0.1,
        gate_open=step > 1,
        clip_fraction=0.0,
        value_mean=0.3,
        target_mean=0.4,
        grad_norm=1.0,
        learning_rate=1e-3,
        step_s=0.1,
    )


def answers_of(page: Path) -> dict[str, Any]:
    """Return what a report or a comparison holds, by address."""
    found = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', page.read_text(), re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])
