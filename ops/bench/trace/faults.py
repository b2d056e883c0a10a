"""Faults and negative controls of an emulated fleet. Only this module knows the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ops.bench.trace.model import EmulatedFleet, Link, Node

Injection = Callable[[EmulatedFleet], frozenset[str]]
"""Breaks the fleet now, and returns the components that are right to blame."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The fault or control of one run."""

    kind: str
    onset_s: float
    components: set[str]
    """Blaming any of them is right. Empty if the fleet is healthy: any blame is wrong."""


def _any(fleet: EmulatedFleet, *roles: str) -> Node:
    return fleet.rng.choice([node for role in roles for node in fleet.by_role[role]])


_WORKERS = ("generator", "reward", "reference", "value")


def _busy_link(fleet: EmulatedFleet) -> Link:
    ways = [way for way in fleet.links.values() if way.sender.role == "generator" and way.received > 3]
    return fleet.rng.choice(ways)


def _slow_generator(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, "generator")
    node.factor = fleet.rng.uniform(4, 8)
    return frozenset({node.name})


def _slow_scorer(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, "reward", "reference", "value")
    node.factor = fleet.rng.uniform(5, 10)
    return frozenset({node.name})


def _hung(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, *_WORKERS)
    node.is_hung = True
    return frozenset({node.name})


def _killed(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, *_WORKERS)
    node.is_dead = True
    return frozenset({node.name})


def _frozen(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, *_WORKERS)
    node.is_frozen = True

    def thaw() -> None:
        node.is_frozen = False

    fleet.at(fleet.rng.uniform(25, 60), thaw)
    return frozenset({node.name})


def _learner_hung(fleet: EmulatedFleet) -> frozenset[str]:
    fleet.learner.is_hung = True
    return frozenset({fleet.learner.name})


def _learner_killed(fleet: EmulatedFleet) -> frozenset[str]:
    fleet.learner.is_dead = True
    return frozenset({fleet.learner.name})


def _ledger_stopped(fleet: EmulatedFleet) -> frozenset[str]:
    fleet.ledger.is_frozen = True
    return frozenset({fleet.ledger.name})


def _reward_errors(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, "reward")
    node.error_share = fleet.rng.uniform(0.6, 1.0)
    return frozenset({node.name})


def _cut_link(fleet: EmulatedFleet) -> frozenset[str]:
    way = _busy_link(fleet)
    way.is_cut = True
    return frozenset({f"{way.sender.name}>{way.receiver.name}"})


def _slow_link(fleet: EmulatedFleet) -> frozenset[str]:
    way = _busy_link(fleet)
    way.latency_s = fleet.rng.uniform(6, 12)
    return frozenset({f"{way.sender.name}>{way.receiver.name}"})


def _lost_weights(fleet: EmulatedFleet) -> frozenset[str]:
    way = fleet.link(fleet.learner, _any(fleet, "generator"))
    way.is_cut = True
    return frozenset({f"{way.sender.name}>{way.receiver.name}"})


def _learner_disk(fleet: EmulatedFleet) -> frozenset[str]:
    learner = fleet.learner

    def begin() -> None:
        if not learner.held:
            fleet.at(0.1, begin)
            return
        learner.is_hung, learner.busy_word = True, "disk"

    begin()
    return frozenset({learner.name})


def _judge_down(fleet: EmulatedFleet) -> frozenset[str]:
    """Every reward worker waits for the judge, which is outside the fleet."""
    for node in fleet.by_role["reward"]:
        node.is_hung, node.busy_word, node.idle_word = True, "endpoint", "endpoint"
    return frozenset(node.name for node in fleet.by_role["reward"])


def _sender_blocked(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, "generator")
    node.is_deaf_to_room = True
    return frozenset({node.name})


FAULTS: dict[str, Injection] = {
    "slow generator": _slow_generator,
    "slow scorer": _slow_scorer,
    "hung worker": _hung,
    "killed worker": _killed,
    "frozen worker": _frozen,
    "learner hung": _learner_hung,
    "learner killed": _learner_killed,
    "ledger stopped": _ledger_stopped,
    "reward errors": _reward_errors,
    "edge cut": _cut_link,
    "slow link": _slow_link,
    "weights lost": _lost_weights,
    "learner waits for disk": _learner_disk,
    "judge down": _judge_down,
    "sender blocked": _sender_blocked,
}


def _pause(fleet: EmulatedFleet, seconds: float) -> None:
    fleet.is_paused = True

    def resume() -> None:
        fleet.is_paused = False
        for node in fleet.by_role["generator"]:
            fleet.sample(node)

    fleet.at(seconds, resume)


def _person_pauses(fleet: EmulatedFleet) -> None:
    _pause(fleet, fleet.rng.uniform(20, 60))


def _idle(fleet: EmulatedFleet) -> None:
    _pause(fleet, 1e6)


def _long_tail(fleet: EmulatedFleet) -> None:
    fleet.tail_share, fleet.tail_factor = 0.05, 6.0


def _weight_sync(fleet: EmulatedFleet) -> None:
    fleet.sync_pause_s = 4.0


def _collection(fleet: EmulatedFleet) -> None:
    """Pauses of two seconds for garbage collection, in one worker after another."""

    def pause() -> None:
        node = _any(fleet, *_WORKERS, "learner")
        if node.works:
            node.is_hung = True
            fleet.at(2.0, lambda: setattr(node, "is_hung", False))
        fleet.at(fleet.rng.uniform(4, 8), pause)

    pause()


def _slow_ledger(fleet: EmulatedFleet) -> None:
    fleet.ledger_latency_s = 0.05


def _double_load(fleet: EmulatedFleet) -> None:
    fleet.pace = 2.0


def _evaluation(fleet: EmulatedFleet) -> None:
    fleet.is_evaluating = True

    def end() -> None:
        fleet.is_evaluating = False

    fleet.at(fleet.rng.uniform(20, 40), end)


def _scale_up(fleet: EmulatedFleet) -> None:
    for index in range(2):
        fleet.add(Node(f"generator-{900 + index}", "generator", 4, 4.0))


def _scale_down(fleet: EmulatedFleet) -> None:
    def leave(node: Node) -> None:
        if node.held:
            fleet.at(1.0, partial(leave, node))
            return
        fleet.nodes.pop(node.name)
        fleet.by_role["generator"].remove(node)

    for node in fleet.rng.sample(fleet.by_role["generator"], 2):
        node.is_leaving = True
        fleet.at(3.0, partial(leave, node))


def _slow_tool(fleet: EmulatedFleet) -> None:
    """One generator's trajectories, one after another, wait twenty seconds for a tool."""
    node = _any(fleet, "generator")

    def call() -> None:
        waiting = next(iter(node.held), None)
        if waiting is not None:
            node.outside.add(waiting)
            node.blocked[waiting] = "endpoint"

            def answer() -> None:
                node.outside.discard(waiting)
                node.blocked.pop(waiting, None)

            fleet.at(20.0, answer)
        fleet.at(25.0, call)

    call()


CONTROLS: dict[str, Callable[[EmulatedFleet], None]] = {
    "nothing": lambda _: None,
    "long tail": _long_tail,
    "weight sync": _weight_sync,
    "garbage collection": _collection,
    "slow ledger for all": _slow_ledger,
    "double load": _double_load,
    "evaluation": _evaluation,
    "scale up": _scale_up,
    "scale down": _scale_down,
    "slow tool": _slow_tool,
    "a person pauses": _person_pauses,
    "idle fleet": _idle,
}


def inject(fleet: EmulatedFleet, kind: str, *, earliest_s: float = 70.0, latest_s: float = 110.0) -> Truth:
    """Plan a fault or a control at a random moment in this range; return the truth, whose components are filled in
    when it happens."""
    onset_s = round(fleet.rng.uniform(earliest_s, latest_s), 3)
    components = set[str]()
    if kind in CONTROLS:
        fleet.at(onset_s, lambda: CONTROLS[kind](fleet))
        return Truth(kind, onset_s, components)
    fleet.at(onset_s, lambda: components.update(FAULTS[kind](fleet)))
    return Truth(kind, onset_s, components)
