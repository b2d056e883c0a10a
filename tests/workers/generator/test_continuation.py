"""A trajectory whose generator dies goes on elsewhere, with the same tokens, and its cost is
counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.torch import load_file

from pipeline.config.training import ModelSection
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.observability.regenerated_tokens import SampledTokenCounts, in_words, read_regenerated
from protocol.codec import from_blob
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Prompt, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.build import build_generation_engine
from workers.generator.generator import Generator

MODEL = Path(__file__).resolve().parents[3] / "ops" / "demo" / "tiny_model"
MEMBERS = [TrajectoryId("t", 0, member) for member in range(4)]
WINDOW = 4


class _OnePrompt:
    """A stream of the same prompt."""

    responses = None

    def __init__(self, tokens: list[int]) -> None:
        self._prompt = Prompt(
            prompt_id="train:0",
            tokens=np.array(tokens, np.int32),
            text="12+34=",
            answer="46",
            verifier="arithmetic",
        )

    def at(self, position: int) -> Prompt:
        del position
        return self._prompt


class Ledger:
    """A ledger whose clock is driven by hand, and the generators that come to it one
    after another."""

    def __init__(self, run_dir: Path, tasks: asyncio.TaskGroup) -> None:
        run_dir.mkdir()
        self.run_dir, self._tasks, self.now = run_dir, tasks, 0.0
        self._registry = MemoryRegistry(ManualClock())
        self.ledger = MemoryLedger(lambda _: 1, lambda: self.now)
        config = small_config(run_dir)
        generation = config.generation.model_copy(
            update={"window_tokens": WINDOW, "max_response_tokens": 24, "steps_per_turn": 3, "num_slots": 4}
        )
        self.config = config.model_copy(update={"generation": generation, "model": ModelSection(path=MODEL)})

    async def generator(self, name: str) -> Generator:
        ctx = await context_of(
            *(self.config, self.run_dir, Role.GENERATOR, name, self._tasks),
            *(self._registry, zmq_transport(), ManualClock()),
        )
        ctx.ledger = self.ledger
        generator = Generator(ctx)
        engine = build_generation_engine(self.config)
        engine.load_weights(load_file(MODEL / "model.safetensors"), 0)
        source = _OnePrompt([5, 6, 7, 8])
        generator._assemble(cast("Any", source), load_text_tokenizer(MODEL), engine, ())
        return generator

    async def decode(self, generator: Generator, turns: int) -> None:
        """Lease, decode and write for some turns, then stop where it is, as a killed
        process does."""
        for _ in range(turns):
            await generator._lease_and_resume()
            for window in generator._sample():
                generator._held.sampled(window)
                await generator._writer.write(window)
        generator._taker.close()
        generator.ctx.close()
        generator._tally.close()

    def response(self, member: TrajectoryId) -> tuple[np.ndarray, np.ndarray]:
        """Return a member's tokens and their behaviour log-probs as the ledger has them."""
        stored = self.ledger.state
        blobs = [stored.chunks[ChunkId(member, index)].blob for index in range(stored.trajectories[member].next)]
        chunks = [from_blob(blob, TrajectoryChunk) for blob in blobs]
        return np.concatenate([c.tokens for c in chunks]), np.concatenate([c.behavior_logprobs for c in chunks])

    @property
    def is_finished(self) -> bool:
        return all(self.ledger.state.trajectories[member].final for member in MEMBERS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("turns", [[1, 200], [2, 3, 1, 200], [3, 2, 2, 2, 200]])
async def test_a_trajectory_continues_identically_elsewhere_and_resamples_a_window_at_most(
    tmp_path: Path, turns: list[int]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        alone = Ledger(tmp_path / "alone", tasks)
        await alone.ledger.open(make_spec(group_size=4, num_prompts=1, eta=0))
        await alone.decode(await alone.generator("generator-0"), 200)
        assert alone.is_finished

        shared = Ledger(tmp_path / "shared", tasks)
        await shared.ledger.open(make_spec(group_size=4, num_prompts=1, eta=0))
        for number, length in enumerate(turns):
            await shared.decode(await shared.generator(f"generator-{number}"), length)
            # its lease ends
            shared.now += 11.0

        assert shared.is_finished
        for member in MEMBERS:
            tokens, logprobs = shared.response(member)
            expected, expected_logprobs = alone.response(member)
            np.testing.assert_array_equal(tokens, expected)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)

        audit = await shared.ledger.audit()
        rows = read_regenerated(shared.run_dir, audit.tokens_stored, (), window_tokens=WINDOW)
        assert all(row.num_unwritten <= row.limit for row in rows)
        again = sum(row.num_again for row in rows)
        assert again > 0
        assert sum(row.num_sampled for row in rows) == again + (await alone.ledger.audit()).tokens.admitted
        assert f"{again:,} of" in in_words(rows)


def test_a_living_generators_tokens_are_under_way_and_a_drained_ones_are_all_stored(tmp_path: Path) -> None:
    for epoch, sampled in ((1, 50), (2, 70)):
        tally = SampledTokenCounts(tmp_path, Incarnation(Role.GENERATOR, "host-b.generator-0", epoch))
        tally.write(num_sampled=sampled, num_refused=0, num_held=3)
        tally.close()
    stored = {"host-b.generator-0#1": 50, "host-b.generator-0#2": 40}
    drained, living = read_regenerated(tmp_path, stored, {"host-b.generator-0#2"}, window_tokens=16)
    assert (drained.num_again, living.num_again, living.num_unwritten, living.limit) == (0, 0, 30, 48)
    [_, killed] = read_regenerated(tmp_path, stored, (), window_tokens=16)
    assert killed.num_again == 30
