"""The Ray driver of a launcher: a separate process.

It reads requests as lines of JSON from standard input, and writes one reply each. Ray gets seconds
per request; the launcher kills a driver that does not reply in time.

A separate process, because Ray kills a driver whose node is lost, takes over signals and leaves
threads, none of which must affect the supervisor. It ends when its input ends; detached actors
stay.

    python headrace.py pipeline.supervisor.launchers.ray_agent"""

from __future__ import annotations

import os
import selectors
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.join_command import role_of
from pipeline.supervisor.launchers.ray_holder import WorkerHolder, remove_groups, token_digest
from pipeline.supervisor.launchers.ray_states import (
    GROUP,
    OWN_GROUP,
    ClusterSpec,
    HeldWorker,
    HolderReport,
    NodeResources,
    RayReply,
    RayRequest,
    WorkerSpec,
    why_waiting,
)
from pipeline.supervisor.launchers.seam import Job
from protocol.errors import ConfigError

_LOOK_S = 0.5
"""How long to wait for actors' answers; those that have a node answer sooner."""
_LOGS_S = 5.0
_TICK_S = 0.4
_PARENT_S = 1.0
_CLOSE_S = 20.0
_NAME_FREE_S = 10.0


@dataclass(slots=True)
class _Watched:
    handle: Any
    held: HeldWorker
    asked: Any = None
    """The unanswered call, if any. An actor without a node has at most one."""


class RayDriver:
    def __init__(self, cluster: ClusterSpec) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self._cluster = cluster
        self._watched: dict[str, _Watched] = {}
        self._specs: dict[str, WorkerSpec] = {}
        self._ended: dict[str, tuple[Job, str]] = {}
        """Jobs and last lines of ended workers, whose actors are gone."""
        self._tokens: dict[str, Token] = {}
        """The newest token of each role."""
        self._is_first = True
        if cluster.address != "auto" and not is_let_in(cluster.address):
            raise ConfigError(
                "the cluster requires its token; set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or in "
                "RAY_AUTH_TOKEN_PATH"
            )
        ray.init(
            address=cluster.address, namespace=cluster.namespace, log_to_driver=False, logging_level="ERROR",
            configure_logging=False,
        )  # fmt: skip

    def use(self, tokens: dict[str, Token]) -> None:
        self._tokens |= tokens

    def welcome(self) -> RayReply:
        import ray  # pyright: ignore[reportMissingImports]

        addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        return RayReply(addresses=addresses, head=ray.get_runtime_context().gcs_address)

    def begin_ordered(self) -> None:
        """Give tokens to actors that have got a node since they were ordered."""
        if any(known.held.begins for known in self._watched.values()):
            self._take_up()

    def start(self, spec: WorkerSpec) -> None:
        self._ended.pop(spec.worker, None)
        self._specs[spec.worker] = spec
        known = self._find(spec.worker)
        if known is None or known.held.role is not spec.role:
            known = self._watched[spec.worker] = _Watched(self._made(spec), HeldWorker(spec.role))
        known.held.order()

    def stop(self, worker: str, *, now: bool) -> None:
        known = self._find(worker)
        if known is None:
            return
        if not now and known.held.may_run:
            known.handle.stop.remote()
        else:
            self._end(worker, known)

    def listing(self) -> dict[str, Job]:
        """Ask each actor once; return all jobs."""
        self._take_up()
        jobs: dict[str, Job] = {}
        for name, known in list(self._watched.items()):
            report = known.held.report
            job = known.held.job(self._why_waiting(name) if report is None else "")
            if job is not None:
                jobs[name] = job
            if job is not None and report is not None and report.exit_code is not None:
                self._ended[name] = job, report.output
                self._end(name, known)
        self._keep_group()
        return {name: job for name, (job, _) in self._ended.items()} | jobs

    def logs(self, worker: str) -> str:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import GetTimeoutError, RayError  # pyright: ignore[reportMissingImports]

        self._take_up()
        if worker in self._ended:
            return self._ended[worker][1]
        known = self._watched.get(worker)
        with suppress(RayError, GetTimeoutError):
            if known is not None and known.held.report is not None:
                return ray.get(known.handle.logs.remote(), timeout=_LOGS_S)
        return ""

    def close(self) -> None:
        """Free the resources of ended workers, and leave the others to a later supervisor."""
        self._tokens = {}
        self.listing()
        for name, known in list(self._watched.items()):
            if known.held.job("") is None or known.held.lost:
                self._end(name, known)
        self._keep_group()

    # -- actors ------------------------------------------------------------------------------------

    def _find(self, worker: str) -> _Watched | None:
        import ray  # pyright: ignore[reportMissingImports]

        if worker not in self._watched:
            role = role_of(worker)
            with suppress(ValueError):
                if role is not None:
                    self._watched[worker] = _Watched(ray.get_actor(worker), HeldWorker(role))
        return self._watched.get(worker)

    def _made(self, spec: WorkerSpec) -> Any:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        cpus, gpus, memory = (spec.resources.get(name, 0.0) for name in ("CPU", "GPU", "memory"))
        custom = {name: count for name, count in spec.resources.items() if name not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {
            "name": spec.worker, "lifetime": "detached", "max_restarts": self._cluster.max_restarts, "num_cpus": cpus,
            "num_gpus": gpus, "scheduling_strategy": "SPREAD",
        }  # fmt: skip
        options |= {"memory": int(memory)} if memory else {}
        options |= {"resources": custom} if custom else {}
        if spec.bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group(), spec.bundle)
        elif spec.labels:
            options["label_selector"] = spec.labels
        actor: Any = ray.remote(WorkerHolder).options(**options)
        text = msgspec.json.encode(spec).decode()
        deadline = time.monotonic() + _NAME_FREE_S
        while True:
            try:
                return actor.remote(text)
            except ValueError:
                # the name of an actor that was just killed is not free yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _end(self, worker: str, known: _Watched) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        ray.kill(known.handle, no_restart=True)
        self._watched.pop(worker, None)

    def _take_up(self) -> None:
        """Ask the run's actors, and give tokens to those that want one."""
        from ray.util import list_named_actors  # pyright: ignore[reportMissingImports]

        names = {name for name in list_named_actors() if role_of(name) is not None}
        for name in [name for name in self._watched if name not in names]:
            del self._watched[name]
        new = [name for name in names - set(self._watched) if self._find(name) is not None]
        self._look()
        for name, known in self._watched.items():
            if self._is_first and name in new and known.held.report is None:
                # ordered by an earlier supervisor, and still waiting for a node
                known.held.order()
            self._give(known)
        self._is_first = False

    def _look(self) -> None:
        """Ask each actor once, and take in the answers that arrive in time."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports]

        for known in self._watched.values():
            if known.asked is None:
                known.asked = known.handle.look.remote()
        asked = {known.asked: name for name, known in self._watched.items()}
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
        for reference in ready:
            name = asked[reference]
            known = self._watched[name]
            known.asked = None
            try:
                known.held.answered(_report(ray.get(reference)))
            except ActorUnavailableError:
                known.held.unavailable()
            except RayActorError:
                # dead for good
                del self._watched[name]
            except RayError:
                known.held.unavailable()

    def _give(self, known: _Watched) -> None:
        """Send an actor its role's token if it needs it, encrypted for it alone."""
        from nacl.public import PublicKey, SealedBox  # pyright: ignore[reportMissingImports]

        token = self._tokens.get(known.held.role)
        report = known.held.report
        if token is not None and report is not None and known.held.wants_token(token_digest(token)):
            box = SealedBox(PublicKey(bytes.fromhex(report.key)))
            known.handle.take.remote(box.encrypt(msgspec.json.encode(token)))
            known.held.was_given_token()

    def _why_waiting(self, worker: str) -> str:
        import ray  # pyright: ignore[reportMissingImports]

        spec = self._specs.get(worker)
        if spec is None:
            return "it was requested by an earlier supervisor"
        nodes = [NodeResources(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]
        wanted = {name: count for name, count in spec.resources.items() if count}
        number = len(self._cluster.bundles)
        whole = "" if spec.bundle is None else f"the placement group of {number} workers waits: "
        return whole + why_waiting(wanted, spec.labels, nodes, ray.available_resources())

    # -- the placement group -----------------------------------------------------------------------

    def _group(self) -> Any:
        import ray  # pyright: ignore[reportMissingImports]

        node = ray.get_runtime_context().get_node_id()
        _kept_group(OWN_GROUP, [self._cluster.own], "PACK", [{"ray.io/node-id": node}])
        return _kept_group(GROUP, self._cluster.bundles, self._cluster.strategy, self._cluster.labels)

    def _keep_group(self) -> None:
        """Remove the placement groups when no worker of the run is left."""
        if self._cluster.strategy and not self._watched:
            remove_groups()


def _kept_group(name: str, bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> Any:
    from ray.util import get_placement_group, placement_group  # pyright: ignore[reportMissingImports]

    with suppress(ValueError):
        return get_placement_group(name)
    return placement_group(bundles, strategy=strategy, name=name, lifetime="detached", bundle_label_selector=labels)


def is_let_in(head: str) -> bool:
    """Return whether the head answers this process, with or without a token."""
    from ray._raylet import GcsClient  # pyright: ignore[reportMissingImports]
    from ray.exceptions import AuthenticationError  # pyright: ignore[reportMissingImports]

    try:
        GcsClient(address=head)
    except AuthenticationError:
        return False
    return True


class _Lines:
    def __init__(self) -> None:
        self._left = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def next(self, timeout_s: float) -> bytes | None:
        """Return the next line; empty if none comes in time, None at the end."""
        while b"\n" not in self._left:
            if not self._selector.select(timeout_s):
                return b""
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return None
            self._left += chunk
        line, _, self._left = self._left.partition(b"\n")
        return line


def _report(text: str) -> HolderReport:
    return msgspec.json.decode(text, type=HolderReport)


def _reply(driver: RayDriver, request: RayRequest) -> RayReply:
    driver.use(request.tokens)
    match request.verb:
        case "start" if request.spec is not None:
            driver.start(request.spec)
        case "stop":
            driver.stop(request.worker, now=request.now)
        case "list":
            return RayReply(jobs=driver.listing())
        case "logs":
            return RayReply(text=driver.logs(request.worker))
        case _:
            pass
    return RayReply()


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
    lines = _Lines()
    while (line := lines.next(_TICK_S)) is not None:
        if not line:
            # if the trouble lasts, the next request reports it
            with suppress(Exception):
                if driver is not None:
                    driver.begin_ordered()
            continue
        try:
            request = msgspec.json.decode(line, type=RayRequest)
            if request.verb == "knock" and request.cluster is not None:
                reply = RayReply(text="open" if is_let_in(request.cluster.address) else "")
            elif driver is None and request.cluster is not None:
                driver = RayDriver(request.cluster)
                reply = driver.welcome()
            else:
                assert driver is not None, "the first request connects"
                reply = _reply(driver, request)
        # Ray raises errors of many kinds, and the launcher reports each as a sentence
        except Exception as error:  # noqa: BLE001
            reply = RayReply(error=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
    if driver is not None:
        driver.close()
    # skip Ray's own shutdown, which takes seconds and has nothing to do
    os._exit(0)
