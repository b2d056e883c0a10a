"""Simulates a run: its fleet, a number of updates, and the figures."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from pipeline.config.ledger_spec import ledger_spec
from pipeline.ledger.validation import check_spec
from pipeline.plan.costs import Costs
from pipeline.plan.simulate.clock import Clock, Process
from pipeline.plan.simulate.generators import Generator
from pipeline.plan.simulate.learner import Learner
from pipeline.plan.simulate.ledger import Server, SimulatedLedger
from pipeline.plan.simulate.prediction import Moment, Prediction, find_bottleneck, staleness_shares
from pipeline.plan.simulate.scorers import ScorerPool
from protocol.errors import ConfigError
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

ROLES: Final = {
    Field.REWARD: Role.REWARD,
    Field.REFERENCE: Role.REFERENCE,
    Field.VALUE: Role.VALUE,
    Field.GUIDANCE: Role.REFERENCE,
}
_MOMENTS = 240
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Responses:
    """What is drawn for a run: both are functions of the trajectory."""

    length: Callable[[TrajectoryId], int]
    """Tokens until the response ends by itself."""
    accuracy: Callable[[TrajectoryId], float] = lambda name: float(name.member % 2)
    """Of the response; by default every group has right and wrong ones."""
    prompt_tokens: float = 0.0
    """Mean of a prompt."""
    words: str = ""
    """Where they come from, for people."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Prompts without end: their number is not simulated."""

    digest: str = ""
    num_prompts: int = 1 << 50


def check_simulated(config: RunConfig, costs: Costs) -> None:
    """Raise ConfigError for a run that cannot be simulated, and for roles without workers or costs."""
    if config.has_environment:
        raise ConfigError(
            f"environment.name is {config.environment.name}, but environments of several turns are not simulated; leave "
            "[environment] out, with responses as long as all turns together"
        )
    for role in {ROLES[each] for each in config.score_fields}:
        costs.scorer(role)
        if not getattr(config.fleet, role):
            raise ConfigError(f"fleet.{role} is 0: nobody would do the work of that role; expected 1 or more")
    if not config.fleet.generator:
        raise ConfigError("fleet.generator is 0: nobody would sample; expected 1 or more")


def simulate(config: RunConfig, costs: Costs, responses: Responses, *, num_updates: int, warm_up: int) -> Prediction:
    """Return what a run would do in its first updates. Raises ConfigError."""
    check_simulated(config, costs)
    if not 0 <= warm_up < num_updates:
        raise ConfigError(f"{num_updates} updates of which {warm_up} are warm-up; expected at least one more")
    spec = ledger_spec(config, _Stream())
    check_spec(spec)
    most = config.generation.max_response_tokens
    clock = Clock()
    ledger = SimulatedLedger(spec, lambda name: max(1, min(most, responses.length(name))), responses.accuracy)
    roles = {role: int(getattr(config.fleet, role)) for role in {ROLES[each] for each in config.score_fields}}
    num_workers = config.fleet.generator + sum(roles.values()) + 1
    server = Server(clock, costs.ledger, num_workers)
    pools = {
        each: ScorerPool(
            clock,
            costs.scorer(ROLES[each]),
            ledger,
            server,
            each,
            num_workers=roles[ROLES[each]],
            max_batch=config.reward.max_batch if each is Field.REWARD else 64,
            link_room=2 * config.wire.high_water_mark,
        )
        for each in sorted(config.score_fields - {Field.GUIDANCE})
    }
    if Field.GUIDANCE in config.score_fields:
        pools[Field.REWARD].after = pools[Field.REFERENCE]
    fleet: Counter[str] = Counter()
    generators = [
        Generator(number, clock, config, costs, ledger, server, pools, responses.prompt_tokens, fleet)
        for number in range(config.fleet.generator)
    ]

    def wake_refused() -> None:
        for generator in generators:
            if generator.refused_s is not None:
                generator.credit()

    ledger.on_credit = wake_refused
    sums = _Sums(clock, generators, pools, server, fleet)
    learner = Learner(
        clock,
        config,
        costs,
        ledger,
        server,
        generators,
        responses.prompt_tokens,
        num_updates=num_updates,
        on_update=lambda: sums.mark() if len(learner.updates) == warm_up else None,
    )
    sums.mark()
    process = clock.start(learner.run())
    clock.start(sums.watch(ledger, lambda: len(learner.updates) >= num_updates))
    # almost nothing here is in a cycle, and looking for some among millions of objects takes a third of the time
    was_on = gc.isenabled()
    gc.disable()
    try:
        clock.run(process)
    finally:
        if was_on:
            gc.enable()
    if len(learner.updates) < num_updates:
        raise ConfigError(f"the run stopped after {len(learner.updates)} of {num_updates} updates")
    return _predict(config, ledger, learner, sums, warm_up)


class _Sums:
    """Counters of the whole fleet, since the last mark."""

    def __init__(
        self,
        clock: Clock,
        generators: Sequence[Generator],
        pools: dict[Field, ScorerPool],
        server: Server,
        fleet: Counter[str],
    ) -> None:
        self._fleet = fleet
        self._clock, self.generators, self.pools, self.server = clock, generators, pools, server
        self._marked: dict[str, float] = {}
        self.marked_s = 0.0
        self.moments: list[Moment] = []

    def mark(self) -> None:
        self._marked, self.marked_s = self._now(), self._clock.now

    def since(self) -> dict[str, float]:
        now = self._now()
        return {name: now[name] - self._marked.get(name, 0.0) for name in now}

    def span_s(self) -> float:
        return max(1e-9, self._clock.now - self.marked_s)

    def _now(self) -> dict[str, float]:
        found: dict[str, float] = {}
        found["slots"] = sum(one.slot_s for one in self.generators)
        found["tokens"] = sum(one.num_tokens for one in self.generators)
        found["ledger"] = self.server.busy_s
        for one in self.generators:
            for refusal, seconds in one.refusals.items():
                found[f"refused {refusal}"] = found.get(f"refused {refusal}", 0.0) + seconds
        for each, pool in self.pools.items():
            found[f"pool {each}"] = pool.busy_s
        return found

    def watch(self, ledger: SimulatedLedger, is_over: Callable[[], bool]) -> Process:
        """Look at the queues from time to time; seldom enough for a picture, however long the run is."""
        every_s = _LOOK_S
        while not is_over():
            yield self._clock.sleep(every_s)
            depths = {str(ROLES[each]): pool.depth for each, pool in self.pools.items()}
            self.moments.append(Moment(self._clock.now, self._fleet["live"], len(ledger.ready), depths))
            if len(self.moments) > 2 * _MOMENTS:
                self.moments, every_s = self.moments[1::2], 2 * every_s


def _predict(config: RunConfig, ledger: SimulatedLedger, learner: Learner, sums: _Sums, warm_up: int) -> Prediction:
    steady = learner.updates[warm_up:]
    span_s, found = sums.span_s(), sums.since()
    num, slots = len(sums.generators), config.generation.num_slots
    pools = {name.removeprefix("pool "): seconds for name, seconds in found.items() if name.startswith("pool ")}
    use = {
        "generator": found["slots"] / (span_s * num * slots),
        "learner": sum(update.compute_s for update in steady) / span_s,
        "ledger": sums.server.polls + found["ledger"] / span_s,
    }
    for each, seconds in pools.items():
        role = ROLES[Field(each)]
        use[str(role)] = seconds / (span_s * sums.pools[Field(each)].num_servers)
    refused = {name.removeprefix("refused "): s for name, s in found.items() if name.startswith("refused ") and s > 0}
    wait_s = fmean(update.wait_s for update in steady)
    update_s = span_s / len(steady)
    why = max(refused, key=lambda name: refused[name], default="")
    bottleneck, advice = find_bottleneck(use, wait_s / update_s, config.staleness.eta, why)
    moments = [moment for moment in sums.moments if moment.at_s > sums.marked_s] or sums.moments
    return Prediction(
        update_s=update_s,
        tokens_per_s=sum(update.num_tokens for update in steady) / span_s,
        sampled_per_s=found["tokens"] / span_s,
        wait_s=wait_s,
        use=use,
        staleness=staleness_shares(steady),
        eta=config.staleness.eta,
        ready_mean=fmean(moment.ready for moment in moments) if moments else 0.0,
        needed=ledger.num_needed,
        mailboxes={role: fmean(one.mailboxes[role] for one in moments) for role in moments[0].mailboxes},
        dropped={str(reason): number for reason, number in ledger.num_dropped.items()},
        bottleneck=bottleneck,
        advice=advice,
        num_updates=len(learner.updates),
        warm_up=warm_up,
        num_generators=num,
        slots=slots,
        most_in_flight=ledger.most_in_flight,
        updates=tuple(learner.updates),
        moments=tuple(sums.moments),
    )
