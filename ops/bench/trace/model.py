"""A fleet in virtual time: generators, scorers, ledger, learner and weights, as events on a heap.

A generator samples trajectories in slots, under an admission credit. It sends each to a reward, a reference and
a value worker, which write their scores to the ledger. A trajectory with all scores is ready. The learner
claims a batch, makes a step, returns the credit, and publishes weights to every generator. Mailboxes are
bounded: a sender has at most ``WINDOW`` unacknowledged messages on a link, and otherwise waits with a full
outbox. Every draw comes from one seeded random number generator."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW = 3
MAX_WAYS = 4
"""Largest number of workers of one role that a generator has links to."""
SCORERS = ("reward", "reference", "value")
SHAPES = {
    14: {"generator": 8, "reward": 2, "reference": 1, "value": 1, "learner": 1, "ledger": 1},
    26: {"generator": 16, "reward": 4, "reference": 2, "value": 2, "learner": 1, "ledger": 1},
    98: {"generator": 72, "reward": 12, "reference": 6, "value": 6, "learner": 1, "ledger": 1},
}
"""Number of workers of each role, by the size of the fleet."""
_LATENCY_S = 0.004
_SCORER_LOAD = 0.55
_STEP_SHARE = 0.6
"""The learner's step, as a share of the time between two batches."""


@dataclass(eq=False, slots=True)
class Item:
    number: int
    size: float
    """Relative to the median trajectory."""
    missing: set[str]
    is_evaluation: bool = False


@dataclass(eq=False, slots=True)
class Link:
    """One sender's way to one receiver."""

    sender: Node
    receiver: Node
    window: float = WINDOW
    latency_s: float = _LATENCY_S
    is_cut: bool = False
    """Messages and acknowledgements vanish."""
    produced: int = 0
    sent: int = 0
    received: int = 0
    done: int = 0
    acknowledged: int = 0
    outbox: deque[tuple[Item, Callable[[], None] | None]] = field(default_factory=deque)
    open: dict[Item, float] = field(default_factory=dict)
    """Messages that the receiver has not finished, with the time when they were produced."""

    @property
    def has_credit(self) -> bool:
        return self.sent - self.acknowledged < self.window


@dataclass(eq=False, slots=True)
class Node:
    name: str
    role: str
    slots: int
    service_s: float
    """Seconds for an item of size 1."""
    mailbox: deque[tuple[Item, Link]] = field(default_factory=deque)
    held: dict[Item, float] = field(default_factory=dict)
    """Items in service or waiting for room, with the time when they were taken."""
    blocked: dict[Item, str] = field(default_factory=dict)
    """Held items that wait, with the word for what they wait for."""
    outside: set[Item] = field(default_factory=set)
    done: int = 0
    errors: int = 0
    version: int = -1
    service_sum_s: float = 0.0
    service_size: float = 0.0
    factor: float = 1.0
    error_share: float = 0.0
    is_dead: bool = False
    is_frozen: bool = False
    is_hung: bool = False
    is_deaf_to_room: bool = False
    """Its sending loop is blocked: it produces messages and does not send them."""
    is_leaving: bool = False
    idle_word: str = "input"
    busy_word: str = "compute"

    @property
    def works(self) -> bool:
        """Whether its main loop turns."""
        return not (self.is_dead or self.is_frozen or self.is_hung)

    def word(self) -> str:
        """Return what it would report that it waits for."""
        if self.is_leaving:
            return "draining"
        if any(item not in self.blocked for item in self.held):
            return self.busy_word
        if self.blocked:
            return next(iter(self.blocked.values()))
        return self.idle_word


class EmulatedFleet:
    def __init__(self, size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.nodes: dict[str, Node] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.by_role: dict[str, list[Node]] = defaultdict(list)
        self.tail_share, self.tail_factor = 0.01, 4.0
        self.pace = 1.0
        """Speed of the generators: 2 is twice the load."""
        self.is_paused = False
        self.is_evaluating = False
        self.sync_pause_s = 0.0
        self.ledger_latency_s = 0.002
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._turn: dict[str, int] = defaultdict(int)
        shape = SHAPES[size]
        rate = float(shape["generator"])
        self.batch = max(8, int(4 * rate))
        self.admitted = 0
        self.limit = 3 * self.batch
        self.ready: deque[Item] = deque()
        for role, number in shape.items():
            slots = 4 if role == "generator" else 1
            service = {"generator": 4.0, "ledger": 0.0005, "learner": _STEP_SHARE * self.batch / rate}.get(
                role, _SCORER_LOAD * number / rate
            )
            for index in range(number):
                name = role if number == 1 else f"{role}-{index}"
                self.add(Node(name, role, slots, service))
        self.learner, self.ledger = self.by_role["learner"][0], self.by_role["ledger"][0]
        self._is_stepping = False

    # -- events ---------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._numbers, action))

    def run(self, until_s: float) -> None:
        """Run all events up to this time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until_s

    def add(self, node: Node) -> None:
        self.nodes[node.name] = node
        self.by_role[node.role].append(node)
        if node.role == "generator":
            node.version = max((other.version for other in self.by_role["generator"]), default=0)
            node.version = max(0, node.version)
            self.at(self.rng.random(), lambda: self.sample(node))

    def link(self, sender: Node, receiver: Node) -> Link:
        key = (sender.name, receiver.name)
        found = self.links.get(key)
        if found is None:
            found = Link(sender, receiver)
            if sender.role == "learner" or receiver.role in ("learner", "ledger"):
                found.window = float("inf")
            self.links[key] = found
        return found

    # -- generators -----------------------------------------------------------------------------

    def sample(self, node: Node) -> None:
        if not node.works:
            return
        node.idle_word = "input" if self.is_paused else "credit"
        while len(node.held) < node.slots and not self.is_paused and not node.is_leaving:
            if self.admitted >= self.limit and not self.is_evaluating:
                return
            size = self.rng.lognormvariate(0, 0.5) * (self.tail_factor if self.rng.random() < self.tail_share else 1)
            self._numbers += 1
            item = Item(self._numbers, size, set(SCORERS), is_evaluation=self.is_evaluating)
            self.admitted += not item.is_evaluation
            node.held[item] = self.now_s
            self._serve(node, item, lambda item=item: self._sampled(node, item))

    def _serve(self, node: Node, item: Item, then: Callable[[], None]) -> None:
        size = item.size if node.role == "generator" else self.rng.lognormvariate(0, 0.3)
        pace = self.pace if node.role == "generator" else 1.0
        seconds = node.service_s * size * node.factor / pace

        def end() -> None:
            if not node.works or item in node.outside:
                # a frozen or hung worker later continues where it was
                if not node.is_dead:
                    self.at(0.25, end)
                return
            if self.rng.random() < node.error_share:
                node.errors += 1
                self._serve(node, item, then)
                return
            node.service_sum_s += seconds
            node.service_size += size
            then()

        self.at(seconds, end)

    def _sampled(self, node: Node, item: Item) -> None:
        node.done += 1
        waits = len(SCORERS)

        def accepted() -> None:
            nonlocal waits
            waits -= 1
            if not waits:
                self._release(node, item)

        for role in SCORERS:
            self._offer(node, item, role, accepted)

    def _release(self, node: Node, item: Item) -> None:
        node.held.pop(item, None)
        node.blocked.pop(item, None)
        if node.role == "generator":
            self.sample(node)
        else:
            self._take(node)

    # -- messages -------------------------------------------------------------------------------

    def _offer(self, node: Node, item: Item, role: str, accepted: Callable[[], None]) -> None:
        receivers = self._reachable(node, [other for other in self.by_role[role] if not other.is_leaving])
        self._turn[role] += 1
        turn = self._turn[role]
        ways = [self.link(node, receivers[(turn + i) % len(receivers)]) for i in range(len(receivers))]
        way = next((way for way in ways if way.has_credit and not way.outbox), ways[0])
        self.produce(way, item, accepted)

    def _reachable(self, node: Node, receivers: list[Node]) -> list[Node]:
        """Return the few receivers that a generator has links to."""
        first = int(node.name.rpartition("-")[2]) if node.name[-1].isdigit() else 0
        return [receivers[(first + i) % len(receivers)] for i in range(min(MAX_WAYS, len(receivers)))]

    def produce(self, way: Link, item: Item, accepted: Callable[[], None] | None) -> None:
        way.produced += 1
        way.open[item] = self.now_s
        way.outbox.append((item, accepted))
        if item in way.sender.held:
            way.sender.blocked[item] = f"room:{way.receiver.name}"
        self.send(way)

    def send(self, way: Link) -> None:
        """Send what the credit allows."""
        sender = way.sender
        while way.outbox and way.has_credit and not (sender.is_dead or sender.is_frozen or sender.is_deaf_to_room):
            item, accepted = way.outbox.popleft()
            way.sent += 1
            sender.blocked.pop(item, None)
            if not way.is_cut:
                self.at(way.latency_s, lambda item=item: self._deliver(way, item))
            if accepted is not None:
                accepted()

    def _deliver(self, way: Link, item: Item) -> None:
        receiver = way.receiver
        if receiver.is_dead or way.is_cut:
            return
        if receiver.is_frozen:
            self.at(0.25, lambda: self._deliver(way, item))
            return
        way.received += 1
        if receiver.role == "generator":
            self._take_weights(way, item)
            return
        receiver.mailbox.append((item, way))
        self._take(receiver)

    def _handled(self, way: Link, item: Item) -> None:
        way.done += 1
        way.open.pop(item, None)

        def acknowledged() -> None:
            if not way.is_cut:
                way.acknowledged += 1
                self.send(way)

        self.at(way.latency_s, acknowledged)

    # -- scorers and the ledger -----------------------------------------------------------------

    def _take(self, node: Node) -> None:
        while node.works and node.mailbox and len(node.held) < node.slots and node.role != "learner":
            item, way = node.mailbox.popleft()
            # a copy: the same item is with three scorers at once
            own = Item(item.number, item.size, item.missing, item.is_evaluation)
            node.held[own] = self.now_s
            self._serve(node, own, lambda item=item, own=own, way=way: self._scored(node, item, own, way))

    def _scored(self, node: Node, item: Item, own: Item, way: Link) -> None:
        node.done += 1
        self._handled(way, item)
        node.blocked[own] = "ledger"
        self._write(node, item, own)

    def _write(self, node: Node, item: Item, own: Item) -> None:
        def answered() -> None:
            if not self.ledger.works:
                self.at(0.25, answered)
                return
            if not node.works:
                if not node.is_dead:
                    self.at(0.25, answered)
                return
            item.missing.discard(node.role)
            self.ledger.done += 1
            if not item.missing and not item.is_evaluation:
                self.ready.append(item)
                self.claim()
            self._release(node, own)

        self.at(self.ledger_latency_s, answered)

    # -- the learner ----------------------------------------------------------------------------

    def claim(self) -> None:
        """Begin a step if a batch is ready."""
        learner = self.learner
        if self._is_stepping or not learner.works or len(self.ready) < self.batch:
            return
        if not self.ledger.works:
            learner.idle_word = "ledger"
            self.at(0.25, self.claim)
            return
        learner.idle_word = "input"
        self._is_stepping = True
        items = [self.ready.popleft() for _ in range(self.batch)]
        self._numbers += 1
        step = Item(self._numbers, 1.0, set())
        learner.held[step] = self.now_s
        self._serve(learner, step, lambda: self._stepped(step, len(items)))

    def _stepped(self, step: Item, number: int) -> None:
        learner = self.learner
        learner.held.pop(step)
        learner.done += 1
        learner.version = max(0, learner.version) + 1
        self._is_stepping = False
        self.admitted -= number
        for node in list(self.by_role["generator"]):
            way = self.link(learner, node)
            self._numbers += 1
            self.produce(way, Item(self._numbers, float(learner.version), set()), None)
            self.at(_LATENCY_S, lambda node=node: self.sample(node))
        self.claim()

    def _take_weights(self, way: Link, item: Item) -> None:
        node = way.receiver

        def applied() -> None:
            if not node.works:
                if not node.is_dead:
                    self.at(0.5, applied)
                return
            node.version = max(node.version, int(item.size))
            self._handled(way, item)
            self.sample(node)

        self.at(0.05 + self.sync_pause_s * self.rng.random(), applied)
