"""Claims about ``headrace samples``: responses of a run, while it goes on, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.observability.samples import SAMPLES_NAME, ResponseSample, response_samples


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run without a server, whose learner has made nine updates."""
    (tmp_path / "config.toml").touch()
    for update in range(1, 10):
        for reward in (-1.0, 1.0):
            sample = ResponseSample(
                update=update,
                policy_version=update + 2,
                trajectory=f"t.{update}.0",
                prompt="What is 2+2?\nShort, please.",
                answer="4",
                verifier="math",
                response=f"response {update}",
                num_tokens=1234,
                finish_reason="length",
                versions=(update, update + 1),
                reward=reward,
                accuracy=float(reward > 0),
                masked=True,
            )
            response_samples(tmp_path).append(sample)
    return tmp_path


def _samples(*words: object) -> str:
    done = CliRunner().invoke(headrace, ["samples", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_newest_update_is_shown_with_verdict_reward_and_texts(run_dir: Path) -> None:
    assert _samples(run_dir).splitlines()[8:] == [
        "update 9 (made version 11)  t.9.0  right",
        "  reward +1.00, 1,234 tokens, cut at the limit, masked as over-long, sampled by",
        "  version 9 to 10",
        "  prompt   What is 2+2?",
        "           Short, please.",
        "  response response 9",
        "  answer   4",
    ]
    assert _samples(run_dir).count("wrong") == 1


def test_more_updates_or_an_older_one_can_be_asked_for(run_dir: Path) -> None:
    last = _samples(run_dir, "--last", 3)
    assert [n for n in range(1, 10) if f"response {n}" in last] == [7, 8, 9]
    one = _samples(run_dir, "--update", 4)
    assert [n for n in range(1, 10) if f"response {n}" in one] == [4]
    assert [sample["update"] for sample in json.loads(_samples(run_dir, "--update", 400, "--json"))] == [9, 9]


def test_a_run_without_any_says_so(run_dir: Path) -> None:
    (run_dir / SAMPLES_NAME).unlink()
    assert _samples(run_dir) == f"no samples in {run_dir}: no update yet, or samples.per_update is 0\n"
