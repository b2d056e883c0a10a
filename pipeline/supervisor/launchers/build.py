"""Builds the configured launcher, and shows what it would start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.operations import LaunchSection
from pipeline.config.schema import RunConfig
from pipeline.ledger.address import read_address, read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.server.embedded import external_url
from pipeline.ledger.token import Token, read_authority, read_token, write_token
from pipeline.ledger.url import has_credentials, is_hidden, refuse_plaintext, without_credentials
from pipeline.supervisor.fleet_plan import worker_name
from pipeline.supervisor.fleet_size import desired_counts
from pipeline.supervisor.launchers.commands import JoinCommand, TokenOf
from pipeline.supervisor.launchers.seam import ConfiguredLauncher, JobState, Launcher
from protocol.errors import ConfigError
from protocol.ids import Role

TOKENS = "tokens"
"""Subfolder of the run's folder with the join tokens of launched roles."""


def launched_workers(config: RunConfig) -> list[tuple[Role, str]]:
    roles = config.launch.launched
    wanted = desired_counts(config).items()
    return [(role, worker_name(role, number)) for role, count in wanted if role in roles for number in range(count)]


def join_command(config: RunConfig, run_dir: Path) -> JoinCommand:
    """Return the join command of a run's launched workers. The ledger's address comes from the
    configuration, else from the run's record, else from ``REDIS_URL``.

    Raises ConfigError: other hosts could not reach the ledger or the mailboxes with these settings."""
    settings = config.launch
    if config.wire.transport != "tcp":
        raise ConfigError(
            f"launch.on is {settings.on}, and wire.transport {config.wire.transport} reaches no other host; set "
            "wire.transport to tcp"
        )
    url = settings.ledger_url or config.ledger.url or _recorded_url(run_dir) or external_url(None, os.environ)
    if url is None or url.startswith("unix://"):
        named = url or "a server of this run"
        raise ConfigError(
            f"launch.on is {settings.on}, but the ledger would be {named}, which no other host reaches; "
            "give a server's address in ledger.url or REDIS_URL, as rediss://HOST:6379/0"
        )
    if settings.ledger_url is not None and (has_credentials(url) or is_hidden(url)):
        raise ConfigError(
            "launch.ledger_url has a user or a password, which would be visible in process arguments; give only the "
            "address: the token contains both"
        )
    plaintext = config.ledger.allow_plaintext
    if not plaintext:
        refuse_plaintext(url, "set ledger.allow_plaintext")
    return JoinCommand(config.run.name, without_credentials(url), tokens_of(run_dir), settings.program, plaintext)


def _recorded_url(run_dir: Path) -> str | None:
    recorded = read_address(run_dir)
    return None if recorded is None or recorded.is_embedded else recorded.url


def tokens_of(run_dir: Path) -> TokenOf:
    def token_of(role: Role) -> Token:
        return read_token(run_dir / TOKENS / f"{role}.token")

    return token_of


def build_launcher(
    settings: LaunchSection, join: JoinCommand, workers: Sequence[tuple[Role, str]] = ()
) -> ConfiguredLauncher:
    """Return the configured launcher. ``workers``: role and name of each launched worker. Raises
    ConfigError: it cannot work on this host."""
    match settings.on:
        case "ssh":
            from pipeline.supervisor.launchers.hosts import SshLauncher

            return SshLauncher(settings, join)
        case "slurm":
            from pipeline.supervisor.launchers.slurm import SlurmLauncher

            return SlurmLauncher(settings, join)
        case "kubernetes":
            from pipeline.supervisor.launchers.kubernetes import KubernetesLauncher

            return KubernetesLauncher(settings, join)
        case "ray":
            from pipeline.supervisor.launchers.ray_actors import RayLauncher

            return RayLauncher(settings, join, workers)
        case _:
            raise ConfigError(f"launch.on is {settings.on}, which starts processes of this host")


def launcher_of(config: RunConfig, run_dir: Path) -> ConfiguredLauncher | None:
    """Return a run's launcher; None if all its workers are processes of this host. Raises
    ConfigError."""
    if not config.launch.launched:
        return None
    if config.launch.on == "join":
        from pipeline.supervisor.launchers.hosts import local_join_launcher

        return local_join_launcher(config, run_dir, tokens_of(run_dir))
    return build_launcher(config.launch, join_command(config, run_dir), launched_workers(config))


def end_jobs(config: RunConfig, run_dir: Path) -> int:
    """End all jobs of a run without a supervisor; return how many. Raises LaunchFailed,
    ConfigError."""
    launcher = launcher_of(config, run_dir)
    if launcher is None:
        return 0
    num_ended = end_all(launcher)
    launcher.clear(run_dir / "logs")
    return num_ended


def end_all(launcher: Launcher) -> int:
    """End all of a launcher's running and waiting jobs; return how many. Raises LaunchFailed."""
    left = [worker for worker, job in launcher.listing().items() if job.state is not JobState.ENDED]
    for worker in left:
        launcher.stop(worker, now=True)
    return len(left)


def dry_run(config: RunConfig) -> str:
    """Describe the jobs that would be submitted for the fleet. Starts nothing, and needs no program
    of the target system."""
    settings = config.launch
    if settings.on == "local":
        counts = ", ".join(f"{count} {role}" for role, count in desired_counts(config).items())
        return f"# processes of this host: {counts}\n"
    if settings.on == "join":
        names = ", ".join(worker for _, worker in launched_workers(config))
        return f"# joined workers of this host: {names}\n"
    join = join_command(config, config.run_dir)
    match settings.on:
        case "ssh":
            from pipeline.supervisor.launchers.hosts import dry_run as hosts_dry_run

            return hosts_dry_run(settings, [worker for _, worker in launched_workers(config)])
        case "slurm":
            from pipeline.supervisor.launchers.slurm import job_script

            scripts = [job_script(settings, join, role, worker) for role, worker in launched_workers(config)]
            return "\n".join(["# one script per worker, each for sbatch\n", *scripts])
        case "kubernetes":
            from pipeline.config.load import to_toml
            from pipeline.supervisor.launchers.kubernetes import manifests

            roles = {role: count for role, count in desired_counts(config).items() if role in settings.launched}
            # the run's host reads the ledger's address and password from a Secret
            address = {"ledger": config.ledger.model_copy(update={"url": None})}
            launch = {"launch": settings.model_copy(update={"ledger_url": join.url})}
            by_supervisor = [Role.GENERATOR] if config.fleet.max_generators is not None else []
            text = to_toml(config.model_copy(update=address | launch))
            return manifests(settings, join, roles, text, by_supervisor=by_supervisor)
        case _:
            from pipeline.supervisor.launchers.ray_actors import dry_run as ray_dry_run

            return ray_dry_run(settings, join, launched_workers(config))


async def keep_tokens(config: RunConfig, run_dir: Path) -> None:
    """Create a token for each launched role that has no valid one. Raises LedgerUnavailable, and
    ConfigError: the ledger's server permits no ACL commands."""
    url = read_ledger_url(run_dir)
    folder = run_dir / TOKENS
    folder.mkdir(mode=0o700, exist_ok=True)
    admin = TokenAdmin(connect(url), config.run.name)
    try:
        valid = {row.id for row in await admin.rows()}
        for name in sorted(config.launch.launched):
            path = folder / f"{name}.token"
            if _token_id(path) not in valid:
                write_token(path, await admin.create(Role(name), ca=read_authority(url)))
    finally:
        await admin.aclose()


def _token_id(path: Path) -> str | None:
    try:
        return read_token(path).id
    except ConfigError:
        return None
