"""The Ray driver of a launcher: a separate process.

It reads requests as lines of JSON from standard input, and writes one reply each. The launcher
kills a driver that does not reply in time.

A separate process, because Ray kills a driver whose node is lost, takes over signals and leaves
threads, none of which must affect the supervisor. It ends when its input ends; detached actors
stay.

    python headrace.py pipeline.supervisor.launchers.ray_agent

Each worker is a named, detached actor (``ray_holder``), which begins with the token that it gets,
and which Ray does not restart: a lost worker starts again by the supervisor's order, as a new
actor."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.commands import role_of
from pipeline.supervisor.launchers.ray_holder import (
    GROUP,
    OWN_GROUP,
    HolderReport,
    WorkerHolder,
    WorkerSpec,
    remove_groups,
    token_digest,
)
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.errors import ConfigError
from protocol.ids import Role

_ANSWER_S = 0.5
"""How long to wait for actors' answers; those that have a node answer sooner."""
_LOGS_S = 5.0
_TICK_S = 0.4
_PARENT_S = 1.0
_CLOSE_S = 20.0
_NAME_FREE_S = 10.0
_SHOWN_RESOURCES = 4


class Needs(msgspec.Struct, frozen=True):
    resources: dict[str, float]
    """CPU, GPU, memory in bytes, and custom ones."""
    labels: dict[str, str]
    """Labels that its node must have."""


class RayRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's workers in a cluster."""

    address: str
    namespace: str
    worker: WorkerSpec
    """The part that all workers share."""
    needs: dict[Role, Needs]
    strategy: str = ""
    group: list[tuple[Role, str]] = []
    """The workers of the placement group, one bundle each."""
    own: dict[str, float] = {}
    """Resources kept free on the supervisor's node by a second placement group, since Ray places
    the bundles of one group greedily and could give that node to a worker first."""


class RayRequest(msgspec.Struct, frozen=True, kw_only=True):
    verb: Literal["connect", "knock", "start", "stop", "list", "logs"]
    run: RayRun | None = None
    role: Role = Role.GENERATOR
    worker: str = ""
    now: bool = False
    tokens: dict[Role, Token] = {}
    """For actors that are to start their worker, and for rotated tokens."""


class RayReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    """Why it failed; a retry may succeed."""
    jobs: dict[str, Job] = {}
    text: str = ""
    addresses: list[str] = []
    head: str = ""
    """HOST:PORT of the cluster's head."""


@dataclass(slots=True)
class _Actor:
    role: Role
    handle: Any
    asked: Any = None
    """The unanswered call, if any. An actor without a node has at most one."""
    report: HolderReport | None = None
    is_given: bool = False
    """Whether it was sent a token, so that its worker may run."""


class RayDriver:
    def __init__(self, run: RayRun) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self._run = run
        self._actors: dict[str, _Actor] = {}
        self._ended: dict[str, tuple[Job, str]] = {}
        """Jobs and last lines of ended workers, whose actors are gone."""
        self._killed: set[str] = set()
        """Names of killed actors, which Ray still lists for a moment."""
        self._tokens: dict[Role, Token] = {}
        if run.address != "auto" and not is_let_in(run.address):
            raise ConfigError(
                "the cluster requires its token; set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or in "
                "RAY_AUTH_TOKEN_PATH"
            )
        ray.init(
            address=run.address, namespace=run.namespace, log_to_driver=False, logging_level="ERROR",
            configure_logging=False,
        )  # fmt: skip

    def reply(self, request: RayRequest) -> RayReply:
        import ray  # pyright: ignore[reportMissingImports]

        self._tokens |= request.tokens
        match request.verb:
            case "start":
                self._start(request.role, request.worker)
            case "stop":
                self._stop(request.worker, now=request.now)
            case "list":
                return RayReply(jobs=self._listing())
            case "logs":
                return RayReply(text=self._logs(request.worker))
            case _:
                addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
                return RayReply(addresses=addresses, head=ray.get_runtime_context().gcs_address)
        return RayReply()

    def begin_waiting(self) -> None:
        """Give tokens to actors that have got a node since they were created."""
        if not all(actor.is_given for actor in self._actors.values()):
            self._refresh()

    def close(self) -> None:
        """Free the resources of ended workers, and leave the others to a later supervisor."""
        self._tokens = {}
        self._listing()

    def _start(self, role: Role, worker: str) -> None:
        self._ended.pop(worker, None)
        self._find(worker)
        if worker not in self._actors:
            self._actors[worker] = _Actor(role, self._created(role, worker))
            self._killed.discard(worker)

    def _stop(self, worker: str, *, now: bool) -> None:
        self._find(worker)
        actor = self._actors.get(worker)
        if actor is not None and not (actor.is_given or now):
            # an earlier driver may have given it its token
            self._refresh()
        if actor is not None and actor.is_given and not now:
            actor.handle.stop.remote()
        elif worker in self._actors:
            self._kill(worker)

    def _listing(self) -> dict[str, Job]:
        self._refresh()
        jobs = {name: self._job(name, actor) for name, actor in self._actors.items()}
        for name, job in jobs.items():
            if job.state is JobState.ENDED and (report := self._actors[name].report) is not None:
                self._ended[name] = job, report.output
                self._kill(name)
        if self._run.strategy and not self._actors:
            remove_groups()
        return {name: job for name, (job, _) in self._ended.items()} | jobs

    def _logs(self, worker: str) -> str:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import GetTimeoutError, RayError  # pyright: ignore[reportMissingImports]

        self._refresh()
        if worker in self._ended:
            return self._ended[worker][1]
        with suppress(RayError, GetTimeoutError):
            if worker in self._actors and self._actors[worker].is_given:
                return ray.get(self._actors[worker].handle.logs.remote(), timeout=_LOGS_S)
        return ""

    def _job(self, worker: str, actor: _Actor) -> Job:
        report = actor.report
        if report is None:
            return Job(actor.role, JobState.WAITING, "Ray", reason=self._why_waiting(actor.role, worker))
        if not actor.is_given:
            return Job(actor.role, JobState.WAITING, report.place, reason="it has a node and is starting")
        state = JobState.RUNNING if report.exit_code is None else JobState.ENDED
        return Job(actor.role, state, report.place, report.exit_code)

    # -- actors ------------------------------------------------------------------------------------

    def _created(self, role: Role, worker: str) -> Any:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        needs, bundles = self._run.needs[role], [name for _, name in self._run.group]
        named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        options |= {named[name]: count for name, count in needs.resources.items() if name in named}
        options["resources"] = {name: count for name, count in needs.resources.items() if name not in named}
        if worker in bundles:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group(), bundles.index(worker))
        elif needs.labels:
            options["label_selector"] = needs.labels
        spec = msgspec.json.encode(msgspec.structs.replace(self._run.worker, role=role, worker=worker)).decode()
        deadline = time.monotonic() + _NAME_FREE_S
        while True:
            try:
                return ray.remote(WorkerHolder).options(name=worker, lifetime="detached", **options).remote(spec)
            except ValueError:
                # the name of an actor that was just killed is not free yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _find(self, worker: str) -> None:
        """Adopt the actor of an earlier driver, if there is one."""
        import ray  # pyright: ignore[reportMissingImports]

        role = role_of(worker)
        if role is not None and worker not in self._actors and worker not in self._killed:
            with suppress(ValueError):
                self._actors[worker] = _Actor(role, ray.get_actor(worker))

    def _kill(self, worker: str) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        ray.kill(self._actors.pop(worker).handle)
        self._killed.add(worker)

    def _lose(self, worker: str) -> None:
        actor = self._actors.pop(worker)
        if actor.is_given:
            self._ended[worker] = Job(actor.role, JobState.ENDED, "Ray", reason="its Ray actor or node was lost"), ""

    def _refresh(self) -> None:
        """Find the run's actors, ask each once, and give tokens to those that want one."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import ActorDiedError, RayError  # pyright: ignore[reportMissingImports]
        from ray.util import list_named_actors  # pyright: ignore[reportMissingImports]

        there = set(list_named_actors())
        self._killed &= there
        for name in self._actors.keys() - there:
            self._lose(name)
        for name in there:
            self._find(name)
        for actor in self._actors.values():
            actor.asked = actor.asked or actor.handle.report.remote()
        names = {actor.asked: name for name, actor in self._actors.items()}
        ready = ray.wait(list(names), num_returns=len(names), timeout=_ANSWER_S)[0] if names else []
        for answer in ready:
            actor = self._actors[names[answer]]
            actor.asked = None
            try:
                actor.report = msgspec.json.decode(ray.get(answer), type=HolderReport)
            except ActorDiedError:
                self._lose(names[answer])
            except RayError:
                # out of reach for a moment: asked again
                continue
            else:
                self._give(actor, actor.report)

    def _give(self, actor: _Actor, report: HolderReport) -> None:
        """Send an actor its role's token if it has another one or none, encrypted for it alone."""
        from nacl.public import PublicKey, SealedBox  # pyright: ignore[reportMissingImports]

        actor.is_given |= bool(report.token)
        token = self._tokens.get(actor.role)
        if token is not None and report.exit_code is None and report.token != token_digest(token):
            box = SealedBox(PublicKey(bytes.fromhex(report.key)))
            actor.handle.take.remote(box.encrypt(msgspec.json.encode(token)))
            actor.is_given = True

    def _why_waiting(self, role: Role, worker: str) -> str:
        import ray  # pyright: ignore[reportMissingImports]

        in_group = any(name == worker for _, name in self._run.group)
        whole = f"the placement group of {len(self._run.group)} workers waits: " if in_group else ""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return whole + why_waiting(self._run.needs[role], nodes, ray.available_resources())

    def _group(self) -> Any:
        import ray  # pyright: ignore[reportMissingImports]

        run, node = self._run, ray.get_runtime_context().get_node_id()
        _kept_group(OWN_GROUP, [run.own], "PACK", [{"ray.io/node-id": node}])
        needs = [run.needs[role] for role, _ in run.group]
        return _kept_group(GROUP, [one.resources for one in needs], run.strategy, [one.labels for one in needs])


def _kept_group(name: str, bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> Any:
    from ray.util import get_placement_group, placement_group  # pyright: ignore[reportMissingImports]

    with suppress(ValueError):
        return get_placement_group(name)
    return placement_group(bundles, strategy=strategy, name=name, lifetime="detached", bundle_label_selector=labels)


def why_waiting(needs: Needs, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """Say why a worker has no node yet. ``nodes``: live rows of ``ray.nodes()``. ``free``: unused
    resources of all nodes together."""
    wanted = {name: count for name, count in needs.resources.items() if count}
    fitting = [node["Resources"] for node in nodes if needs.labels.items() <= node["Labels"].items()]
    if not fitting:
        return f"none of {len(nodes)} nodes has the labels {_in_words(needs.labels)}; Ray's autoscaler may add one"
    most = {name: max(have.get(name, 0.0) for have in fitting) for name in wanted}
    if short := [name for name in wanted if most[name] < wanted[name]]:
        needed, largest = ({name: of[name] for name in short} for of in (wanted, most))
        return f"it needs {_in_words(needed)}, and no node has more than {_in_words(largest)}; Ray's autoscaler may add one"
    left = {name: free.get(name, 0.0) for name in wanted}
    return f"it needs {_in_words(wanted)} on one node; {_in_words(left)} are free in the cluster"


def _in_words(values: Mapping[str, float | str]) -> str:
    shown = [f"{name}={value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in values.items()]
    return ", ".join(shown[:_SHOWN_RESOURCES])


def is_let_in(head: str) -> bool:
    """Return whether the head answers this process, with or without a token."""
    from ray._raylet import GcsClient  # pyright: ignore[reportMissingImports]
    from ray.exceptions import AuthenticationError  # pyright: ignore[reportMissingImports]

    try:
        # `ray.init` would try for 20 s, and then not say why
        GcsClient(address=head)
    except AuthenticationError:
        return False
    return True


def _end_with(parent: int) -> None:
    """Kill this process some time after its parent has ended, even if a call of Ray hangs."""
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    time.sleep(_CLOSE_S)
    os._exit(1)


def main() -> NoReturn:
    # Ray prints to both outputs, so replies get a descriptor of their own
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    driver: RayDriver | None = None
    selector, unread = selectors.DefaultSelector(), b""
    selector.register(0, selectors.EVENT_READ)
    while True:
        if not selector.select(_TICK_S):
            # if the trouble lasts, the next request reports it
            with suppress(Exception):
                if driver is not None:
                    driver.begin_waiting()
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        unread += chunk
        if not unread.endswith(b"\n"):
            continue
        try:
            request, unread = msgspec.json.decode(unread, type=RayRequest), b""
            if request.verb == "knock" and request.run is not None:
                reply = RayReply(text="open" if is_let_in(request.run.address) else "")
            else:
                if driver is None and request.run is not None:
                    driver = RayDriver(request.run)
                assert driver is not None, "the first request connects"
                reply = driver.reply(request)
        # Ray raises errors of many kinds, and the launcher reports each as a sentence
        except Exception as error:  # noqa: BLE001
            reply = RayReply(error=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
    if driver is not None:
        with suppress(Exception):
            driver.close()
    # skip Ray's own shutdown, which takes seconds and has nothing to do
    os._exit(0)
