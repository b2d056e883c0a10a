"""The state of one worker on Ray, by its actor's answers. Nothing here waits or calls Ray.

Ray replaces a lost actor, and so the place of a worker. The worker in it begins again only by an
order of the supervisor, whose budgets count the loss. An order is carried out by giving
the actor the token, which no other start of the actor can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.ids import Role

# The words between a supervisor, its Ray driver and the actors of workers.
#
# Requests and replies are lines of JSON between two processes of one host. Specifications and reports
# cross the cluster as JSON text. A token crosses it sealed for one actor; no specification has it.

GROUP, OWN_GROUP = "workers", "learner"
"""Names of a run's placement groups, in the run's namespace."""


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster, and a run's part of it."""

    address: str
    namespace: str
    max_restarts: int
    strategy: str = ""
    bundles: list[dict[str, float]] = []
    """Resources of the placement group: a bundle for each configured worker."""
    labels: list[dict[str, str]] = []
    """Labels of each bundle's node."""
    own: dict[str, float] = {}
    """Resources that are kept free on the supervisor's node, by another placement group.

    Ray places the bundles of one group greedily, and could give that node to a worker first."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as its actor needs it. All users of the cluster may see it."""

    run: str
    worker: str
    role: Role
    url: str
    allows_plaintext: bool
    program: list[str]
    """Empty: the installation of Headrace that the actor is of."""
    resources: dict[str, float]
    """CPU, GPU, memory in bytes, and custom ones."""
    labels: dict[str, str]
    unwatched_s: float
    bundle: int | None = None
    """Its place in the placement group."""


class HolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an actor and its worker."""

    key: str
    """Public key, in hexadecimal digits, of this start of the actor."""
    place: str
    has_begun: bool = False
    token: str = ""
    """Digest of the token that it has."""
    exit_code: int | None = None
    """None until the worker has ended."""
    output: str = ""
    """The last lines of a worker that has ended."""


class RayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the driver."""

    verb: Literal["connect", "knock", "start", "stop", "list", "logs"]
    cluster: ClusterSpec | None = None
    spec: WorkerSpec | None = None
    worker: str = ""
    now: bool = False
    tokens: dict[str, Token] = {}
    """By role, for actors that are to start their worker, and for rotated tokens."""


class RayReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    error: str = ""
    """Why it failed; a repeat may succeed."""
    jobs: dict[str, Job] = {}
    text: str = ""
    addresses: list[str] = []
    """Addresses of the cluster's nodes."""
    head: str = ""
    """HOST:PORT of the cluster's head."""


_REPLACED = "its Ray actor or node was lost"
_SHOWN_RESOURCES = 4


@dataclass(slots=True)
class HeldWorker:
    """One worker and its actor."""

    role: Role
    is_ordered: bool = False
    """Whether the supervisor wants it to begin, or an earlier one did and it still waits."""
    report: HolderReport | None = None
    """The actor's last answer; None while it has no place."""
    lost: str = ""
    _begun: str = ""
    """Key of the actor's start that was given the token. Its worker counts as begun before a report
    has it."""

    def order(self) -> None:
        """Have it begin once its actor has a place."""
        self.is_ordered, self.lost = True, ""

    def answered(self, report: HolderReport) -> None:
        """Take an answer. Another key is a new start of the actor: its worker is gone."""
        if self._begun and report.key != self._begun:
            self._lose(_REPLACED)
        self.report = report
        if report.has_begun:
            self._begun = report.key

    def was_given_token(self) -> None:
        """Take that the actor that answered last was given the token."""
        assert self.report is not None
        self._begun = self.report.key

    def unavailable(self) -> None:
        """Record that Ray looks for another place for the actor."""
        if self._begun:
            self._lose(_REPLACED)
        self.report = None

    @property
    def may_run(self) -> bool:
        """Whether its actor was given the token, and is not known to be lost."""
        return bool(self._begun)

    @property
    def begins(self) -> bool:
        """Whether it is ordered, and its worker has not begun."""
        return self.is_ordered and not self.lost and (self.report is None or not self.report.has_begun)

    def wants_token(self, digest: str) -> bool:
        """Return whether the token is to be given: at the order, and when it was rotated."""
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
                ("Ray", why_waiting) if self.report is None else (self.report.place, "it has its place and begins")
            )
            return Job(role=self.role, state=JobState.WAITING, place=place, reason=why)
        state = JobState.RUNNING if self.report.exit_code is None else JobState.ENDED
        return Job(role=self.role, state=state, place=self.report.place, exit_code=self.report.exit_code)

    def _lose(self, reason: str) -> None:
        self._begun, self.is_ordered, self.lost = "", False, reason


@dataclass(frozen=True, slots=True)
class NodeResources:
    """Resources and labels of one live node."""

    total: Mapping[str, float]
    labels: Mapping[str, str]


def why_waiting(
    wanted: Mapping[str, float], labels: Mapping[str, str], nodes: Sequence[NodeResources], free: Mapping[str, float]
) -> str:
    """Return why a worker has no place yet. ``free``: unused resources of all nodes together."""
    fitting = [node for node in nodes if all(node.labels.get(name) == value for name, value in labels.items())]
    if not fitting:
        return f"no node of {len(nodes)} has the labels {_in_words(labels)}; Ray's autoscaler may add one"
    short = [name for name, count in wanted.items() if all(node.total.get(name, 0.0) < count for node in fitting)]
    if short:
        largest = {name: max(node.total.get(name, 0.0) for node in fitting) for name in short}
        return (
            f"it wants {_in_words({name: wanted[name] for name in short})}, and no node has more than {_in_words(largest)}; "
            "Ray's autoscaler may add one"
        )
    left = {name: free.get(name, 0.0) for name in wanted}
    return f"it wants {_in_words(wanted)} of one node; {_in_words(left)} are free in the cluster"


def _in_words(values: Mapping[str, object]) -> str:
    shown = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name}={value}" for name, value in values.items()
    ]
    return ", ".join(shown[:_SHOWN_RESOURCES])
