"""Costs of a run that was measured: from what its workers say of their work, and from the learner's history.

Each interval of the fleet's history has, by kind of work, its pieces, tokens and seconds; each update its responses,
tokens and seconds. Costs are the coefficients with the least squared error, and never negative. The first update is
left out: it has what happens once, such as compilation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import numpy as np

from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.observability.fleet_history import FleetRow, fleet_history
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.plan.costs import Costs, GeneratorCosts, LearnerCosts, ScorerCosts, WeightsCosts
from pipeline.plan.workload import Lengths
from pipeline.process.work import ServiceSums
from pipeline.runtime.machine import this_machine
from pipeline.runtime.registry.contract import WaitingFor
from protocol.errors import ConfigError
from protocol.ids import Role

LEAST_UPDATES: Final = 4
"""With fewer, a run says too little about its learner."""
_KINDS: Final = {
    Role.REWARD: ("judging",),
    Role.REFERENCE: ("scoring", "guidance"),
    Role.VALUE: ("scoring", "value step"),
    Role.ENVIRONMENT: ("answering",),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A run, measured."""

    costs: Costs
    update_s: float
    """Mean time from one update to the next."""
    wait_s: float
    """The part of it in which the learner waited for units."""
    sequences: float
    """Mean responses of an update."""
    response_tokens: float
    prompt_tokens: float
    """Mean of a response's prompt; 0 if the run did not record it."""
    trained_share: float
    """Of the generated tokens."""
    chunks: float | None
    """Mean chunks of a response; None without a reference worker, which sees them all."""
    num_updates: int
    generators: int
    cores: int
    planned_update_s: float | None
    """What the plan of its fleet predicted."""

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            prompt_tokens=self.prompt_tokens or None,
            response_tokens=self.response_tokens / self.sequences,
            trained_share=self.trained_share,
            chunks=self.chunks,
        )


def non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return coefficients that are not negative, with the least squared error of ``rows @ them == seconds``.

    Tries every set of coefficients that are above zero: there are three at most."""
    matrix, target = np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    num = matrix.shape[1]
    best, least = [0.0] * num, float(target @ target)
    for chosen in (list(some) for size in range(1, num + 1) for some in combinations(range(num), size)):
        found = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        error = float(np.sum((matrix[:, chosen] @ found - target) ** 2))
        # a coefficient more has to explain something
        if found.min() >= 0.0 and error < least * (1 - 1e-9):
            best, least = [0.0] * num, error
            for place, value in zip(chosen, found, strict=True):
                best[place] = float(value)
    return best


def profile_run(run_dir: Path) -> Profile:
    """Return a run's costs. Raises ConfigError if it is no run or has too few updates."""
    config = read_resolved(run_dir)
    rows, _ = run_history(run_dir / HISTORY_NAME).read()
    fleet, _ = fleet_history(run_dir).read()
    return profiled(config, [row for row in rows if isinstance(row, UpdateRow)], fleet, str(run_dir))


def profiled(config: RunConfig, updates: Sequence[UpdateRow], fleet: Sequence[FleetRow], name: str) -> Profile:
    """Return the costs of a run by its records. Raises ConfigError for too few updates."""
    first, updates = updates[:1], updates[1:]
    if len(updates) < LEAST_UPDATES:
        raise ConfigError(
            f"{name} has {len(updates)} updates after its first; expected {LEAST_UPDATES} or more: let it run longer"
        )
    # neither the start nor the evaluation after the end
    fleet = [row for row in fleet if first[0].at_s < row.at_s - row.span_s / 2 < updates[-1].at_s]
    sequences = fmean(row.num_trajectories for row in updates)
    tokens = fmean(row.num_response_tokens for row in updates)
    served = _sums(fleet, Role.LEARNER, ("update",))
    pieces, size = sum(one.pieces for one in served), sum(one.size for one in served)
    prompt_tokens = max(0.0, size / pieces - tokens) / sequences if pieces else 0.0
    scorers = {role: _scorer(config, fleet, role) for role in _KINDS}
    costs = Costs(
        generator=_generator(config, fleet, name),
        learner=_learner(updates, prompt_tokens, config.algorithm.num_minibatches),
        reward=scorers[Role.REWARD],
        reference=scorers[Role.REFERENCE],
        value=scorers[Role.VALUE],
        environment=scorers[Role.ENVIRONMENT],
        weights=_weights(fleet, updates),
        busy=_busy(fleet, updates, config.reward.processes),
        source=name,
    )
    return Profile(
        costs=costs,
        update_s=fmean(row.seconds for row in updates),
        wait_s=fmean(row.wait_s for row in updates),
        sequences=sequences,
        response_tokens=tokens,
        prompt_tokens=prompt_tokens,
        trained_share=_trained_share(fleet, updates),
        chunks=_chunks(fleet, tokens / sequences),
        num_updates=len(updates),
        generators=_generators(fleet),
        cores=this_machine().num_cores,
        planned_update_s=config.fleet.planned_update_s,
    )


def _sums(fleet: Iterable[FleetRow], role: Role, kinds: Sequence[str]) -> list[ServiceSums]:
    """Return the finished work of each interval, of which there was some."""
    found = list[ServiceSums]()
    for row in fleet:
        service = row.roles[str(role)].service if str(role) in row.roles else {}
        both = [service[kind] for kind in kinds if kind in service]
        if both:
            pieces, seconds, size = (sum(column) for column in zip(*map(msgspec.structs.astuple, both), strict=True))
            found.append(ServiceSums(int(pieces), seconds, size))
    return found


def _generator(config: RunConfig, fleet: Sequence[FleetRow], name: str) -> GeneratorCosts:
    done = [one for one in _sums(fleet, Role.GENERATOR, ("sampling",)) if one.pieces]
    if not done:
        raise ConfigError(f"{name} has no records of its generators' work; run it again with this version")
    base, sequence = non_negative([(one.pieces, one.size) for one in done], [one.seconds for one in done])
    # between two turns of its engine it leases, encodes and sends
    more = max(1.0, _computing_s(fleet) / sum(one.seconds for one in done))
    return GeneratorCosts(
        slots=config.generation.num_slots,
        decode_base_s=more * base,
        decode_sequence_s=more * sequence,
        mean_live=sum(one.size for one in done) / sum(one.pieces for one in done),
    )


def _computing_s(fleet: Iterable[FleetRow]) -> float:
    """Return how long the generators computed, by what they said that they were at."""
    spans = [(row.span_s, row.roles[str(Role.GENERATOR)]) for row in fleet if str(Role.GENERATOR) in row.roles]
    return sum(span_s * role.workers * role.shares.get(WaitingFor.COMPUTE, 0.0) for span_s, role in spans)


def _learner(updates: Sequence[UpdateRow], prompt_tokens: float, steps: int) -> LearnerCosts:
    rows = [
        (steps, row.num_trajectories, row.num_response_tokens + prompt_tokens * row.num_trajectories) for row in updates
    ]
    base, sequence, token = non_negative(rows, [row.compute_s for row in updates])
    return LearnerCosts(
        base_s=base,
        sequence_s=sequence,
        token_s=token,
        update_s=fmean(row.seconds - row.wait_s - row.compute_s - row.publish_s for row in updates),
        publish_s=fmean(row.publish_s for row in updates),
    )


def _scorer(config: RunConfig, fleet: Sequence[FleetRow], role: Role) -> ScorerCosts | None:
    done = _sums(fleet, role, _KINDS[role])
    if not done:
        return None
    piece, token = non_negative([(one.pieces, one.size) for one in done], [one.seconds for one in done])
    concurrency = config.reward.processes if role is Role.REWARD else 1
    return ScorerCosts(piece_s=piece, token_s=token, concurrency=concurrency)


def _weights(fleet: Sequence[FleetRow], updates: Sequence[UpdateRow]) -> WeightsCosts:
    """Return the time that a generator waited for each version: that is measured, its bytes are not."""
    role = str(Role.GENERATOR)
    spans = [(row.span_s, row.roles[role]) for row in fleet if role in row.roles]
    workers = _generators(fleet)
    waited_s = sum(s * span.workers * span.shares.get(WaitingFor.WEIGHTS, 0.0) for s, span in spans)
    return WeightsCosts(load_s=waited_s / workers / (len(updates) + 1))


def _generators(fleet: Sequence[FleetRow]) -> int:
    role = str(Role.GENERATOR)
    return max(1, round(max((row.roles[role].workers for row in fleet if role in row.roles), default=1.0)))


def _written(fleet: Sequence[FleetRow]) -> int:
    role = str(Role.GENERATOR)
    return sum(row.roles[role].tokens for row in fleet if role in row.roles)


def _trained_share(fleet: Sequence[FleetRow], updates: Sequence[UpdateRow]) -> float:
    """Return the share of the tokens that generators wrote that was trained, by rates: the intervals of the fleet's
    history reach beyond the updates."""
    if not (written := _written(fleet)):
        return 1.0
    trained_rate = sum(row.num_response_tokens for row in updates) / sum(row.seconds for row in updates)
    return min(1.0, trained_rate * sum(row.span_s for row in fleet) / written)


def _chunks(fleet: Sequence[FleetRow], response_tokens: float) -> float | None:
    pieces = sum(one.pieces for one in _sums(fleet, Role.REFERENCE, ("scoring",)))
    return max(1.0, pieces * response_tokens / _written(fleet)) if pieces and _written(fleet) else None


def _busy(fleet: Sequence[FleetRow], updates: Sequence[UpdateRow], judged_at_once: int) -> float:
    """Return the mean number of workers that worked at once, while updates were made. The learner works whenever it does
    not wait for units, as in its costs."""
    busy_s = _computing_s(fleet) + sum(
        one.seconds / (judged_at_once if role is Role.REWARD else 1)
        for role, names in _KINDS.items()
        for one in _sums(fleet, role, names)
    )
    learner = 1.0 - sum(row.wait_s for row in updates) / sum(row.seconds for row in updates)
    return busy_s / (sum(row.span_s for row in fleet) or 1.0) + learner
