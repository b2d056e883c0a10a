"""The words between a supervisor, its Ray driver and the actors of workers.

Requests and replies are lines of JSON between two processes of one host. Specifications and reports
cross the cluster as JSON text. A token crosses it sealed for one actor; no specification has it."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.seam import JobState
from protocol.ids import Role

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
    """Resources that are kept free on the supervisor's node, by a group of their own.

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
    """By role, for actors whose worker is to begin, and for rotated ones."""


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the cluster."""

    role: Role
    state: JobState
    place: str
    exit_code: int | None = None
    reason: str = ""


class RayReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    error: str = ""
    """Why it failed; a repeat may succeed."""
    jobs: dict[str, RayJob] = {}
    text: str = ""
    addresses: list[str] = []
    """Addresses of the cluster's nodes."""
    head: str = ""
    """HOST:PORT of the cluster's head."""
