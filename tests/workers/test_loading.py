"""Claims about the wait for a model to load: each worker reports path and size while it loads."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.learning import ValueSection
from pipeline.config.training import ModelSection, RewardModelSection, RewardSection
from pipeline.runtime.actor import Actor
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.generator.generator import Generator
from workers.learner.learner import Learner
from workers.scorers.reference import Reference
from workers.scorers.reward import Reward
from workers.scorers.value import Value


class _Stopped(Exception):
    """Enough was seen."""


async def _heartbeat_while(
    kind: type[Actor], function: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Heartbeat:
    """Return the worker's reports while its ``setup`` computes ``function``."""
    for name in ("policy", "frozen", "judge", "critic"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"\0" * 3_000_000)
    config = small_config(folder).model_copy(
        update={
            "model": ModelSection(path=folder / "policy", reference_path=folder / "frozen"),
            "reward": RewardSection(model=RewardModelSection(path=folder / "judge")),
            "value": ValueSection(path=folder / "critic"),
        }
    )
    module: Any = sys.modules[kind.__module__]
    if hasattr(module, "PromptSource"):
        monkeypatch.setattr(module, "load_text_tokenizer", lambda _: None)
        monkeypatch.setattr(module, "ledger_spec", lambda *_: make_spec())
        monkeypatch.setattr(module, "PromptSource", lambda *_: SimpleNamespace())
    seen: list[Heartbeat] = []
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            config, folder, kind.role, str(kind.role), tasks, MemoryRegistry(), zmq_transport(), RealClock()
        )

        def build(*_: object) -> None:
            seen.append(ctx.worker_state.heartbeat())
            raise _Stopped

        monkeypatch.setattr(function if "." in function else f"{kind.__module__}.{function}", build)
        actor = kind(ctx)
        with pytest.raises(_Stopped):
            await actor.setup()
        if hasattr(actor, "_folder"):
            actor._folder.close()  # pyright: ignore
        await ctx.cancel_spawned()
        ctx.close()
    return seen[0]


@pytest.mark.parametrize(
    ("kind", "function", "model"),
    [
        (Generator, "build_generation_engine", "policy"),
        (Learner, "workers.learner.restore.build_training_backend", "policy"),
        (Reference, "build_scoring_engine", "frozen"),
        (Value, "workers.scorers.value.build_value_engine", "critic"),
        (Reward, "build_reward_model", "judge"),
    ],
)
async def test_a_worker_says_which_model_it_loads_and_how_large_it_is(
    kind: type[Actor], function: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = await _heartbeat_while(kind, function, tmp_path, monkeypatch)
    assert (beat.waiting_for, beat.detail) == (WaitingFor.STARTING, f"loading {model}, 3 MB")


@pytest.mark.parametrize("kind", [Generator, Learner])
async def test_a_worker_that_reads_prompts_says_so(
    kind: type[Actor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = await _heartbeat_while(kind, "PromptSource", tmp_path, monkeypatch)
    assert (beat.waiting_for, beat.detail) == (WaitingFor.STARTING, "reading prompts")
