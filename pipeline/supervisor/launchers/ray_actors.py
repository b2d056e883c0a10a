"""One detached actor per worker on a Ray cluster, in a namespace of the run.

Each call is one request with a deadline to the run's Ray driver (``ray_agent``), a separate
process. A driver that fails is replaced at the next call; actors stay, and a later supervisor finds
them. An actor holds no secret until its worker starts."""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from pipeline.config.operations import LaunchSection, ResourcesSection
from pipeline.ledger.token import Token
from pipeline.ledger.url import without_ledger_password
from pipeline.supervisor.launchers.commands import JoinCommand
from pipeline.supervisor.launchers.ray_agent import Needs, RayReply, RayRequest, RayRun
from pipeline.supervisor.launchers.ray_holder import WorkerSpec
from pipeline.supervisor.launchers.seam import ConfiguredLauncher, Job, LaunchFailed
from protocol import headrace
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.printable import printable_line

_AUTH_MODE: Final = "RAY_AUTH_MODE"
_DEFAULT_PROGRAM: Final = ("headrace",)
_STRANGER_S: Final = 20.0
_END_S: Final = 10.0
_CHUNK: Final = 1 << 16
_SHOWN_CHARS: Final = 600


class RayLauncher(ConfiguredLauncher):
    """Starts a run's workers as Ray actors.

    Raises ConfigError: Ray is not installed, or the address is one of Ray Client."""

    def __init__(self, settings: LaunchSection, join: JoinCommand, workers: Sequence[tuple[Role, str]] = ()) -> None:
        """``workers``: role and name of each configured worker, for the placement group."""
        for module, package in (("ray", "ray"), ("nacl", "pynacl")):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"launch.on is ray, but {package} is not installed for this Python; expected it here and on each node of "
                    "the cluster: pip install 'headrace[ray]', or choose another place with --on"
                )
        if "://" in settings.ray.address:
            raise ConfigError(
                f"launch.ray.address is {settings.ray.address!r:.100}; expected HOST:PORT of the cluster's head, or auto. Run "
                "`headrace up` on a node of the cluster: Ray Client is not used"
            )
        self._settings, self._join = settings, join
        self._run = ray_run(settings, join, workers)
        self._lock = threading.Lock()
        self._driver: _Driver | None = None
        self._welcome = RayReply()

    def reach(self) -> None:
        """Connect once. Raises ConfigError: the cluster cannot be reached, or admits anyone."""
        try:
            with self._lock:
                found = self._connected(self._settings.answer_s)
        except LaunchFailed as error:
            raise ConfigError(
                f"the Ray cluster {self._settings.ray.address} cannot be used: {error}; expected a running one that this host "
                "is a node of (`ray start`); its Python and Ray must be of the same versions as here"
            ) from error
        if not self._settings.ray.allow_unauthenticated and not all(map(_is_loopback, found.addresses)):
            refuse_open(is_open(msgspec.structs.replace(self._run, address=found.head)))

    def start(self, role: Role, worker: str, /) -> None:
        self._ask(RayRequest(verb="start", role=role, worker=worker, tokens=self._tokens()))

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        self._ask(RayRequest(verb="stop", worker=worker, now=now))

    def listing(self) -> dict[str, Job]:
        """Return the run's jobs. The driver remembers how workers ended after their actors are
        gone."""
        return self._ask(RayRequest(verb="list", tokens=self._tokens())).jobs

    def logs(self, worker: str, /) -> str:
        return self._ask(RayRequest(verb="logs", worker=worker, tokens=self._tokens())).text

    def close(self) -> None:
        """End the driver but not the actors."""
        with self._lock:
            if self._driver is not None:
                self._driver.close()
            self._driver = None

    def _tokens(self) -> dict[Role, Token]:
        """Return the tokens that exist; the end of a run needs none."""
        found: dict[Role, Token] = {}
        for role in map(Role, self._settings.launched):
            with suppress(ConfigError):
                found[role] = self._join.token_of(role)
        return found

    def _ask(self, request: RayRequest) -> RayReply:
        deadline = time.monotonic() + self._settings.answer_s
        with self._lock:
            self._connected(self._settings.answer_s)
            assert self._driver is not None
            return self._driver.ask(request, max(1.0, deadline - time.monotonic()))

    def _connected(self, timeout_s: float) -> RayReply:
        """Start the driver unless it runs; return its first reply."""
        if self._driver is not None and self._driver.runs:
            return self._welcome
        if self._driver is not None:
            self._driver.close()
        driver = _Driver(_environment())
        try:
            reply = driver.ask(RayRequest(verb="connect", run=self._run), timeout_s)
        except LaunchFailed:
            driver.close()
            raise
        self._driver, self._welcome = driver, reply
        return reply


class _Driver:
    """The driver's process. Its standard error is an anonymous file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._error = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            headrace.command("pipeline.supervisor.launchers.ray_agent"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._error, env=dict(environment), cwd="/",
            start_new_session=True,
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: RayRequest, timeout_s: float) -> RayReply:
        """Return the reply. Raises LaunchFailed on an error; if no reply comes in time or the
        driver has ended, also kills it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._line(timeout_s)
        except OSError as error:
            words = self._last_words()
            self._kill()
            raise LaunchFailed(f"Ray's driver {error}; it printed: {words}") from error
        reply = msgspec.json.decode(line, type=RayReply)
        if reply.error:
            raise LaunchFailed(f"Ray: {printable_line(reply.error)}")
        return reply

    def close(self) -> None:
        """Close its input so that it ends; kill it if it does not."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"gave no answer within {timeout_s:g} s (launch.answer_s)")
                chunk = os.read(self._process.stdout.fileno(), _CHUNK)
                if not chunk:
                    raise ConnectionError(f"has ended with code {self._process.wait(_END_S)}")
                found += chunk
        return bytes(found)

    def _last_words(self) -> str:
        self._error.seek(max(0, self._error.seek(0, os.SEEK_END) - _CHUNK))
        words = " ".join(self._error.read().decode(errors="replace").split())
        return printable_line(words[-_SHOWN_CHARS:]) or "nothing"

    def _kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._error.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def is_open(run: RayRun) -> bool:
    """Return whether a cluster's head answers a process without the cluster's token. Raises
    ConfigError: it does not answer at all."""
    environment = {name: value for name, value in _environment().items() if not name.startswith("RAY_AUTH_")}
    stranger = _Driver(environment | {_AUTH_MODE: "disabled"})
    try:
        return bool(stranger.ask(RayRequest(verb="knock", run=run), _STRANGER_S).text)
    except LaunchFailed as error:
        raise ConfigError(
            f"the head {run.address} of the Ray cluster does not say whether it accepts programs without a token: {error}; "
            f"try again"
        ) from error
    finally:
        stranger.close()


def refuse_open(is_open: bool) -> None:
    if is_open:
        raise ConfigError(
            "the Ray cluster accepts any program that reaches its ports, without a token: such a program can run code as the "
            "cluster's account and read join tokens. Start its nodes with RAY_AUTH_MODE=token (`ray get-auth-token "
            "--generate`), or set launch.ray.allow_unauthenticated if only you use that network"
        )


def namespace(join: JoinCommand) -> str:
    """Return the namespace of a run's actors. It includes the ledger's address, since runs on other
    ledgers may have the same name."""
    return f"headrace.{join.run}.{hashlib.sha256(join.url.encode()).hexdigest()[:10]}"


def ray_run(settings: LaunchSection, join: JoinCommand, workers: Sequence[tuple[Role, str]] = ()) -> RayRun:
    wanted, program = settings.ray, [] if settings.program == _DEFAULT_PROGRAM else list(settings.program)
    return RayRun(
        address=wanted.address,
        namespace=namespace(join),
        worker=WorkerSpec(
            run=join.run, worker="", role=Role.GENERATOR, url=join.url, allows_plaintext=join.allows_plaintext,
            program=program, unwatched_s=wanted.unwatched_s,
        ),
        needs={role: _needs(settings, role) for role in map(Role, settings.launched)},
        strategy=wanted.strategy or "",
        group=list(workers) if wanted.strategy else [],
        own=_resources(settings.learner),
    )  # fmt: skip


def _needs(settings: LaunchSection, role: Role) -> Needs:
    place = settings.ray.role(role)
    return Needs(_resources(settings.resources(role)) | place.resources, place.labels)


def _resources(wanted: ResourcesSection) -> dict[str, float]:
    found = {"CPU": float(wanted.cpus)}
    if wanted.gpus:
        found["GPU"] = float(wanted.gpus)
    if wanted.memory_gb is not None:
        found["memory"] = float(wanted.memory_gb << 30)
    return found


def _environment() -> dict[str, str]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return quiet | without_ledger_password(os.environ)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def dry_run(settings: LaunchSection, join: JoinCommand, workers: Sequence[tuple[Role, str]]) -> str:
    """Describe the actors that would be created, and their resource requests."""
    cluster = settings.ray
    lines = [f"# actors in the namespace {namespace(join)} of the Ray cluster {cluster.address}"]
    if cluster.strategy is not None:
        lines.append(
            f"# in one placement group, {cluster.strategy}; another one reserves this node's resources for the learner"
        )
    for role, worker in workers:
        needs = _needs(settings, role)
        labels = "".join(f", {name}={value}" for name, value in needs.labels.items())
        lines.append(f"{worker}: " + ", ".join(f"{name} {count:g}" for name, count in needs.resources.items()) + labels)
    return "\n".join([*lines, ""])
