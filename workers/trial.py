"""``headrace try``: the start model's responses to a run's first prompts, judged as the run would.

``python -m workers.trial CONFIG PROMPTS SAMPLES`` prints a ``pipeline.preflight.trial.Trial`` as
JSON. Prompts, engine, sampling and verifiers are built from the configuration as in generators and
reward workers, and a response is drawn from the same random stream as in the run's first groups."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.ledger.types import Lease
from pipeline.preflight.trial import Trial, TriedPrompt, TriedResponse
from pipeline.process.exit_codes import ExitCode
from pipeline.rewards.functions import score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import VerifierFailure, VerifierOutcome
from protocol.errors import HeadraceError
from protocol.ids import TrajectoryId
from protocol.trajectory import TrajectoryChunk
from workers.engines.build import build_generation_engine, build_reward_model, start_weights
from workers.generator.chunk_writer import chunk_of
from workers.generator.held_trajectories import Held
from workers.scorers.reward import response_of

_STEPS = 64
"""Decode steps per call of the engine."""


def try_here(config: RunConfig, *, num_prompts: int, num_samples: int) -> Trial:
    tokenizer = load_text_tokenizer(config.model.path)
    source = PromptSource(config, tokenizer)
    chunks = sample(
        config, source, tokenizer, num_prompts=min(num_prompts, source.num_prompts), num_samples=num_samples
    )
    scores: list[float | None] = [None] * len(chunks)
    if config.reward.model is not None:
        model = build_reward_model(config.reward.model)
        read = model.scores([(chunk.prompt, chunk.written_text or "") for chunk in chunks])
        scores = [score - config.reward.model.center for score in read]
    outcomes = asyncio.run(verdicts(config, chunks, scores))
    prompts: dict[int, TriedPrompt] = {}
    for chunk, score, outcome in zip(chunks, scores, outcomes, strict=True):
        prompt = chunk.prompt
        tried = prompts.setdefault(
            chunk.trajectory.group,
            TriedPrompt(
                prompt_id=prompt.prompt_id,
                text=tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=False),
                num_tokens=prompt.tokens.size,
                answer=prompt.answer,
                verifier=prompt.verifier,
                responses=[],
            ),
        )
        tried.responses.append(_tried(config, tokenizer, chunk, score, outcome))
    return Trial(model=str(config.model.path), temperature=config.generation.temperature, prompts=[*prompts.values()])


def sample(
    config: RunConfig, source: PromptSource, tokenizer: TextTokenizer, *, num_prompts: int, num_samples: int
) -> list[TrajectoryChunk]:
    """Return whole responses of the start model, in order of their prompts."""
    whole = config.generation.model_copy(update={"window_tokens": config.generation.max_response_tokens})
    config = config.model_copy(update={"generation": whole})
    weights = start_weights(config)
    engine = build_generation_engine(config)
    held: dict[TrajectoryId, Held] = {}
    try:
        engine.load_weights(weights, 0)
        for place in range(num_prompts):
            for member in range(num_samples):
                lease = Lease(TrajectoryId("t", place, member), 0, place, None)
                one = Held(lease, source.at(place), np.empty(0, np.int32), 0)
                held[lease.trajectory] = one
                engine.submit(one.request(config, source.responses))
        chunks: dict[TrajectoryId, TrajectoryChunk] = {}
        while len(chunks) < len(held):
            for window in engine.advance(_STEPS):
                one = held[window.trajectory]
                chunks[window.trajectory] = chunk_of(one, window, tokenizer, config, worker="trial")
        return [chunks[name] for name in held]
    finally:
        engine.close()


async def verdicts(
    config: RunConfig, chunks: Sequence[TrajectoryChunk], scores: Sequence[float | None]
) -> list[VerifierOutcome]:
    """Judge as a reward worker does: by each prompt's verifier, then by each function of the
    reward."""
    functions = config.reward.functions
    named = {chunk.prompt.verifier for chunk in chunks} | {function.verifier for function in functions.values()}
    async with VerifierPool(config.reward, configured=config.verifier_paths) as pool:
        await pool.start(sorted(named))
        responses = [response_of(chunk, score) for chunk, score in zip(chunks, scores, strict=True)]
        return await score_responses(pool, functions, responses, groups=[chunk.trajectory.group for chunk in chunks])


def _tried(
    config: RunConfig, tokenizer: TextTokenizer, chunk: TrajectoryChunk, score: float | None, outcome: VerifierOutcome
) -> TriedResponse:
    text = tokenizer.decode(chunk.tokens.tolist(), skip_special_tokens=False)
    size = {"num_tokens": chunk.response_length, "finish_reason": str(chunk.finish_reason)}
    if isinstance(outcome, VerifierFailure):
        last = next((line for line in reversed(outcome.error.splitlines()) if line.strip()), outcome.kind)
        return TriedResponse(text=text, reason=f"{outcome.kind}: {last.strip()}", **size)
    shaped = shape(
        config.reward,
        outcome,
        num_tokens=chunk.response_length,
        max_response_tokens=config.generation.max_response_tokens,
        finish_reason=chunk.finish_reason,
        model_part=None if score is None or config.reward.model is None else config.reward.model.weight * score,
    )
    return TriedResponse(
        text=text,
        accuracy=shaped.accuracy if outcome.judged else None,
        reward=shaped.reward,
        parts=dict(shaped.parts),
        masked=shaped.masked,
        reason=outcome.reason,
        **size,
    )


def main() -> ExitCode:
    path, num_prompts, num_samples = sys.argv[1:]
    try:
        trial = try_here(load_config([Path(path)]), num_prompts=int(num_prompts), num_samples=int(num_samples))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(f"{msgspec.json.encode(trial).decode()}\n")
    return ExitCode.OK
