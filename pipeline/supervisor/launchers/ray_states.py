"""The state of one worker on Ray, according to its actor's answers. Pure: waits for nothing, calls
no Ray.

Ray replaces a lost actor, but the worker in it starts again only on an order of the supervisor,
whose budgets count the loss. The order is carried out by giving the actor the token, which no other
incarnation of the actor can decrypt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.ids import Role

# Messages between a supervisor, its Ray driver and the workers' actors.
#
# Requests and replies are lines of JSON between two processes of one host. Specifications and reports
# cross the cluster as JSON. A token crosses it encrypted for one actor, and is in no specification.

GROUP, OWN_GROUP = "workers", "learner"
"""Names of a run's placement groups, within its namespace."""


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    namespace: str
    max_restarts: int
    strategy: str = ""
    bundles: list[dict[str, float]] = []
    """Resources of the placement group: one bundle per configured worker."""
    labels: list[dict[str, str]] = []
    """Node labels that each bundle requires."""
    own: dict[str, float] = {}
    """Resources kept free on the supervisor's node by a second placement group, since Ray places
    the bundles of one group greedily and could give that node to a worker first."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor needs to know about its worker. All users of the cluster may see it."""

    run: str
    worker: str
    role: Role
    url: str
    allows_plaintext: bool
    program: list[str]
    """Empty: the actor's own installation of Headrace."""
    resources: dict[str, float]
    """CPU, GPU, memory in bytes, and custom ones."""
    labels: dict[str, str]
    unwatched_s: float
    bundle: int | None = None
    """Index of its bundle in the placement group."""


class HolderReport(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    """Public key in hex of this incarnation of the actor."""
    place: str
    has_begun: bool = False
    token: str = ""
    """Digest of the token that it has."""
    exit_code: int | None = None
    output: str = ""
    """Last lines of a worker that has ended."""


class RayRequest(msgspec.Struct, frozen=True, kw_only=True):
    verb: Literal["connect", "knock", "start", "stop", "list", "logs"]
    cluster: ClusterSpec | None = None
    spec: WorkerSpec | None = None
    worker: str = ""
    now: bool = False
    tokens: dict[str, Token] = {}
    """By role, for actors that are to start their worker and for rotated tokens."""


class RayReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    """Why it failed; a retry may succeed."""
    jobs: dict[str, Job] = {}
    text: str = ""
    addresses: list[str] = []
    head: str = ""
    """HOST:PORT of the cluster's head."""


_REPLACED = "its Ray actor or node was lost"
_SHOWN_RESOURCES = 4


@dataclass(slots=True)
class HeldWorker:
    role: Role
    is_ordered: bool = False
    """Whether the worker should start: ordered by this supervisor, or by an earlier one and still
    waiting."""
    report: HolderReport | None = None
    """The actor's last answer; None while it has no node."""
    lost: str = ""
    _begun: str = ""
    """Key of the incarnation that was given the token; from then on its worker counts as started."""

    def order(self) -> None:
        """Start the worker once its actor has a node."""
        self.is_ordered, self.lost = True, ""

    def answered(self, report: HolderReport) -> None:
        """Take in an answer. A different key means a new incarnation of the actor, whose worker is
        gone."""
        if self._begun and report.key != self._begun:
            self._lose(_REPLACED)
        self.report = report
        if report.has_begun:
            self._begun = report.key

    def was_given_token(self) -> None:
        assert self.report is not None
        self._begun = self.report.key

    def unavailable(self) -> None:
        if self._begun:
            self._lose(_REPLACED)
        self.report = None

    @property
    def may_run(self) -> bool:
        """Whether its actor was given the token and is not known to be lost."""
        return bool(self._begun)

    @property
    def begins(self) -> bool:
        """Whether it is ordered but has not started."""
        return self.is_ordered and not self.lost and (self.report is None or not self.report.has_begun)

    def wants_token(self, digest: str) -> bool:
        """Return whether to send the token: when the worker is to start, and when the token was
        rotated."""
        if self.report is None or self.lost or self.report.exit_code is not None:
            return False
        return self.report.token != digest if self.report.has_begun else self.is_ordered

    def job(self, why_waiting: str) -> Job | None:
        """Return the job; None for an actor that no supervisor uses."""
        if self.lost:
            return Job(role=self.role, state=JobState.ENDED, place="Ray", reason=self.lost)
        if self.report is None or not self.report.has_begun:
            if not self.is_ordered:
                return None
            place, why = (
                ("Ray", why_waiting) if self.report is None else (self.report.place, "it has a node and is starting")
            )
            return Job(role=self.role, state=JobState.WAITING, place=place, reason=why)
        state = JobState.RUNNING if self.report.exit_code is None else JobState.ENDED
        return Job(role=self.role, state=state, place=self.report.place, exit_code=self.report.exit_code)

    def _lose(self, reason: str) -> None:
        self._begun, self.is_ordered, self.lost = "", False, reason


@dataclass(frozen=True, slots=True)
class NodeResources:
    total: Mapping[str, float]
    labels: Mapping[str, str]


def why_waiting(
    wanted: Mapping[str, float], labels: Mapping[str, str], nodes: Sequence[NodeResources], free: Mapping[str, float]
) -> str:
    """Say why a worker has no node yet. ``free``: unused resources of all nodes together."""
    fitting = [node for node in nodes if all(node.labels.get(name) == value for name, value in labels.items())]
    if not fitting:
        return f"none of {len(nodes)} nodes has the labels {_in_words(labels)}; Ray's autoscaler may add one"
    short = [name for name, count in wanted.items() if all(node.total.get(name, 0.0) < count for node in fitting)]
    if short:
        largest = {name: max(node.total.get(name, 0.0) for node in fitting) for name in short}
        return (
            f"it needs {_in_words({name: wanted[name] for name in short})}, and no node has more than {_in_words(largest)}; "
            "Ray's autoscaler may add one"
        )
    left = {name: free.get(name, 0.0) for name in wanted}
    return f"it needs {_in_words(wanted)} on one node; {_in_words(left)} are free in the cluster"


def _in_words(values: Mapping[str, object]) -> str:
    shown = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name}={value}" for name, value in values.items()
    ]
    return ", ".join(shown[:_SHOWN_RESOURCES])
