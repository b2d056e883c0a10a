"""Records an emulated fleet as an observer would: rows of worker states and links.

Each worker reports every ``interval_s``, at its own phase. A dead or frozen worker reports nothing. The
observer reports links for both ends."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from ops.bench.trace.model import EmulatedFleet, Link, Node
from pipeline.fleet.flow.rows import LinkRow, StateRow


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of one run: all that detectors may read."""

    states: list[StateRow]
    links: list[LinkRow]
    interval_s: float
    duration_s: float


def record(fleet: EmulatedFleet, duration_s: float, *, interval_s: float = 1.0) -> Tables:
    states, links = list[StateRow](), list[LinkRow]()

    def report(node: Node) -> None:
        if fleet.nodes.get(node.name) is not node:
            return
        if not (node.is_dead or node.is_frozen):
            states.append(_state(fleet, node))
        fleet.at(interval_s, lambda: report(node))

    seen = set[str]()

    def observe() -> None:
        for node in fleet.nodes.values():
            if node.name not in seen and node.role != "ledger":
                seen.add(node.name)
                fleet.at(fleet.rng.random() * interval_s, lambda node=node: report(node))
        links.extend(_link(fleet, link) for link in fleet.links.values())
        fleet.at(interval_s, observe)

    fleet.at(0.0, observe)
    fleet.run(duration_s)
    return Tables(states, links, interval_s, duration_s)


def _state(fleet: EmulatedFleet, node: Node) -> StateRow:
    oldest = min(node.held.values(), default=fleet.now_s)
    queued = len(fleet.ready) if node.role == "learner" else len(node.mailbox)
    outbox = sum(1 for word in node.blocked.values() if word.startswith("room"))
    return StateRow(
        round(fleet.now_s, 3), node.name, node.role, node.word(), float(node.done), float(len(node.held)),
        round(fleet.now_s - oldest, 3), float(queued), float(outbox), float(node.errors), float(node.version),
    )  # fmt: skip


def _link(fleet: EmulatedFleet, link: Link) -> LinkRow:
    oldest = min(link.open.values(), default=fleet.now_s) if link.open else fleet.now_s
    return LinkRow(
        round(fleet.now_s, 3), link.sender.name, link.receiver.name, float(link.produced), float(link.sent),
        float(link.received), float(link.done), round(fleet.now_s - oldest, 3), nan,
    )  # fmt: skip
