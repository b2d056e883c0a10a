"""``headrace try``: the start model's responses to a run's first prompts, judged as the run would.

``python -m workers.trial CONFIG PROMPTS SAMPLES`` prints a ``pipeline.preflight.trial.Trial`` as
JSON. Prompts, engine, sampling and verifiers are built from the configuration as in generators and
reward workers, and a response is drawn from the same random stream as in the run's first groups."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.environments.processes import EnvironmentPool
from pipeline.environments.turns import TurnMaker
from pipeline.ledger.types import Lease
from pipeline.preflight.trial import Trial, TriedPrompt, TriedResponse
from pipeline.process.exit_codes import ExitCode
from pipeline.rewards.functions import score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import VerifierFailure, VerifierOutcome
from protocol.errors import EnvironmentFailed, HeadraceError
from protocol.ids import TrajectoryId
from protocol.trajectory import Prompt, TrajectoryChunk
from workers.engines.build import build_generation_engine, build_reward_model, start_weights
from workers.engines.generation.seam import GenerationEngine, SampledWindow
from workers.generator.chunk_writer import chunk_of, opening_window
from workers.generator.held_trajectories import Held
from workers.scorers.reward import response_of, shaped_reward, told_verdict

_NAME: Final = "trial"
_STEPS = 64
"""Decode steps per call of the engine."""


def try_here(config: RunConfig, *, num_prompts: int, num_samples: int) -> Trial:
    tokenizer = load_text_tokenizer(config.model.path)
    source = PromptSource(config, tokenizer)
    sampled = asyncio.run(
        sample(config, source, tokenizer, num_prompts=min(num_prompts, source.num_prompts), num_samples=num_samples)
    )
    chunks = [one for one in sampled if isinstance(one, TrajectoryChunk)]
    scores: list[float | None] = [None] * len(chunks)
    if config.reward.model is not None:
        model = build_reward_model(config.reward.model)
        read = model.scores([(chunk.prompt, chunk.written_text or "") for chunk in chunks])
        scores = [score - config.reward.model.center for score in read]
    outcomes = iter(asyncio.run(verdicts(config, chunks, scores)))
    score_of = iter(scores)
    prompts: dict[int, TriedPrompt] = {}
    for one in sampled:
        prompt = one.prompt
        is_verified = not config.has_environment or (isinstance(one, TrajectoryChunk) and told_verdict(one) is None)
        tried = prompts.setdefault(
            one.trajectory.group,
            TriedPrompt(
                prompt_id=prompt.prompt_id,
                text=tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=False),
                num_tokens=prompt.tokens.size,
                answer=prompt.answer,
                verifier=prompt.verifier if is_verified else config.environment.name,
                responses=[],
            ),
        )
        if isinstance(one, Unanswered):
            tried.responses.append(TriedResponse(text="", num_tokens=0, finish_reason="", reason=_last_line(one.error)))
        else:
            tried.responses.append(_tried(config, tokenizer, one, next(score_of), next(outcomes)))
    return Trial(model=str(config.model.path), temperature=config.generation.temperature, prompts=[*prompts.values()])


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A trajectory whose environment failed."""

    trajectory: TrajectoryId
    prompt: Prompt
    error: str


async def sample(
    config: RunConfig, source: PromptSource, tokenizer: TextTokenizer, *, num_prompts: int, num_samples: int
) -> list[TrajectoryChunk | Unanswered]:
    """Return the last chunks of the start model's responses, each of one window, in order of their prompts."""
    whole = config.generation.model_copy(update={"window_tokens": config.generation.max_response_tokens})
    config = config.model_copy(update={"generation": whole})
    weights = start_weights(config)
    engine = build_generation_engine(config)
    held: dict[TrajectoryId, Held] = {}
    for place in range(num_prompts):
        for member in range(num_samples):
            lease = Lease(TrajectoryId("t", place, member), 0, place, None)
            held[lease.trajectory] = Held(lease, source.at(place), np.empty(0, np.int32), 0)
    try:
        engine.load_weights(weights, 0)
        if config.has_environment:
            ended = await _play(config, tokenizer, engine, dict(held))
        else:
            for one in held.values():
                engine.submit(one.request(config, source.responses))
            ended = {}
            while len(ended) < len(held):
                for window in engine.advance(_STEPS):
                    one = held[window.trajectory]
                    ended[window.trajectory] = chunk_of(one, window, tokenizer, config, worker=_NAME)
        return [ended[name] for name in held]
    finally:
        engine.close()


async def _play(
    config: RunConfig, tokenizer: TextTokenizer, engine: GenerationEngine, held: dict[TrajectoryId, Held]
) -> dict[TrajectoryId, TrajectoryChunk | Unanswered]:
    """Play each trajectory's turns with the run's environment, to the last chunk."""
    ended: dict[TrajectoryId, TrajectoryChunk | Unanswered] = {}
    ready: list[Held] = []
    async with asyncio.TaskGroup() as tasks:
        pool = EnvironmentPool(config.environment, tasks.create_task)
        turns = TurnMaker(config, tokenizer, pool)

        async def answer(one: Held, window: SampledWindow) -> None:
            chunk = chunk_of(one, window, tokenizer, config, worker=_NAME)
            try:
                turn = await turns.answer(chunk)
            except EnvironmentFailed as error:
                ended[one.trajectory] = Unanswered(one.trajectory, one.prompt, str(error))
                return
            if turn.is_done:
                ended[one.trajectory] = msgspec.structs.replace(chunk, turn=turn)
                return
            lease = Lease(one.trajectory, chunk.id.index + 1, one.lease.prompt, chunk, turn=turn)
            ready.append(Held.of(lease, one.prompt))

        try:
            await pool.check()
            answering = {tasks.create_task(answer(one, opening_window(name, 0))) for name, one in held.items()}
            while len(ended) < len(held):
                for one in ready:
                    held[one.trajectory] = one
                    engine.submit(one.request(config))
                ready.clear()
                if engine.stats().num_live:
                    # in a thread, so that environments are heard meanwhile
                    for window in await asyncio.to_thread(engine.advance, 1):
                        answering.add(tasks.create_task(answer(held[window.trajectory], window)))
                elif answering:
                    await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
                answering = {task for task in answering if not task.done()}
        finally:
            await pool.aclose()
    return ended


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
        known = {place: told for place, chunk in enumerate(chunks) if (told := told_verdict(chunk)) is not None}
        groups = [chunk.trajectory.group for chunk in chunks]
        return await score_responses(pool, functions, responses, groups=groups, known=known)


def _tried(
    config: RunConfig, tokenizer: TextTokenizer, chunk: TrajectoryChunk, score: float | None, outcome: VerifierOutcome
) -> TriedResponse:
    response = response_of(chunk, score)
    text = tokenizer.decode([*response.token_ids], skip_special_tokens=False)
    size = {"num_tokens": chunk.num_sampled, "finish_reason": str(response.finish_reason)}
    if isinstance(outcome, VerifierFailure):
        return TriedResponse(text=text, reason=f"{outcome.kind}: {_last_line(outcome.error)}", **size)
    shaped = shaped_reward(config, chunk, outcome, score)
    return TriedResponse(
        text=text,
        accuracy=shaped.accuracy if outcome.judged else None,
        reward=shaped.reward,
        parts=dict(shaped.parts),
        masked=shaped.masked,
        reason=outcome.reason,
        **size,
    )


def _last_line(error: str) -> str:
    return next((line.strip() for line in reversed(error.splitlines()) if line.strip()), "no reason given")


def main() -> ExitCode:
    path, num_prompts, num_samples = sys.argv[1:]
    try:
        trial = try_here(load_config([Path(path)]), num_prompts=int(num_prompts), num_samples=int(num_samples))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(f"{msgspec.json.encode(trial).decode()}\n")
    return ExitCode.OK
