"""Where a generator with ``swap = window`` takes new weights: between windows, and it begins
nothing meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.ledger.types import Unit
from pipeline.weights.store import WeightsStore
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, Prompt
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.generation.seam import SamplingParams, WindowRequest
from workers.generator.generator import Generator

LEARNER = Incarnation(Role.LEARNER, "learner", 1)
PROMPT = Prompt(prompt_id="train:0", tokens=np.array([5, 9], np.int32), text="2+3=", answer="5", verifier="arithmetic")


class _OnePrompt:
    """A stream of the same prompt."""

    responses = None

    def at(self, position: int) -> Prompt:
        del position
        return PROMPT


@pytest.mark.parametrize("swap", ["window", "token"])
async def test_new_weights_wait_for_the_end_of_live_windows_only_with_swap_window(
    tmp_path: Path, swap: Literal["window", "token"]
) -> None:
    config = small_config(tmp_path)
    generation = config.generation.model_copy(
        update={"swap": swap, "engine": "ops.emulated.build:generation", "steps_per_turn": 3}
    )
    config = config.model_copy(update={"generation": generation})
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry = MemoryRegistry(clock)
        ctx = await context_of(config, tmp_path, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), clock)
        await ctx.ledger.open(make_spec(Unit.CHUNK, fields=frozenset({Field.REWARD}), eta=2, group_size=1))
        await ctx.ledger.advance(LEARNER, 0)
        generator = Generator(ctx)
        engine = EmulatedEngine(
            num_slots=4,
            lengths=LengthLaw("constant", median_tokens=6.0, tail=1.0),
            tokens=TokenLaw.of(32, {1}),
            vocabulary=32,
            positions=4096,
            num_weights=8,
        )
        generator._assemble(cast("Any", _OnePrompt()), cast("Any", None), engine, ())
        engine.load_weights({TENSOR: make_tensor("00", 8)}, 0)
        engine.submit(_request(TrajectoryId("t", 0, 0)))
        engine.advance(1)

        learner = await registry.register(Role.LEARNER, "learner")
        store = WeightsStore(tmp_path / "weights", keep=2, max_part_bytes=1 << 20)
        stored = store.publish(1, publish_tensors([(TENSOR, make_tensor("01", 8))]))
        await registry.announce_weights(learner, store.announcement(stored, endpoint=""))

        taker = generator._taker
        await taker.poll()
        assert taker.has_newer
        before = engine.stats().num_decode_steps
        generator._sample()
        turn = engine.stats().num_decode_steps - before
        assert turn == (1 if swap == "token" else 3), "only a swap that may happen now cuts a turn short"
        generator._tally.close()
        await generator._swap_weights()
        if swap == "token":
            assert engine.policy_version == 1
        else:
            assert engine.policy_version == 0
            await generator._lease_and_resume()
            assert not generator._held, "a trajectory begun now would put the swap off"
            windows = []
            while not windows:
                windows = engine.advance(8)
            assert {segment.policy_version for segment in windows[0].segments} == {0}
            await generator._swap_weights()
            assert engine.policy_version == 1
            await generator._lease_and_resume()
            assert generator._held, "after the swap it leases again"
        taker.close()
        ctx.close()


def _request(trajectory: TrajectoryId) -> WindowRequest:
    return WindowRequest(
        trajectory=trajectory,
        prompt_tokens=np.array([5, 9], np.int32),
        response_tokens=np.empty(0, np.int32),
        window_tokens=16,
        max_response_tokens=16,
        sampling=SamplingParams(1.0),
        seed=0,
    )
