"""A generator's requests to its engine, its writes and its messages: exactly, window by window,
with a run's own settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workers.generator.generator
from pipeline.config.learning import algorithm_settings
from pipeline.config.runtime import GenerationSection, RunSection, WireSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import EvaluationRequest
from pipeline.runtime.clock import RealClock
from protocol.channel import Mailbox
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.trajectory import FinishReason, TrajectoryChunk
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import LEARNER
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from tests.workers.recording import STOP, RecordingGeneration, sampled_logprobs
from workers.engines.generation.seam import SampledWindow, SamplingParams
from workers.generator.generator import Generator

MODEL = Path(__file__).resolve().parents[3] / "ops" / "demo" / "tiny_model"
WINDOW, LIMIT, SEED = 4, 11, 23
TRAINING = [TrajectoryId("t", group, member) for group in range(2) for member in range(2)]
EVALUATION = [TrajectoryId("e0", prompt, sample) for prompt in range(2) for sample in range(2)]
SCORERS = (Role.REWARD, Role.REFERENCE, Role.VALUE)


TRAINED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
}
EVALUATED: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.6,
    "top_k": 3,
    "min_p": 0.4,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.8,
}

STOP_STRINGS = ("+-", "never")
ENDED: dict[str, Any] = {"stop_strings": ("ab", "cd"), "max_response_tokens": LIMIT - 1}
"""Of the evaluation."""


def response(trajectory: TrajectoryId) -> list[int]:
    """Even members end by themselves within their third window; odd ones never do."""
    tokens = [10 + (7 * trajectory.group + 3 * trajectory.member + place) % 20 for place in range(LIMIT + 5)]
    return [*tokens[:9], STOP] if trajectory.member % 2 == 0 else tokens


def config_of(folder: Path) -> RunConfig:
    for name, numbers in (("train", (12, 34)), ("held-out", (91, 56, 78))):
        rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "run": RunSection(name="glue", dir=folder, seed=SEED),
        "model": ModelSection(path=MODEL),
        "data": DataSection(
            train=(folder / "train.jsonl",), evaluation=(folder / "held-out.jsonl",), epochs=1, shuffle=False
        ),
        "algorithm": algorithm_settings(name="vapo", group_size=2, groups_per_update=2, kl_coefficient=0.1),
        # set directly, without the other settings that a run file may need beside it
        "generation": GenerationSection(window_tokens=WINDOW, max_response_tokens=LIMIT).model_copy(
            update={**TRAINED, "stop_strings": STOP_STRINGS}
        ),
        "wire": WireSection(send_timeout_s=5.0),
    }
    return small_config(folder).model_copy(update=sections)


@dataclass
class Sampled:
    """The outcome of a generator's life."""

    engine: RecordingGeneration
    source: PromptSource
    received: dict[Role, dict[ChunkId, TrajectoryChunk]]
    """By the role whose mailbox it came to."""


@pytest.fixture
async def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Let a generator sample all prompts and an evaluation on an engine that records."""
    config, loop, finals = config_of(tmp_path), asyncio.get_running_loop(), []

    def note(window: SampledWindow) -> None:
        finals.extend([window] if window.finish_reason.is_final else [])
        if len(finals) == len(TRAINING) + len(EVALUATION):
            loop.call_soon_threadsafe(ctx.draining.set)

    engine = RecordingGeneration(response, on_window=note)
    monkeypatch.setattr(workers.generator.generator, "build_generation_engine", lambda _: engine)
    registry = MemoryRegistry(RealClock())
    mailboxes: dict[Role, Mailbox] = {}
    async with asyncio.TaskGroup() as tasks:
        for role in SCORERS:
            mailboxes[role] = zmq_transport(role, high_water_mark=64).mailbox(f"ipc://{tmp_path}/{role}.sock")
            await registry.set_endpoint(await registry.register(role, f"{role}-0"), mailboxes[role].endpoint)
        ctx = await context_of(
            *(config, tmp_path, Role.GENERATOR, "generator-0", tasks),
            *(registry, zmq_transport(high_water_mark=64), RealClock()),
        )
        generator = Generator(ctx)
        await generator.setup()
        asked = EvaluationRequest(0, 0, num_prompts=2, samples_per_prompt=2, first_prompt=1, **EVALUATED, **ENDED)
        await ctx.ledger.request_evaluation(LEARNER, asked)
        async with asyncio.timeout(30.0):
            await generator.run()
            await generator.drain()
        await ctx.cancel_spawned()
        received = {role: await everything(mailbox, role) for role, mailbox in mailboxes.items()}
        await generator.teardown()
        ctx.close()
    return Sampled(engine, PromptSource(config, load_text_tokenizer(MODEL)), received)


async def everything(mailbox: Mailbox, role: Role) -> dict[ChunkId, TrajectoryChunk]:
    """Wait for as many chunks as a role is to get, then look for one too many."""
    num_expected = len(TRAINING) + len(EVALUATION) if role is Role.REWARD else 3 * len(TRAINING)
    found: dict[ChunkId, TrajectoryChunk] = {}
    while delivery := await mailbox.receive(timeout_s=5.0 if len(found) < num_expected else 0.05):
        assert isinstance(delivery.message, TrajectoryChunk)
        found[delivery.message.id] = delivery.message
    return found


def whole(trajectory: TrajectoryId) -> list[int]:
    return response(trajectory)[:LIMIT]


def starts(trajectory: TrajectoryId) -> Sequence[int]:
    return range(0, len(whole(trajectory)), WINDOW)


async def test_every_window_request_has_its_prompt_its_prefix_and_the_runs_sampling(sampled: Sampled) -> None:
    for trajectory in TRAINING:
        requests = sampled.engine.of(trajectory)
        assert [request.response_tokens.tolist() for request in requests] == [
            whole(trajectory)[:start] for start in starts(trajectory)
        ]
        for request in requests:
            assert request.sampling == SamplingParams(**TRAINED)
            assert request.stop_strings == STOP_STRINGS
            assert (request.window_tokens, request.max_response_tokens, request.seed) == (WINDOW, LIMIT, SEED)
            assert request.prompt_tokens.tolist() == sampled.source.at(trajectory.group).tokens.tolist()


async def test_evaluation_is_sampled_from_held_out_prompts_at_the_evaluations_own_sampling(sampled: Sampled) -> None:
    held_out = [sampled.source.evaluation_at(1 + number).tokens.tolist() for number in range(2)]
    assert not [tokens for tokens in held_out if tokens in [sampled.source.at(n).tokens.tolist() for n in range(2)]]
    for trajectory in EVALUATION:
        requests = sampled.engine.of(trajectory)
        assert [request.response_tokens.tolist() for request in requests] == [
            whole(trajectory)[:start] for start in starts(trajectory)
        ]
        for request in requests:
            assert request.sampling == SamplingParams(**EVALUATED)
            assert {name: getattr(request, name) for name in ENDED} == ENDED
            assert (request.window_tokens, request.seed) == (WINDOW, SEED)
            assert request.prompt_tokens.tolist() == held_out[trajectory.group]
    assert len(sampled.engine.requests) == 3 * (len(TRAINING) + len(EVALUATION)), "each window once"


async def test_chunks_hold_what_was_sampled_after_the_prefix_that_it_was_sampled_after(sampled: Sampled) -> None:
    tokenizer = load_text_tokenizer(MODEL)
    for trajectory in TRAINING:
        tokens = whole(trajectory)
        for index, start in enumerate(starts(trajectory)):
            chunk = sampled.received[Role.VALUE][ChunkId(trajectory, index)]
            end = min(start + WINDOW, len(tokens))
            assert chunk.prompt.tokens.tolist() == sampled.source.at(trajectory.group).tokens.tolist()
            assert chunk.context_tokens.tolist() == tokens[:start]
            assert chunk.tokens.tolist() == tokens[start:end]
            np.testing.assert_array_equal(chunk.behavior_logprobs, sampled_logprobs(start, end))
            assert [(s.policy_version, s.num_tokens) for s in chunk.segments] == [(0, end - start)]
            if end < len(tokens):
                assert (chunk.finish_reason, chunk.response_text) == (FinishReason.WINDOW, None)
            else:
                ended = FinishReason.STOP if trajectory.member % 2 == 0 else FinishReason.LENGTH
                assert chunk.finish_reason is ended
                if trajectory == TRAINING[0]:
                    assert tokenizer.decode(tokens).startswith("789+-=")
                    assert chunk.response_text == "789+-", "up to its stop string"
                else:
                    assert chunk.response_text == tokenizer.decode(tokens)
                    has_string = "+-" in tokenizer.decode(tokens)
                    assert has_string is (trajectory == TRAINING[1]), "cut at the limit, it is whole"


async def test_an_evaluations_text_ends_with_its_own_stop_string(sampled: Sampled) -> None:
    texts = {chunk.trajectory: chunk.response_text for chunk in sampled.received[Role.REWARD].values()}
    assert texts[EVALUATION[0]] == "789+-=ab"
    assert texts[EVALUATION[2]] == "bcd"


async def test_scorers_get_what_they_score_and_no_more(sampled: Sampled) -> None:
    """Reward needs whole responses, of evaluation too; reference and value every window of
    training, and none of evaluation."""
    training = {ChunkId(trajectory, index) for trajectory in TRAINING for index in range(3)}
    assert set(sampled.received[Role.VALUE]) == set(sampled.received[Role.REFERENCE]) == training
    assert set(sampled.received[Role.REWARD]) == {ChunkId(trajectory, 2) for trajectory in TRAINING + EVALUATION}
