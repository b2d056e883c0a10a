"""The cost of the update log: bytes for a million response tokens, and the learner's seconds for an
update with it and without.

*Consumes* the demo's model, and responses of heavy-tailed lengths cut into windows. *Produces* two
tables. The updates are the learner's own lines (``workers.learner.policy_update``), recorded by its
own recorder; with and without take turns.

Log-probs and values are drawn with all their bits random, as real ones nearly are, so that nothing
compresses that would not.

    python -m ops.bench.update_log --json bench-results/update_log.json"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ops.bench.table import interleaved_medians, show, write_json
from ops.ending import exit_code
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Claim, ClaimedUnit, ScoredChunk, Unit
from pipeline.training.update_log.folder import UPDATES_FOLDER
from pipeline.training.update_log.records import Origin
from protocol.codec import to_blob
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    ValueScore,
)  # fmt: skip
from workers.engines.build import build_training_backend
from workers.learner.policy_update import PolicyUpdate
from workers.learner.update_recorder import UpdateRecorder

ROOT = Path(__file__).resolve().parents[2]
BAR = 1.1
"""Promised seconds of an update with the log, over those without."""

CASES = (
    ("demo: DAPO, short", "dapo", 16, 13.0),
    ("DAPO, longer", "dapo", 512, 100.0),
    ("T-PPO windows", "tppo", 64, 100.0),
)
"""Name, algorithm, window, median response."""


def make_units(
    unit: Unit, *, has_critic: bool, window: int, median_length: float, vocabulary: int, seed: int
) -> list[ClaimedUnit]:
    """Draw 8 groups of 8 responses of log-normal lengths; every second one is right."""
    rng = np.random.default_rng(seed)
    groups: list[list[tuple[ScoredChunk, ...]]] = []
    for group in range(8):
        prompt = Prompt(
            prompt_id=f"train:{group}", tokens=rng.integers(2, vocabulary, 40).astype(np.int32), text="", answer="",
            verifier="arithmetic",
        )  # fmt: skip
        groups.append(
            [
                _response(rng, prompt, TrajectoryId("t", group, member), has_critic, window, median_length, vocabulary)
                for member in range(8)
            ]
        )
    if unit is Unit.CHUNK:
        chunks = [scored for members in groups for response in members for scored in response]
        return [ClaimedUnit(str(scored.chunk.id), ((scored,),)) for scored in chunks]
    return [ClaimedUnit(str(number), tuple(members)) for number, members in enumerate(groups)]


def _response(
    rng: np.random.Generator,
    prompt: Prompt,
    name: TrajectoryId,
    has_critic: bool,
    window: int,
    median_length: float,
    vocabulary: int,
) -> tuple[ScoredChunk, ...]:
    length = int(np.clip(rng.lognormal(np.log(median_length), 0.8), 2, 8 * median_length))
    tokens = rng.integers(2, vocabulary, length).astype(np.int32)
    made: list[ScoredChunk] = []
    for index, start in enumerate(range(0, length, window)):
        part = tokens[start : start + window]
        is_last = start + window >= length
        logprobs = -rng.exponential(0.5, part.size).astype(np.float32)
        scores: dict[Field, Score] = {
            Field.REFERENCE: ReferenceScore(logprobs=logprobs + rng.normal(0, 0.05, part.size).astype(np.float32)),
        }
        if has_critic:
            values = rng.normal(0, 0.5, part.size).astype(np.float32)
            scores[Field.VALUE] = ValueScore(values=values, value_version=3)
        if is_last:
            right = float(name.member % 2)
            scores[Field.REWARD] = RewardScore(reward=2 * right - 1, accuracy=right, parts={"correct": 2 * right - 1})
        chunk = TrajectoryChunk(
            id=ChunkId(name, index), prompt=prompt, context_tokens=tokens[:start], tokens=part,
            behavior_logprobs=logprobs, segments=(Segment(3, part.size),),
            finish_reason=FinishReason.STOP if is_last else FinishReason.WINDOW, worker="generator-0#1", created_s=1.0,
        )  # fmt: skip
        made.append(ScoredChunk(chunk, scores))
    return tuple(made)


def measure(name: str, algorithm: str, window: int, median_length: float, rounds: int) -> dict[str, Any]:
    """Measure one case."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.model_validate(
            {
                "run": {"name": "bench", "dir": folder},
                "model": {"path": ROOT / "ops" / "demo" / "tiny_model"},
                "data": {"train": ["none"]},
                "algorithm": {"name": algorithm, "group_size": 8, "groups_per_update": 8},
                "generation": {"window_tokens": window, "max_response_tokens": max(window, int(8 * median_length))},
                "reference": {"always": True},
            }
        )
        units = make_units(
            config.declaration.unit,
            has_critic=config.has_critic,
            window=window,
            median_length=median_length,
            vocabulary=30,
            seed=0,
        )
        backend = build_training_backend(config)
        updates = PolicyUpdate(config, backend)
        recorder = UpdateRecorder(config, config.run_dir, Incarnation(Role.LEARNER, "learner", 1), backend)
        recorder.begin(Origin.START_MODEL, None, 0)
        number = 0

        first_bytes = 0

        def update(*, is_recorded: bool) -> None:
            nonlocal number, first_bytes
            claim = Claim("c", number, tuple(unit.name for unit in units))
            if is_recorded:
                recorder.batch(claim, units, number + 1, number)
            prepared = updates.prepare(units)
            stepped = asyncio.run(updates.step(prepared.samples, policy_version=number, compute=_at_once))
            if is_recorded:
                recorder.outcome(prepared, stepped, number + 1, number + 1)
                number += 1
                first_bytes = first_bytes or _num_bytes(config)

        seconds = interleaved_medians(
            {"off": lambda: update(is_recorded=False), "on": lambda: update(is_recorded=True)}, rounds=rounds
        )
        # of updates, without the records at a segment's begin
        stored = _num_bytes(config) - first_bytes
        recorder.close()
        chunks = [scored for unit in units for response in unit.trajectories for scored in response]
        num_tokens = sum(scored.chunk.num_tokens for scored in chunks)
        blobs = sum(
            len(to_blob(scored.chunk)) + sum(len(to_blob(s)) for s in scored.scores.values()) for scored in chunks
        )
        return {
            "case": name,
            "tokens": num_tokens,
            "ledger_mb_per_million": blobs / num_tokens,
            "log_mb_per_million": stored / (number - 1) / num_tokens,
            "update_s_off": seconds["off"],
            "update_s_on": seconds["on"],
            "ratio": seconds["on"] / seconds["off"],
        }


def _num_bytes(config: RunConfig) -> int:
    return sum(path.stat().st_size for path in (config.run_dir / UPDATES_FOLDER).iterdir())


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case; return 1 when one is above the bar."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.update_log", description="Measure the update log's bytes and seconds."
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, of which the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [measure(*case, options.rounds) for case in CASES]
    columns = ("case", "tokens", "ledger MB/M tokens", "log MB/M tokens", "s off", "s on", "on / off")
    show(
        "Update log: 8 groups of 8 responses, the demo's model, one thread",
        columns,
        [list(r.values()) for r in results],
    )
    if options.json:
        write_json(options.json, {"bar": BAR, "results": results})
    slow = [row["case"] for row in results if row["ratio"] > BAR]
    if slow:
        print(f"above the bar of {BAR}: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
