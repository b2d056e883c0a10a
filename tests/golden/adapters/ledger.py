"""Adapters of the families about the order of training: vectors drive the ledger.

A driver takes any ledger, and a test drives the Redis one too. Here it is the one in memory, which
needs no server. A driver stands for the processes around the ledger: it leases and writes for a
generator, scores, and claims for the learner. The schedule's windows go through the held
trajectories of a generator and the emulated engine, whose lengths are known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR
from pipeline.algorithms.assemble import join_segments
from pipeline.algorithms.group_rule import Responses
from pipeline.config.schema import RunConfig
from pipeline.ledger.contract import Ledger
from pipeline.ledger.types import Claim, ClaimedUnit, DropReason, FinishedClaim, LedgerSpec, Unit
from pipeline.ledger.version_history import VersionHistory
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk, ValueScore
from tests.golden.check import Adapter
from tests.oracle.ledger.ledger import MemoryLedger
from tests.rules import make_rule
from workers.engines.generation.seam import SampledWindow
from workers.generator.held_trajectories import HeldTrajectories

Case = Mapping[str, Any]
Open = Callable[[LedgerSpec], Awaitable[Ledger]]
"""Makes an empty ledger."""
Driver = Callable[[Open, Case], Awaitable[dict[str, Any]]]

GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
SCORER = Incarnation(Role.REWARD, "reward-0", 1)
VALUE = Incarnation(Role.VALUE, "value-0", 1)
LEARNER = Incarnation(Role.LEARNER, "learner-0", 1)
PROMPT = Prompt(prompt_id="golden", tokens=np.ones(1, np.int32), text="", answer="", verifier="arithmetic")

NUM_STEPS = 6
"""Every trace of T-PPO's schedule is six steps long, and lists the responses that were begun in
them."""


def in_memory(driver: Driver) -> Adapter:
    """Return the adapter that drives the ledger in this process."""

    async def open_ledger(spec: LedgerSpec) -> Ledger:
        ledger = MemoryLedger(lambda _: 1, lambda: 0.0)
        await ledger.open(spec)
        return ledger

    return lambda inputs: asyncio.run(driver(open_ledger, inputs))  # pyright: ignore[reportArgumentType]


def _spec(unit: Unit, *, group_size: int, units_per_update: int, **settings: Any) -> LedgerSpec:
    return LedgerSpec(run="golden", unit=unit, group_size=group_size, units_per_update=units_per_update, **settings)


async def _write_response(ledger: Ledger, trajectory: TrajectoryId, versions: Sequence[int], accuracy: float) -> None:
    """Write and score a response of one chunk, one token a version, as a generator and a verifier
    would."""
    chunk = TrajectoryChunk(
        id=ChunkId(trajectory, 0),
        prompt=PROMPT,
        context_tokens=np.empty(0, np.int32),
        tokens=np.zeros(len(versions), np.int32),
        behavior_logprobs=np.zeros(len(versions), np.float32),
        segments=tuple(Segment(version, 1) for version in versions),
        finish_reason=FinishReason.STOP,
        response_text="",
    )
    await ledger.write_chunk(GENERATOR, chunk)
    await ledger.write_score(SCORER, chunk.id, RewardScore(reward=2.0 * accuracy - 1.0, accuracy=accuracy))


# -- dynamic sampling ------------------------------------------------------------------------------


async def dynamic_sampling(open_ledger: Open, inputs: Case) -> dict[str, Any]:
    """DAPO's loop: generation batches are drawn until the ledger has enough groups with signal for
    the learner's claim. How many may be drawn is the loop's own business; in a run that is
    ``workers.learner.ending``."""
    batches, size, num_wanted = inputs["gen_batches"], inputs["n"], inputs["train_batch_size"]
    num_groups = sum(len(batch) for batch in batches)
    ledger = await open_ledger(
        _spec(
            Unit.GROUP,
            group_size=size,
            units_per_update=num_wanted * size,
            eta=0,
            oversampling=1.0 + num_groups / num_wanted,
            signal_filter=size > 1,
        )
    )
    uids: list[int] = []
    kept: list[int] = []
    batch: list[int] = []
    number = 0
    for number, groups in enumerate(batches, start=1):
        for uid, accuracies in groups:
            before = (await ledger.totals()).num_ready_units
            leases = (await ledger.lease(GENERATOR, max_trajectories=size)).leases
            for lease, accuracy in zip(leases, accuracies, strict=True):
                await _write_response(ledger, lease.trajectory, [0], float(accuracy))
            uids.append(uid)
            kept.extend([uid] * ((await ledger.totals()).num_ready_units - before))
        claim = await ledger.claim(LEARNER, policy_version=0)
        if isinstance(claim, Claim):
            batch = [uids[int(unit)] for unit in claim.units]
        if batch or number == inputs["max_num_gen_batches"]:
            break
    return {
        "num_gen_batches": number,
        "kept_uids": kept,
        "batch_uids": batch,
        "status": "ok" if batch else "error_too_many",
    }


# -- group rules -----------------------------------------------------------------------------------


async def group_rules(open_ledger: Open, inputs: Case) -> dict[str, Any]:
    """Return when a group is trained, evicted or dropped, and T-PPO's running filter of the members
    so far."""
    if "steps" in inputs:
        return await _running_signal(open_ledger, inputs["steps"])
    members = inputs["members"]
    ready = max(member["finish_version"] for member in members)
    age = _ages(ready, [member["first_version"] for member in members]).max()
    state, unit = "evict_stale", None
    if await _claimed(open_ledger, members, ready, eta=inputs["max_staleness"], signal_filter=False):
        unit = await _claimed(open_ledger, members, ready, eta=inputs["max_staleness"], signal_filter=True)
        state = "train" if unit else "evict_uninformative"
    advantages: list[float] = []
    if unit is not None:
        rewards = [member[-1].scores[Field.REWARD].reward for member in unit.trajectories]  # pyright: ignore
        responses = Responses(np.array(rewards), np.zeros(len(rewards), int), tuple(np.ones((len(rewards), 1), bool)))
        advantages = [row[0].item() for row in make_rule().advantages(responses)]
    return {"ready_version": ready, "age": int(age), "state": state, "advantages": advantages}


async def _claimed(
    open_ledger: Open, members: Sequence[Case], ready: int, *, eta: int, signal_filter: bool
) -> ClaimedUnit | None:
    """Return the group as the learner claims it once all members have finished; None when the
    ledger drops it."""
    size = len(members)
    ledger = await open_ledger(
        _spec(Unit.GROUP, group_size=size, units_per_update=size, eta=eta, signal_filter=signal_filter)
    )
    leases = (await ledger.lease(GENERATOR, max_trajectories=size)).leases
    for lease, member in zip(leases, members, strict=True):
        versions = sorted({member["first_version"], member["finish_version"]})
        await _write_response(ledger, lease.trajectory, versions, float(member["acc"]))
    await ledger.advance(LEARNER, ready)
    claim = await ledger.claim(LEARNER, policy_version=ready)
    if isinstance(claim, Claim):
        (unit,) = await ledger.fetch(claim)
        return unit
    reason = DropReason.NO_SIGNAL if signal_filter else DropReason.STALE
    assert (await ledger.totals()).num_groups_dropped == {reason.value: 1}
    return None


async def _running_signal(open_ledger: Open, steps: Sequence[Any]) -> dict[str, Any]:
    scores: dict[int, list[float]] = {}
    per_step: list[dict[str, list[int]]] = []
    for step in steps:
        for uid, members in step:
            scores.setdefault(uid, []).extend(score for is_finished, score in members if is_finished)
        with_signal: list[int] = []
        for uid, finished in sorted(scores.items()):
            group = [{"first_version": 0, "finish_version": 0, "acc": (1.0 + score) / 2.0} for score in finished]
            if len(group) > 1 and await _claimed(open_ledger, group, 0, eta=0, signal_filter=True):
                with_signal.append(uid)
        per_step.append({"with_gradient": with_signal})
    return {"per_step": per_step}


async def segments(open_ledger: Open, inputs: Case) -> dict[str, Any]:
    """Versions and log-probs of a response of several versions, how old they make it, and whether
    the ledger lets it train."""
    current = inputs["current_version"]
    versions, logprobs = join_segments(
        ([Segment(part["version"], len(part["logps"]))], np.array(part["logps"], dtype=np.float64))
        for part in inputs["segments"]
    )
    ages = _ages(current, versions)
    member = {"first_version": int(versions.min()), "finish_version": int(versions.max()), "acc": 1}
    unit = await _claimed(open_ledger, [member], current, eta=inputs["max_staleness"], signal_filter=False)
    return {
        "versions": versions.tolist(),
        "behave_log_prob": logprobs.tolist(),
        "span": len(np.unique(versions)),
        "staleness_newest": int(ages.min()),
        "staleness_worst": int(ages.max()),
        "keep": unit is not None,
        "on_policy_mask": (ages == 0).astype(int).tolist(),
    }


def _ages(current: int, versions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return how many updates before ``current`` each version was made."""
    return current - VersionHistory().updates_of(np.array(versions))


# -- T-PPO's schedule ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known(LengthLaw):
    """The lengths of a trace, one a prompt."""

    lengths: tuple[int, ...] = ()

    def end_after(self, seed: int, trajectory: TrajectoryId, start: int) -> int:
        del seed
        return max(start + 1, self.lengths[trajectory.group])


async def tppo_schedule(open_ledger: Open, inputs: Case) -> dict[str, Any]:
    """Play a trace as a synchronous run: an update is as many windows as there are slots, and none
    may be a version old."""
    slots, lengths = inputs["slots"], tuple(inputs["true_lengths"])
    fields = frozenset({Field.REWARD, Field.VALUE})
    ledger = await open_ledger(
        _spec(
            Unit.CHUNK,
            group_size=1,
            units_per_update=slots,
            eta=0,
            num_prompts=len(lengths),
            fields=fields,
            value_training=True,
        )
    )
    law = _Known("constant", 1.0, 1.0, lengths)
    engine = EmulatedEngine(num_slots=slots, lengths=law, tokens=TokenLaw.of(8, [7]), vocabulary=8)
    held, config = HeldTrajectories(slots), _config(inputs["window"], inputs["max_response"])
    begun: dict[TrajectoryId, int] = {}
    steps: list[dict[str, Any]] = []
    for version in range(NUM_STEPS):
        await ledger.advance(LEARNER, version)
        engine.load_weights({TENSOR: np.zeros(1, np.float32)}, version)
        grant = await ledger.lease(GENERATOR, max_trajectories=held.num_free_slots, policy_version=version)
        for lease in grant.leases:
            begun.setdefault(lease.trajectory, version)
            engine.submit(held.submit(held.add(lease, PROMPT).trajectory).request(config))
        while engine.stats().num_live:
            for window in engine.advance(inputs["window"]):
                held.sampled(window)
                await _write_window(ledger, held, window)
        steps.append(await _learn(ledger, version, begun, slots))
    return {"steps": steps}


def _config(window: int, max_response: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"]},
            "generation": {"window_tokens": window, "max_response_tokens": max_response},
        }
    )


async def _write_window(ledger: Ledger, held: HeldTrajectories, window: SampledWindow) -> None:
    """Write a window's chunk as a generator does, and score it; then extend its trajectory or leave
    it."""
    writing, is_final = held.start_writing(window.trajectory), window.finish_reason.is_final
    chunk = TrajectoryChunk(
        id=ChunkId(window.trajectory, writing.next_index),
        prompt=writing.prompt,
        context_tokens=writing.response_tokens,
        tokens=window.tokens,
        behavior_logprobs=window.behavior_logprobs,
        segments=window.segments,
        finish_reason=window.finish_reason,
        response_text="" if is_final else None,
    )
    outcome = await ledger.write_chunk(GENERATOR, chunk)
    if outcome.keeps_lease:
        held.extend(writing, window.tokens)
    else:
        held.leave(writing)
    values = ValueScore(values=np.zeros(chunk.num_tokens, np.float32), value_version=0)
    await ledger.write_score(VALUE, chunk.id, values)
    if is_final:
        await ledger.write_score(SCORER, chunk.id, RewardScore(reward=1.0, accuracy=1.0))


async def _learn(ledger: Ledger, version: int, begun: Mapping[TrajectoryId, int], slots: int) -> dict[str, Any]:
    """Claim and settle the samples of one step of the policy and the value model; return them."""
    claim = await ledger.claim(LEARNER, policy_version=version)
    assert isinstance(claim, Claim), f"the learner waits: {claim}"
    chunks = [unit.trajectories[0][0].chunk for unit in await ledger.fetch(claim)]
    await ledger.settle(LEARNER, (claim.claim_id,))
    num_finished = sum(chunk.finish_reason.is_final for chunk in chunks)
    value_tokens = 0
    if num_finished:
        finished = await ledger.claim_finished(VALUE, num_trajectories=num_finished)
        assert isinstance(finished, FinishedClaim), f"{finished} responses are kept, expected {num_finished}"
        value_tokens = sum(response.chunk.response_length for response in finished.trajectories)
        await ledger.settle_finished(VALUE, (finished.claim_id,))
    return {
        "batch": [
            {
                "id": chunk.trajectory.group,
                "start": int(chunk.context_tokens.size),
                "end": chunk.response_length,
                "finished": chunk.finish_reason.is_final,
                "eos": chunk.finish_reason is FinishReason.STOP,
                "lag_oldest_token": int(_ages(version, [begun[chunk.trajectory]])[0]),
            }
            for chunk in chunks
        ],
        "policy_tokens": sum(chunk.num_tokens for chunk in chunks),
        "value_tokens": value_tokens,
        "new_prompts_next": slots - (len(chunks) - num_finished),
    }


# -- admission -------------------------------------------------------------------------------------


async def capacity(open_ledger: Open, inputs: Case) -> dict[str, Any]:
    """Return how much the ledger's credit and the machine allow to begin in each state (version,
    accepted, running)."""
    found: list[int] = []
    for version, accepted, running in inputs["states"]:
        settings = {"units_per_update": inputs["batch"], "eta": inputs["max_staleness"]}
        ledger = await open_ledger(_spec(Unit.TRAJECTORY, group_size=1, **settings))
        await ledger.advance(LEARNER, version)
        limit = (await ledger.totals()).credit_limit
        found.append(min(inputs["max_concurrent"] - running, limit - (accepted + running)))
    return {"capacity": found}


DRIVERS: Mapping[str, Driver] = {
    "decoupled_ppo": capacity,
    "dynamic_sampling": dynamic_sampling,
    "group_rules": group_rules,
    "segments": segments,
    "tppo_schedule": tppo_schedule,
}
