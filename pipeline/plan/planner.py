"""Which fleet to start: every placement of the roles that fits, best first.

A candidate says which devices each role has, alone or shared with others, how they are split, and how far sampling runs
ahead. Its period has three bounds, each dearer and closer than the one before: the busiest group's work; the least
period by ``pipeline.schedule.bounds``, which knows the circle of the weights; the exact schedule. The candidate with the
least bound gets the next one, so the first whose exact period is least is the best of all, and few schedules are solved.

Learning is one block of an iteration: the learner claims a whole batch. Generation and scoring are several chunks."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any, Final

from pipeline.plan.costs import GeneratorCosts
from pipeline.plan.devices import PER_HOST, Device, price_eur
from pipeline.plan.roles import USED, Roles, Split, Trained, splits
from pipeline.plan.workload import Workload
from pipeline.schedule.bounds import period_bounds
from pipeline.schedule.files import limits
from pipeline.schedule.iteration import NO_LIMIT, IterationBlock, IterationDependency, IterationFile
from pipeline.schedule.search import Proof, search
from protocol.errors import ConfigError

CHUNKS: Final = 4
"""Of an iteration's generation and scoring."""
_QUANTA: Final = 1000
"""Units of time in the least period of all candidates."""
_RUNNERS_UP: Final = 3
_ALIKE: Final = 0.01
"""Of two periods that differ by less the cheaper one is better."""
_WORTH: Final = 0.98
"""Windows are made twice as long for a period that is less than this share of the one before."""
Counts = tuple[tuple[int, Device], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that one role has, or several share."""

    roles: tuple[str, ...]
    devices: Counts

    @property
    def number(self) -> int:
        return sum(number for number, _ in self.devices)


@dataclass(frozen=True, slots=True)
class Engines:
    """Generators of one kind."""

    device: Device
    number: int
    tensor: int
    slots: int


@dataclass(frozen=True)
class Candidate:
    """A fleet that fits, with the seconds that each role takes for an update."""

    groups: tuple[Group, ...]
    engines: tuple[Engines, ...]
    learner: Trained
    critic: Trained | None
    staleness: int
    window: int
    """Tokens of a chunk, at most."""
    seconds: Mapping[str, float]
    longest_s: float
    """To decode the longest response."""
    floors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Least periods that no order of work changes, by what sets them."""
    cores: int = 0
    """Cores of a host, whose memory all processes share; 0: devices with memories of their own."""

    @cached_property
    def devices(self) -> list[tuple[int, Device]]:
        found = dict[Device, int]()
        for number, device in (each for group in self.groups for each in group.devices):
            found[device] = found.get(device, 0) + number
        return [(number, device) for device, number in found.items()]

    @cached_property
    def eur_per_hour(self) -> float | None:
        return price_eur(self.devices)

    def work(self) -> dict[str, float]:
        """Return the seconds of each group for an update."""
        return {" and ".join(g.roles): sum(self.seconds[role] for role in g.roles) for g in self.groups}

    @property
    def least(self) -> float:
        """What no order of its work can beat."""
        return max(*self.work().values(), *self.floors.values(), self.circle / (self.staleness + 1))

    @property
    def circle(self) -> float:
        """Seconds from new weights to the update with all that was sampled by them."""
        generated_s = max(self.seconds["generator"], self.longest_s)
        return generated_s + self.seconds["learner"] + self.seconds["weights"]

    def memory(self, roles: Roles) -> list[dict[str, Any]]:
        """Return the GB that each role takes of each device of its group, by group and kind."""
        held: dict[str, float] = {"learner": self.learner.num_bytes, "reference": roles.scorer_bytes()}
        if self.critic is not None:
            held["value"] = self.critic.num_bytes
        engines = {each.device: each for each in self.engines}
        if self.cores:
            held["generator"] = self.engines[0].number * roles.engine_bytes(1, self.engines[0].slots)
            taken = {role: held[role] / 1e9 for group in self.groups for role in group.roles}
            return [
                {"device": f"{self.cores} CPU", "gb": self.cores * self.engines[0].device.memory_gb, "roles": taken}
            ]
        rows = list[dict[str, Any]]()
        for group in self.groups:
            for number, device in group.devices:
                taken = {role: held[role] / 1e9 for role in group.roles if role != "generator"}
                if "generator" in group.roles:
                    taken["generator"] = roles.engine_bytes(engines[device].tensor, engines[device].slots) / 1e9
                rows.append({"device": f"{number} {device.name}", "gb": device.memory_gb, "roles": taken})
        return rows

    def trained(self) -> dict[str, Trained]:
        """Return what learns, by its role."""
        return {"learner": self.learner} | ({} if self.critic is None else {"value": self.critic})

    def needs(self) -> list[str]:
        """Return what this version cannot execute of it."""
        found = list[str]()
        for role, trained in self.trained().items():
            if not trained.split.runs_here:
                name = "critic" if role == "value" else role
                more = f"which are more than the {PER_HOST} devices of a host"
                found.append(f"a {name} of {trained.split.ranks} ranks, {more}")
        if len({each.tensor for each in self.engines}) > 1:
            kinds = ", ".join(f"{each.device.name}: {each.tensor}" for each in self.engines)
            found.append(f"generators with different tensor_parallel_size ({kinds}), which is one setting of a run")
        return found

    def iteration(self, unit: float) -> IterationFile:
        """Return its work as blocks, in units of time. What takes none is left out."""
        place = {role: number for number, group in enumerate(self.groups) for role in group.roles}
        blocks, waits = list[IterationBlock](), list[IterationDependency]()

        def add(name: str, seconds: float, device: int, *before: str, once: bool = False) -> None:
            span = -(-seconds / (1 if once else CHUNKS) // unit)
            blocks.append(IterationBlock(name, max(1, int(span)), devices=(device,), once=once))
            waits.extend(IterationDependency(each, name) for each in before)

        add("generator", self.seconds["generator"], place["generator"])
        scorers = [role for role in ("reference", "value") if role in place]
        for role in scorers:
            add(role, self.seconds[f"{role} scores"], place[role], "generator")
        add("learner", self.seconds["learner"], place["learner"], *(scorers or ["generator"]), once=True)
        if "value" in place:
            add("critic", self.seconds["value"] - self.seconds["value scores"], place["value"], "value", once=True)
        add("weights", self.seconds["weights"], len(self.groups), "learner", once=True)
        waits += [
            IterationDependency("learner", "learner", 1), IterationDependency("weights", "generator", stale=True),
        ]  # fmt: skip
        return IterationFile(len(self.groups) + 1, CHUNKS, tuple(blocks), tuple(waits))


@dataclass(frozen=True, slots=True)
class Placed:
    """A candidate with its period."""

    candidate: Candidate
    period_s: float
    bound_s: float
    is_exact: bool
    """Whether no order of its work is faster; else there was no time to know."""

    @property
    def binding(self) -> str:
        """What the period cannot get below."""
        limits = self.candidate.work() | dict(self.candidate.floors)
        name, seconds = max(limits.items(), key=lambda item: item[1])
        if seconds < 0.97 * self.period_s:
            return f"staleness: new weights take {self.candidate.circle:.3g} s to come back as trained responses"
        return name

    @property
    def mean_staleness(self) -> float:
        """Updates between sampling and training: all that are allowed if the learner is slower, else what a response takes."""
        most = float(self.candidate.staleness)
        is_learner = self.candidate.seconds["learner"] >= self.candidate.seconds["generator"]
        return most if is_learner else min(most, self.candidate.longest_s / 2 / self.period_s)


@dataclass(frozen=True, slots=True)
class Plans:
    best: Placed
    """The fastest that this version can execute; if none fits, the fastest."""
    others: tuple[Placed, ...]
    """The next ones on other devices or with other needs, by their periods."""
    num_candidates: int
    num_solved: int
    is_proven: bool
    """Whether no candidate is 1 % faster."""
    bound_s: float


def make_plans(candidates: Sequence[Candidate], time_limit_s: float = 20.0, *, num_others: int = _RUNNERS_UP) -> Plans:
    """Return the best of the candidates, of which there is at least one."""
    search_ = BestFirst(candidates, time_limit_s)
    found = list[Placed]()
    for placed in search_.placed():
        if any(_same(placed.candidate, other.candidate) for other in found):
            continue
        found.append(placed)
        if len(found) > num_others and any(not each.candidate.needs() for each in found):
            break
    best = next((each for each in found if not each.candidate.needs()), found[0])
    others = tuple(each for each in found if each is not best)[:num_others]
    return Plans(best, others, len(candidates), search_.num_solved, search_.in_time, best.bound_s)


def _same(one: Candidate, other: Candidate) -> bool:
    """Whether they differ in settings alone, not in who has which devices."""
    return (one.groups, bool(one.needs())) == (other.groups, bool(other.needs()))


def _rank(period_s: float) -> int:
    """Return the same number for periods that differ by 1 % at most."""
    return math.floor(math.log(period_s) / math.log1p(_ALIKE))


def order_of(candidate: Candidate, period_s: float) -> tuple[int, float, float, int]:
    """Return what candidates are sorted by: of periods that hardly differ the cheapest comes first."""
    return _rank(period_s), candidate.eur_per_hour or 0.0, period_s, candidate.staleness


class BestFirst:
    """Candidates by ``order_of`` their exact periods."""

    def __init__(self, candidates: Sequence[Candidate], time_limit_s: float) -> None:
        self._end_s = time.monotonic() + time_limit_s
        self.unit = min(each.least for each in candidates) / _QUANTA
        self.num_solved = 0
        self.in_time = True
        self._heap = [
            (order_of(each, each.least), 0, number, each.least, each) for number, each in enumerate(candidates)
        ]
        heapq.heapify(self._heap)

    def placed(self) -> Iterator[Placed]:
        while self._heap:
            _, level, number, value, candidate = heapq.heappop(self._heap)
            if level == 2:
                yield Placed(candidate, value, value, is_exact=True)
                continue
            left_s = self._end_s - time.monotonic()
            if left_s <= 0:
                # what is left is known by its bounds alone
                self.in_time = False
                yield Placed(candidate, _slowest(candidate), value, is_exact=False)
                continue
            known = self.bound(candidate) if level == 0 else self.solve(candidate, left_s)
            value = max(value, known)
            heapq.heappush(self._heap, (order_of(candidate, value), level + 1, number, value, candidate))

    def bound(self, candidate: Candidate) -> float:
        placement = candidate.iteration(self.unit).placement("iteration", CHUNKS, candidate.staleness + 1)
        least = period_bounds(placement, limits(NO_LIMIT, placement.num_devices)).least
        return max(least * self.unit, candidate.least)

    def solve(self, candidate: Candidate, time_limit_s: float) -> float:
        """Return its exact period; in too little time, the best that was found."""
        self.num_solved += 1
        placement = candidate.iteration(self.unit).placement("iteration", CHUNKS, candidate.staleness + 1)
        found = search(placement, limits(NO_LIMIT, placement.num_devices), time_limit_s=max(time_limit_s, 0.1))
        if found.period_proof is not Proof.OPTIMAL:
            self.in_time = False
        period_s = _slowest(candidate) if found.period is None else float(found.period) * self.unit
        return max(period_s, candidate.least)


def _slowest(candidate: Candidate) -> float:
    """Return the period with one role after the other, which is always possible."""
    return max(candidate.circle + sum(candidate.seconds.values()), candidate.least)


def candidates(roles: Roles, devices: Sequence[tuple[int, Device]], budget_eur: float | None = None) -> list[Candidate]:
    """Return all fleets that fit on some of these devices, within ``budget_eur`` an hour. Raises ConfigError if none does."""
    if budget_eur is not None and (unpriced := [device.name for _, device in devices if device.usd_per_hour is None]):
        raise ConfigError(f"no price is known for {', '.join(unpriced)}, so --budget means nothing: leave it out")
    if any(device.is_cpu for _, device in devices):
        if len(devices) > 1:
            raise ConfigError("--devices has CPU beside others; expected cores alone: GPUs come with theirs")
        if found := list(_on_cores(roles, *devices[0])):
            return found
        raise ConfigError(_nothing_fits(roles, devices, None))
    found = [each for placed in _placements(roles, devices, budget_eur) for each in fleets(roles, placed)]
    if not found:
        raise ConfigError(_nothing_fits(roles, devices, budget_eur))
    return found


def _partitions(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not roles:
        yield ()
        return
    first, *rest = roles
    for others in _partitions(rest):
        yield ((first,), *others)
        for place, group in enumerate(others):
            yield (*others[:place], (first, *group), *others[place + 1 :])


def _placements(
    roles: Roles, devices: Sequence[tuple[int, Device]], budget_eur: float | None
) -> Iterator[tuple[Group, ...]]:
    """Yield who has which devices. A generator with devices of its own gets all that are left, of every kind."""
    names = ["generator", "learner", *["reference"][: roles.work.has_reference], *["value"][: roles.work.has_critic]]
    for partition in _partitions(names):
        fixed = [group for group in partition if group != ("generator",)]
        sizes = [(n, device) for most, device in devices for n in _sizes(most)]
        for chosen in product(sizes, repeat=len(fixed)):
            left = {device: most - sum(n for n, d in chosen if d == device) for most, device in devices}
            if min(left.values()) < 0:
                continue
            groups = tuple(Group(names, (given,)) for names, given in zip(fixed, chosen, strict=True))
            if ("generator",) not in partition:
                if budget_eur is None or (price_eur(list(chosen)) or 0.0) <= budget_eur:
                    yield groups
                continue
            for rest in _rests(left, list(chosen), budget_eur):
                yield (Group(("generator",), rest), *groups)


def _sizes(most: int) -> list[int]:
    """Return the sizes of a group: any within a host, then doubled, and all."""
    return sorted({*range(1, min(most, PER_HOST) + 1), *_doubled(most), most})


def _doubled(most: int) -> list[int]:
    """Return the powers of two from a host on."""
    return [1 << n for n in range(most.bit_length()) if 1 << n >= PER_HOST]


def _rests(left: Mapping[Device, int], spent: list[tuple[int, Device]], budget_eur: float | None) -> Iterator[Counts]:
    """Yield the devices that generators may have: of each kind all that remain, a power of two from a host on, or none,
    since slow ones may hold up a circle. With a budget every number, and of the last kind none or all that there is
    money for."""
    kinds = list(left)
    if budget_eur is None:
        choices = product(*(dict.fromkeys((number, *_doubled(number), 0)) for number in left.values()))
    else:
        choices = _affordable(left, spent, budget_eur)
    for numbers in choices:
        if rest := tuple((number, device) for number, device in zip(numbers, kinds, strict=True) if number):
            yield rest


def _affordable(
    left: Mapping[Device, int], spent: list[tuple[int, Device]], budget_eur: float
) -> Iterator[tuple[int, ...]]:
    *others, last = left
    for numbers in product(*(range(left[device] + 1) for device in others)):
        money = budget_eur - (price_eur([*spent, *zip(numbers, others, strict=True)]) or 0.0)
        if money >= 0.0:
            most = min(left[last], int(money / (price_eur([(1, last)]) or 1.0) + 1e-9))
            for number in dict.fromkeys((most, 0)):
                yield (*numbers, number)


def fleets(roles: Roles, groups: tuple[Group, ...]) -> Iterator[Candidate]:
    """Yield the fleets of a placement: with each split of the generators, and each staleness."""
    by_role = {role: group for group in groups for role in group.roles}
    mine = by_role["generator"]
    shares = mine.roles != ("generator",)
    for tensors in product(*([n for n in (1, 2, 4, 8) if n <= number] for number, _ in mine.devices)):
        if any(roles.model.heads % tensor for tensor in tensors):
            continue
        taken = dict.fromkeys(by_role, 0.0)
        if shares:
            taken["generator"] = roles.generator_bytes(tensors[0]) / USED
        trained = dict[str, Trained | None]()
        for role in ("learner", "value"):
            if role in by_role:
                trained[role] = _fastest(roles, by_role[role], taken, role)
                taken[role] = 0.0 if (fit := trained[role]) is None else fit.num_bytes / USED
        learner = trained["learner"]
        if (
            learner is None
            or ("value" in trained and trained["value"] is None)
            or not _scorer_fits(roles, by_role, taken)
        ):
            continue
        taken["generator"] = 0.0
        engines = list[Engines]()
        for (number, device), tensor in zip(mine.devices, tensors, strict=True):
            room = (device.num_bytes - sum(taken[role] for role in mine.roles)) * USED
            if number // tensor and (slots := roles.slots(tensor, room)):
                engines.append(Engines(device, number // tensor, tensor, slots))
        if len(engines) == len(mine.devices):
            for staleness in range(roles.work.most_stale + 1):
                of = partial(
                    _candidate,
                    roles,
                    groups=groups,
                    engines=tuple(engines),
                    learner=learner,
                    critic=trained.get("value"),
                    staleness=staleness,
                )
                yield _widened(of, roles.work)


def _fastest(roles: Roles, group: Group, taken: Mapping[str, float], role: str) -> Trained | None:
    """Return the fastest split of a learner or critic that fits beside what the group's other roles take. Of memory
    that is shared with caches it gets at most half of what is free, if that is enough."""
    (number, device), is_value = group.devices[0], role == "value"
    left = device.num_bytes - sum(taken[other] for other in group.roles if other != role)
    if "reference" in group.roles:
        left -= roles.scorer_bytes() / USED
    for room in [left / 2, left] if "generator" in group.roles else [left]:
        fits = [
            fit
            for split in splits(number, roles.heads_to_share(is_value=is_value))
            if (fit := roles.trained(split, room, is_value=is_value))
        ]
        # programs are made for those alone that might be the fastest
        alone = {fit: _trained_s(roles, device, fit, is_value=is_value, sends=False) for fit in fits}
        best, best_s = None, math.inf
        for fit in sorted(fits, key=alone.__getitem__):
            if alone[fit] < best_s and (fit_s := _trained_s(roles, device, fit, is_value=is_value)) < best_s:
                best, best_s = fit, fit_s
        if best is not None:
            return best
    return None


def _trained_s(roles: Roles, device: Device, fit: Trained, *, is_value: bool = False, sends: bool = True) -> float:
    work, costs = roles.work, roles.learner(device, fit, is_value=is_value, sends=sends)
    return costs.whole_update_s(work.responses, work.tokens, work.steps)


def _scorer_fits(roles: Roles, by_role: Mapping[str, Group], taken: Mapping[str, float]) -> bool:
    if "reference" not in by_role:
        return True
    group = by_role["reference"]
    others = sum(taken[role] for role in group.roles if role != "reference")
    return roles.scorer_bytes() / USED + others <= group.devices[0][1].num_bytes


def _widened(of: Callable[[Workload], Candidate], work: Workload) -> Candidate:
    """Return the candidate with the run's windows, or longer ones where chunks hold it up: each costs the ledger's server
    a call, and scorers read the context again."""
    found = of(work)
    while work.may_widen and work.window < work.longest:
        work = work.widened()
        wider = of(work)
        if wider.least > _WORTH * found.least:
            break
        found = wider
    return found


def _candidate(
    roles: Roles,
    work: Workload,
    groups: tuple[Group, ...],
    engines: tuple[Engines, ...],
    learner: Trained,
    critic: Trained | None,
    staleness: int,
) -> Candidate:
    by_role = {role: group for group in groups for role in group.roles}
    number, device = by_role["learner"].devices[0]
    learner_s = _trained_s(roles, device, learner)

    def generators(in_flight: float) -> tuple[list[GeneratorCosts], float]:
        """Return what each kind costs with so many responses in all slots, and the seconds of all for an update."""
        most = in_flight / sum(each.number for each in engines)
        costs = [roles.generator(e.device, e.tensor, max(1, min(e.slots, round(most)))) for e in engines]
        rate = sum(each.number / roles.response_s(cost) for each, cost in zip(engines, costs, strict=True))
        return costs, work.generated / rate

    # credit is for so many; while it learns the learner has an update's, and of the next one half wait on average
    ahead = (staleness + 1) * work.responses
    costs, generated_s = generators(ahead)
    if staleness:
        costs, generated_s = generators(ahead - work.responses * (0.5 + min(1.0, learner_s / generated_s)))
    # on-policy the last response is alone in the end; else its slots' neighbours are replaced
    beside = [1 if staleness == 0 else cost.slots for cost in costs]
    step_s = max(cost.decode_s(n, n * work.mean_context) for cost, n in zip(costs, beside, strict=True))
    engines = tuple(Engines(e.device, e.number, e.tensor, cost.slots) for e, cost in zip(engines, costs, strict=True))
    seconds = {"generator": generated_s, "weights": roles.weights_s(), "learner": learner_s}
    if "reference" in by_role:
        number, device = by_role["reference"].devices[0]
        seconds["reference"] = seconds["reference scores"] = roles.scored_s(device, number, work)
    if critic is not None:
        number, device = by_role["value"].devices[0]
        seconds["value scores"] = roles.scored_s(device, number, work)
        seconds["value"] = seconds["value scores"] + _trained_s(roles, device, critic, is_value=True)
    floors = {"reward": roles.rewarded_s(), "ledger": roles.ledger_s(work)}
    longest_s = work.longest_expected * step_s
    return Candidate(groups, engines, learner, critic, staleness, work.window, seconds, longest_s, floors)


def _on_cores(roles: Roles, cores: int, device: Device) -> Iterator[Candidate]:
    """Yield the fleets on cores, which all processes share: as many generators as there are cores, at most."""
    names = ["learner", *["reference"][: roles.work.has_reference], *["value"][: roles.work.has_critic]]
    slots, memory = roles.config.generation.num_slots, cores * device.num_bytes
    # what was measured beside more workers than cores had a share of one
    busy = roles.measured.busy if roles.measured is not None else 0.0
    alone = min(1.0, cores / busy) if busy else 1.0
    for number in range(1, cores + 1):
        room = memory - number * roles.engine_bytes(1, slots) / USED
        learner = roles.trained(Split("torch", 1), room)
        critic = roles.trained(Split("torch", 1), room, is_value=True) if "value" in names else None
        if learner is None or ("value" in names and critic is None):
            continue
        groups = (Group(("generator",), ((number, device),)), *(Group((name,), ((1, device),)) for name in names))
        for staleness in range(roles.work.most_stale + 1):
            engines = (Engines(device, number, 1, slots),)
            found = _candidate(roles, roles.work, groups, engines, learner, critic, staleness)
            seconds = {name: alone * value for name, value in found.seconds.items()}
            reward_s = alone * found.floors["reward"]
            busy_s = number * seconds["generator"] + reward_s + sum(seconds[name] for name in names)
            floors = {**found.floors, "reward": reward_s, f"the {cores} cores": busy_s / cores}
            longest_s = alone * found.longest_s
            yield Candidate(
                groups, engines, learner, critic, staleness, found.window, seconds, longest_s, floors, cores
            )


def _nothing_fits(roles: Roles, devices: Sequence[tuple[int, Device]], budget_eur: float | None) -> str:
    """Say which device lacks how much, and the nearest change that fits."""
    if budget_eur is not None and not list(_placements(roles, devices, budget_eur)):
        cheapest = min(price_eur([(1, device)]) or 0.0 for _, device in devices)
        return (
            f"a budget of {budget_eur:g} EUR an hour rents nothing: the cheapest of these devices costs {cheapest:.2f}"
        )
    number, device = max(devices, key=lambda each: each[0] * each[1].memory_gb)

    def over(ranks: int) -> float:
        """Return the GB that the best split lacks on each device."""
        tokens = max(int(roles.work.prompt_tokens) + roles.work.longest, 1024)
        needs = [roles.need(split) for split in splits(ranks, roles.heads_to_share())]
        least = min(need.fixed + tokens * need.per_token(need.layers) for need in needs)
        return (least / USED - device.num_bytes) / 1e9

    lacks = over(number)
    if lacks > 0:
        enough = next((n for n in (1 << k for k in range(13)) if n > number and over(n) <= 0), None)
        more = f"the learner would fit on {enough} of them" if enough else "no number of them is enough"
        return (
            f"no plan fits: a learner over all {number} {device.name} lacks {lacks:.1f} GB on each of them, which has "
            f"{device.memory_gb:g}; {more}, and needs less with learner.lora.rank, a shorter generation.max_response_tokens "
            "or a smaller model"
        )
    weights = min(roles.generator_bytes(t) for t in (1, 2, 4, 8) if t <= number and roles.model.heads % t == 0)
    short = (weights / USED - device.num_bytes) / 1e9
    fits_alone = "they fit only one by one" if short <= 0 else f"its weights alone lack {short:.1f} GB"
    return (
        f"no plan fits: beside the learner, a generator has no room on {number} {device.name} of {device.memory_gb:g} GB "
        f"({fits_alone}); take {2 * number} of them, or a shorter generation.max_response_tokens"
    )
