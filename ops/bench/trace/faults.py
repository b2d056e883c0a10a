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


def _change(*roles: str, **values: object) -> Injection:
    """Return a fault that sets attributes of one of these roles' workers. A value may be drawn by a function of the
    random stream."""

    def inject(fleet: EmulatedFleet) -> frozenset[str]:
        nodes = [node for role in roles for node in fleet.by_role[role]]
        node = fleet.rng.choice(nodes) if len(nodes) > 1 else nodes[0]
        for name, value in values.items():
            setattr(node, name, value(fleet.rng) if callable(value) else value)
        return frozenset({node.name})

    return inject


def _frozen(fleet: EmulatedFleet) -> frozenset[str]:
    node = _any(fleet, *_WORKERS)
    node.is_frozen = True

    def thaw() -> None:
        node.is_frozen = False

    fleet.at(fleet.rng.uniform(25, 60), thaw)
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


FAULTS: dict[str, Injection] = {
    "slow generator": _change("generator", factor=lambda rng: rng.uniform(4, 8)),
    "slow scorer": _change("reward", "reference", "value", factor=lambda rng: rng.uniform(5, 10)),
    "hung worker": _change(*_WORKERS, is_hung=True),
    "killed worker": _change(*_WORKERS, is_dead=True),
    "frozen worker": _frozen,
    "learner hung": _change("learner", is_hung=True),
    "learner killed": _change("learner", is_dead=True),
    "ledger stopped": _change("ledger", is_frozen=True),
    "reward errors": _change("reward", error_share=lambda rng: rng.uniform(0.6, 1.0)),
    "edge cut": _cut_link,
    "slow link": _slow_link,
    "weights lost": _lost_weights,
    "learner waits for disk": _learner_disk,
    "judge down": _judge_down,
    "sender blocked": _change("generator", is_deaf_to_room=True),
}


def _pause(fleet: EmulatedFleet, seconds: float) -> None:
    fleet.is_paused = True

    def resume() -> None:
        fleet.is_paused = False
        for node in fleet.by_role["generator"]:
            fleet.sample(node)

    fleet.at(seconds, resume)


def _collection(fleet: EmulatedFleet) -> None:
    """Pauses of two seconds for garbage collection, in one worker after another."""

    def pause() -> None:
        node = _any(fleet, *_WORKERS, "learner")
        if node.works:
            node.is_hung = True
            fleet.at(2.0, lambda: setattr(node, "is_hung", False))
        fleet.at(fleet.rng.uniform(4, 8), pause)

    pause()


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


def _set(**values: float) -> Callable[[EmulatedFleet], None]:
    def control(fleet: EmulatedFleet) -> None:
        for name, value in values.items():
            setattr(fleet, name, value)

    return control


CONTROLS: dict[str, Callable[[EmulatedFleet], None]] = {
    "nothing": lambda _: None,
    "long tail": _set(tail_share=0.05, tail_factor=6.0),
    "weight sync": _set(sync_pause_s=4.0),
    "garbage collection": _collection,
    "slow ledger for all": _set(ledger_latency_s=0.05),
    "double load": _set(pace=2.0),
    "evaluation": _evaluation,
    "scale up": _scale_up,
    "scale down": _scale_down,
    "slow tool": _slow_tool,
    "a person pauses": lambda fleet: _pause(fleet, fleet.rng.uniform(20, 60)),
    "idle fleet": lambda fleet: _pause(fleet, 1e6),
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
