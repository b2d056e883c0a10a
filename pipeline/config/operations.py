"""Sections about running a fleet: where workers start (`launch`), repairs, the observer, sinks of
metrics, traces, and code updates of a running run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints

from pipeline.config.base import Positive, ReadIf, Section, setting
from protocol.ids import ELASTIC_ROLES

_WANDB = ReadIf(lambda run: run.sinks.wandb, "sinks.wandb is not set")
_MLFLOW = ReadIf(lambda run: run.sinks.mlflow, "sinks.mlflow is not set")
_TRACES = ReadIf(lambda run: run.tracing.otlp, "tracing.otlp is not set")


def _scaling_role(name: str) -> str:
    if name not in ELASTIC_ROLES:
        raise ValueError(f"{name!r} cannot be launched; expected {', '.join(ELASTIC_ROLES)}")
    return name


ScalingRole = Annotated[str, AfterValidator(_scaling_role)]


class ResourcesSection(Section):
    """What one worker of a role requests from Slurm, Kubernetes or Ray."""

    cpus: Positive = setting(1, "Processor cores.", unit="cores")
    gpus: int = setting(0, "GPUs.", ge=0, unit="GPUs")
    memory_gb: Positive | None = setting(None, "Memory. Default: what the cluster gives.")


class SshSection(Section):
    """Hosts that are reached by the system's ssh client, with its configuration and keys."""

    hosts: tuple[str, ...] = setting(
        (), "HOST, USER@HOST, or names from ssh's configuration. Workers are spread over them in turn."
    )
    options: tuple[str, ...] = setting((), 'More options for ssh, such as ["-p", "2222"].')


class SlurmSection(Section):
    """Slurm: each worker is one job. Run ``headrace up`` where sbatch is available."""

    options: tuple[str, ...] = setting((), 'Further options of sbatch, such as ["--partition=gpu", "--time=8:00:00"].')
    folder: Path = setting(
        Path("~/.headrace/slurm"),
        "For token files and job output, on a file system that the nodes share. Nothing else is shared.",
    )


class KubernetesSection(Section):
    """Kubernetes: each worker is one pod, managed with kubectl."""

    image: str = setting("headrace:latest", "Container image that has Headrace.")
    namespace: str = setting("default", "Namespace of all objects.", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    context: str | None = setting(None, "kubectl's context. Default: its current one, or the pod's own account.")
    cache_gb: Positive = setting(50, "Largest file cache of a pod.")
    storage_gb: Positive = setting(
        100, "Volume of the pod that hosts the run, for the run's folder with its checkpoints."
    )
    templates: Path | None = setting(
        None,
        "Folder with changed copies of Headrace's templates of these objects (ops/kubernetes/*.yaml), on each host that "
        "starts pods: your run's image needs it too. Default: none.",
    )


class RayRoleSection(Section):
    """Where in a Ray cluster a role's workers may run."""

    resources: dict[str, float] = setting(
        {},
        "Custom resources that a worker takes from its node, such as {fast_disk = 1}.",
        unit="units of each resource",
    )
    labels: dict[str, str] = setting(
        {}, 'Labels that its node must have, such as {"ray.io/accelerator-type" = "H100"}.'
    )


class RaySection(Section):
    """Ray: each worker is one actor. Run ``headrace up`` on a node of the cluster."""

    address: str = setting("auto", "HOST:PORT of the cluster's head. auto: RAY_ADDRESS, or the cluster of this host.")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = setting(
        None,
        "Strategy of a placement group that reserves room for all workers of the configured fleet at once. A second group "
        "reserves launch.learner on this node. Workers added by scaling are in no group. Default: no groups; Ray spreads "
        "workers.",
    )
    unwatched_s: float = setting(
        120.0,
        "An actor without a running worker frees its place if no supervisor has checked it for this long.",
        gt=0.0,
    )
    allow_unauthenticated: bool = setting(
        False, "Use a multi-host cluster even if it accepts every program that reaches its ports."
    )
    generator: RayRoleSection = RayRoleSection()
    reward: RayRoleSection = RayRoleSection()
    reference: RayRoleSection = RayRoleSection()
    environment: RayRoleSection = RayRoleSection()

    def role(self, role: str) -> RayRoleSection:
        return getattr(self, role)


class LaunchSection(Section):
    """Where workers of the scaling roles are started. The learner and the value worker stay with
    the supervisor; `learner` is what its pod requests in Kubernetes, and what a Ray placement group
    keeps free for it."""

    on: Literal["local", "join", "ssh", "slurm", "kubernetes", "ray"] = setting(
        "local",
        "local: processes on this host. join: also on this host, but each is a `headrace fleet join` in its own "
        "folder, as it would be elsewhere.",
    )
    roles: tuple[ScalingRole, ...] = setting(
        tuple(map(str, ELASTIC_ROLES)), "Roles that are launched there; others run on this host."
    )
    program: tuple[str, ...] = setting(("headrace",), "Command that runs Headrace there.")
    ledger_url: str | None = setting(
        None, "The ledger's address as seen from there, without user and password. Default: ledger.url."
    )
    poll_s: float = setting(2.0, "Time between two checks of the launched workers.", gt=0.0)
    answer_s: float = setting(60.0, "Time limit of one call to ssh, Slurm, kubectl or Ray.", gt=0.0)
    ssh: SshSection = SshSection()
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    ray: RaySection = RaySection()
    generator: ResourcesSection = ResourcesSection()
    reward: ResourcesSection = ResourcesSection()
    reference: ResourcesSection = ResourcesSection()
    environment: ResourcesSection = ResourcesSection()
    learner: ResourcesSection = ResourcesSection()

    @property
    def launched(self) -> frozenset[str]:
        """Roles whose workers a launcher starts; none for ``local``."""
        return frozenset(self.roles) if self.on != "local" else frozenset()

    @property
    def elsewhere(self) -> frozenset[str]:
        """Roles whose workers use no resources of this host."""
        return self.launched if self.on != "join" else frozenset()

    def resources(self, role: str) -> ResourcesSection:
        return getattr(self, role) if role in ELASTIC_ROLES else ResourcesSection()


class RecoverySection(Section):
    """Repair of lost or suspected workers, beyond restarting dead and stuck ones."""

    policy: Literal["act", "own_signs", "advise"] = setting(
        "own_signs",
        "act: the observer's incidents also restart and evict workers. own_signs: only exits and hangs that the "
        "supervisor detects itself do; incidents lead to advice. advise: nothing is evicted, and `repairs.jsonl` "
        "says what would have been done. Dead and stuck workers are always restarted.",
    )
    tolerate_s: float = setting(
        10.0, "An incident about a worker is ignored until it has been observed for this long in total.", gt=0.0
    )
    restart_timeout_s: float | None = setting(
        None,
        "If a lost worker has neither worked nor made progress in loading for this long, the next repair is tried. Default: "
        "supervisor.start_timeout_s plus a minute.",
        gt=0.0,
    )
    steady_s: float = setting(30.0, "A worker counts as repaired once it has worked for this long.", gt=0.0)
    settle_s: float = setting(
        150.0, "If an incident is still open this long after a restart, the restart did not repair it.", gt=0.0
    )
    max_repairs: Positive = setting(
        5,
        "How many times in a row a worker may be lost without steady_s of work in between. One more loss evicts it.",
        unit="losses of a worker",
    )
    link_alarms: int = setting(
        2, "Incidents about one worker's links that are tolerated within link_window_s.", ge=0, unit="incidents"
    )
    link_window_s: float = setting(300.0, "Time over which link_alarms counts.", gt=0.0)
    incident_restarts: int = setting(
        3,
        "Restarts of one worker within window_s because of incidents. After that it is evicted.",
        ge=0,
        unit="restarts",
    )
    max_evictions: int = setting(
        2,
        "Workers that the supervisor may evict within window_s. 0: none. Operators may evict more.",
        ge=0,
        unit="workers",
    )
    faults_per_day: float = setting(
        0.0023,
        'Expected losses of one worker per day, from which fleet.standby = "auto" is computed. After three repairs the '
        "run's own rate counts, if it is higher.",
        ge=0.0,
        unit="losses of a worker a day",
    )
    window_s: float = setting(3600.0, "Time over which incident_restarts and max_evictions count.", gt=0.0)


class ObserverSection(Section):
    """The worker that detects anomalous workers and stalls, and writes incidents. The run does not
    depend on it."""

    enabled: bool = setting(True, "Start an observer with the fleet.")
    thresholds: str = setting("", "File of thresholds from `headrace fleet watch calibrate`. Empty: the built-in ones.")
    keep_mb: Positive = setting(256, "Size of the metrics kept in the run's folder `observed`; the oldest are deleted.")


_PROJECT: Final = re.compile(r"([A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]{1,128}")
_SQLITE: Final = "sqlite:///"


def _project(text: str) -> str:
    if _PROJECT.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a Weights & Biases project; expected PROJECT or ENTITY/PROJECT, without a URL"
        )
    return text


def _tracking(text: str) -> str:
    """Return a tracking URI, with the path of a file made absolute."""
    if text.startswith(_SQLITE) and len(text) > len(_SQLITE):
        return f"{_SQLITE}{Path(text.removeprefix(_SQLITE)).expanduser().absolute()}"
    try:
        parts = urlsplit(text)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_secret = bool(parts.username or parts.password or parts.query)
    except ValueError:
        is_server = has_secret = False
    if is_server and has_secret:
        raise ValueError(
            "a tracking URI has no name, password or query; remove them, and give MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
        )
    if not is_server:
        shown = f"{text.partition('://')[0]}://" if "://" in text else repr(text)
        raise ValueError(
            f"{shown} is not a tracking URI that Headrace can write to; expected http://HOST:PORT, https://HOST or sqlite:///FILE"
        )
    return text.rstrip("/")


class SinksSection(Section):
    """Where metrics are written besides history.jsonl. An unreachable sink never stops a run: it is
    logged once, and its rows wait in the history."""

    tensorboard: bool = setting(True, "Write TensorBoard's event files to the folder tensorboard of the run.")
    wandb: Annotated[str, AfterValidator(_project)] | None = setting(
        None,
        "PROJECT or ENTITY/PROJECT of Weights & Biases; needs `pip install 'headrace[wandb]'`. The key comes from "
        "`wandb login` or WANDB_API_KEY, never from here. Default: none.",
    )
    wandb_mode: Literal["online", "offline"] | None = setting(
        None,
        "offline: write to the run's folder sinks/wandb, for `wandb sync`. Default: WANDB_MODE, else online.",
        read_if=_WANDB,
    )
    mlflow: Annotated[str, AfterValidator(_tracking)] | None = setting(
        None,
        "MLflow's tracking URI: http://HOST:PORT, https://HOST or sqlite:///FILE; needs `pip install 'headrace[mlflow]'`. "
        "Credentials come only from the environment, such as MLFLOW_TRACKING_TOKEN. Default: none.",
    )
    mlflow_experiment: str = setting(
        "headrace", "Experiment of the run; created if missing.", min_length=1, read_if=_MLFLOW
    )
    finish_s: float = setting(30.0, "How long the run waits at its end for a sink to accept the last points.", gt=0.0)


def _collector(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_ours = is_url and not (parts.username or parts.password or parts.query)
        has_path = bool(parts.path.strip("/"))
    except ValueError:
        is_ours = has_path = False
    if not is_ours:
        raise ValueError(
            "not a URL of a collector; expected http://HOST:PORT/v1/traces or https://..., without a name, password or "
            "query; headers with a key go into OTEL_EXPORTER_OTLP_HEADERS"
        )
    return text if has_path else f"{text.rstrip('/')}/v1/traces"


class TracingSection(Section):
    """OpenTelemetry traces, one per trajectory. An unreachable collector never holds up a worker:
    its spans are lost, and this is logged once."""

    otlp: Annotated[str, AfterValidator(_collector)] | None = setting(
        None,
        "URL of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; needs `pip install 'headrace[otel]'`. "
        "Every worker sends to it. Default: no traces.",
    )
    share: float = setting(
        1.0, "Share of trajectories that are traced.", gt=0.0, le=1.0, unit="share of trajectories", read_if=_TRACES
    )


REWARDS: Final = "code.rewards"
WORKERS: Final = "code.workers"
CODE_KEYS: Final = (REWARDS, WORKERS)
"""Settings whose values are code versions. Empty: the code that the run started with."""
CodeVersionName = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")]


class CodeSection(Section):
    """Code that `headrace update --code` has brought into the running run, and how it is judged."""

    rewards: CodeVersionName = setting(
        "", "Version of the reward functions, a folder of the run's `code/`. Empty: those of reward.path."
    )
    workers: CodeVersionName = setting(
        "",
        "Version of Headrace's own packages for the workers, a folder of the run's `code/`. Empty: the installed ones.",
    )
    canary_pieces: Positive = setting(
        16,
        "Pieces of work that the first worker does with a new version before other workers take it.",
        unit="pieces of work",
    )
    canary_timeout_s: float = setting(
        60.0,
        "If the first worker got fewer pieces in this time but is ready and idle, the version counts as good, too.",
        gt=0.0,
    )
    judged_updates: Positive = setting(
        8,
        "Updates before and after a new version whose rates are compared. A rate lower by a third rolls the version back. "
        "So do too few updates in 1.5 times the longest time that as many took before, and at least a minute.",
    )
    lazy_limit_s: float = setting(
        86_400.0, "Workers that have not restarted this long after `headrace update --lazily` are replaced.", gt=0.0
    )
