"""Settings of launchers: where workers of the scaling roles are started, and with which resources.

``pipeline.supervisor.launchers`` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator

from pipeline.config.base import Positive, Section, setting

SCALING_ROLES: Final = ("generator", "reward", "reference")


def _scaling_role(name: str) -> str:
    if name not in SCALING_ROLES:
        raise ValueError(f"{name!r} cannot be launched; expected {', '.join(SCALING_ROLES)}")
    return name


ScalingRole = Annotated[str, AfterValidator(_scaling_role)]


class ResourcesSection(Section):
    """Requests of one worker of a role to Slurm, Kubernetes or Ray."""

    cpus: Positive = setting(1, "Processor cores.")
    gpus: int = setting(0, "GPUs.", ge=0)
    memory_gb: Positive | None = setting(None, "Memory. Absent: the place's default.")


class SshSection(Section):
    """Hosts that are reached by the system's ssh client, with its configuration and keys."""

    hosts: tuple[str, ...] = setting((), "HOST or USER@HOST, or names of ssh's configuration. Workers take turns.")
    options: tuple[str, ...] = setting((), 'More options for ssh, such as ["-p", "2222"].')


class SlurmSection(Section):
    """Jobs of a Slurm cluster, one a worker. ``headrace up`` runs where sbatch is."""

    options: tuple[str, ...] = setting((), 'Further options of sbatch, as ["--partition=gpu", "--time=8:00:00"].')
    folder: Path = setting(
        Path("~/.headrace/slurm"),
        "For token files and outputs of jobs, on a file system that the nodes see. Nothing else is shared.",
    )


class KubernetesSection(Section):
    """Pods of a Kubernetes cluster, one a worker, by kubectl."""

    image: str = setting("headrace:latest", "Container image that has Headrace.")
    namespace: str = setting("default", "Namespace of all objects.", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    context: str | None = setting(None, "kubectl's context. Absent: its current one, or the pod's own account.")
    cache_gb: Positive = setting(50, "Largest cache of a pod's files.")
    storage_gb: Positive = setting(100, "Volume of the run's host: its folder, with checkpoints.")


class RayRoleSection(Section):
    """Where in a Ray cluster a role's workers may be."""

    resources: dict[str, float] = setting(
        {}, "Custom resources that a worker uses of its node, such as {fast_disk = 1}."
    )
    labels: dict[str, str] = setting({}, 'Labels of its node, as {"ray.io/accelerator-type" = "H100"}.')


class RaySection(Section):
    """Actors of a Ray cluster, one a worker. ``headrace up`` runs on a node of the cluster."""

    address: str = setting("auto", "HOST:PORT of the cluster's head. auto: RAY_ADDRESS, or the cluster of this host.")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = setting(
        None,
        "Placement group of the configured fleet: all its workers get a place together. A separate group keeps "
        "launch.learner free on this node. Workers added by scaling are not in a group. Absent: no groups; Ray spreads "
        "workers.",
    )
    max_restarts: int = setting(
        -1,
        "How often Ray replaces a lost actor. The worker in it begins again when restart budgets allow. -1: no limit.",
        ge=-1,
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

    def role(self, role: str) -> RayRoleSection:
        """Return where workers of a role may be."""
        return {"generator": self.generator, "reward": self.reward, "reference": self.reference}[role]


class LaunchSection(Section):
    """Where workers of the scaling roles are started. The learner and the value worker stay with
    the supervisor. In Kubernetes, learner is what its pod requests; in a Ray placement group, what
    is kept free for it."""

    on: Literal["local", "join", "ssh", "slurm", "kubernetes", "ray"] = setting(
        "local",
        "local: processes on this host. join: also on this host, but each a `headrace fleet join` in its own "
        "folder, as on other places.",
    )
    roles: tuple[ScalingRole, ...] = setting(SCALING_ROLES, "Roles that are launched there; others run on this host.")
    program: tuple[str, ...] = setting(("headrace",), "Headrace's command at that place.")
    ledger_url: str | None = setting(
        None, "The ledger's address as the place reaches it, without user and password. Absent: ledger.url."
    )
    poll_s: float = setting(2.0, "Time between two checks of the place.", gt=0.0)
    answer_s: float = setting(60.0, "Limit of one call of ssh, Slurm, kubectl or Ray.", gt=0.0)
    ssh: SshSection = SshSection()
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    ray: RaySection = RaySection()
    generator: ResourcesSection = ResourcesSection()
    reward: ResourcesSection = ResourcesSection()
    reference: ResourcesSection = ResourcesSection()
    learner: ResourcesSection = ResourcesSection()

    @property
    def launched(self) -> frozenset[str]:
        """Roles whose workers a launcher starts; none for ``local``."""
        return frozenset(self.roles) if self.on != "local" else frozenset()

    @property
    def elsewhere(self) -> frozenset[str]:
        """Roles whose workers take no room of this host."""
        return self.launched if self.on != "join" else frozenset()

    def resources(self, role: str) -> ResourcesSection:
        """Return what a worker of a role requests."""
        found = {"generator": self.generator, "reward": self.reward, "reference": self.reference}
        return found.get(role, ResourcesSection())
