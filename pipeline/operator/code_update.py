"""Another version of a running run's code: copied, checked, then a change of its settings
(``pipeline.operator.updating``).

A folder with Headrace's own packages is code of the workers; any other has reward functions. The
check imports it in a process of its own, reward functions with the sandbox's limits. A version that
fails there never reaches the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_CHECK_S = 120.0
"""For imports of all workers on a busy machine."""


async def prepare_code(at: Attached, config: RunConfig, source: Path) -> tuple[str, str]:
    """Copy and check another version of code; return its setting and the version. ``config``: what
    holds now. Raises ConfigError: the code cannot be copied or imported, or has nothing of the
    run's. It raises that, too, where shared code differs, or workers are out of reach."""
    from pipeline.config.operations import REWARDS, WORKERS

    if packages := _own_packages(source):
        return WORKERS, await _prepare_workers(at, config, source, packages)
    return REWARDS, await prepare_rewards(at, config, source)


async def prepare_rewards(at: Attached, config: RunConfig, source: Path) -> str:
    """Copy and check another version of the run's reward functions; return it. ``config``: what
    holds now. Raises ConfigError: the code cannot be copied or imported, has none of the run's
    functions, or would not reach all of its reward workers."""
    import asyncio

    from pipeline.config.operations import REWARDS
    from pipeline.files.code_copies import checked_code, keep_code

    await check_reach(at, config, REWARDS)
    version = await asyncio.to_thread(keep_code, source, at.run_dir)
    if version == config.code.rewards:
        raise ConfigError(f"{source} is version {version}, which is already in effect; nothing was changed")
    await check_rewards(config, checked_code(at.run_dir, version), source)
    return version


async def check_rewards(config: RunConfig, folder: Path, source: Path) -> None:
    """Import the run's reward functions with a version's folder first. Raises ConfigError."""
    from pipeline.config.import_path import is_import_path
    from pipeline.files.code_copies import module_names
    from pipeline.rewards.pool import VerifierPool

    there = module_names(folder)
    paths = sorted(path for path in config.verifier_paths if is_import_path(path))
    used = {path.partition(":")[0].partition(".")[0] for path in paths}
    if not used & there:
        names = ", ".join(sorted(used)) or "none: its verifiers are Headrace's own"
        raise ConfigError(f"{source} has no module that the run's reward functions are in; expected one of: {names}")
    section = config.reward.model_copy(update={"processes": 1})
    async with VerifierPool(section, configured=config.verifier_paths, code=folder) as pool:
        await pool.start(paths)
        for function in config.reward.functions.values():
            await pool.start([function.verifier], whole_group=function.whole_group)


async def _prepare_workers(at: Attached, config: RunConfig, source: Path, packages: list[str]) -> str:
    """Copy and check another version of Headrace's packages; return it."""
    import asyncio

    from pipeline.config.operations import WORKERS
    from pipeline.files.code_copies import checked_code, differing, keep_code, shared_digests
    from pipeline.observability.start_record import read_starts
    from protocol.headrace import PACKAGES

    remedy = f"for such a change `headrace down`, install it, `headrace up --resume {config.run_dir}`"
    if missing := sorted(set(PACKAGES) - set(packages)):
        raise ConfigError(
            f"{source} has {packages[0]}, one of Headrace's packages, but no {missing[0]}; expected all of "
            f"{', '.join(PACKAGES)}, or only reward functions"
        )
    await check_reach(at, config, WORKERS)
    starts, _ = await asyncio.to_thread(read_starts, at.run_dir)
    shared = starts[-1].start.shared_code if starts else {}
    if not shared:
        raise ConfigError(
            f"{at.run_dir} was started by a Headrace that records no shared code, to compare with: {remedy}"
        )
    version = await asyncio.to_thread(keep_code, source, at.run_dir, PACKAGES)
    if version == config.code.workers:
        raise ConfigError(f"{source} is version {version}, which is already in effect; nothing was changed")
    folder = checked_code(at.run_dir, version)
    if (place := differing(shared, await asyncio.to_thread(shared_digests, folder))) is not None:
        raise ConfigError(
            f"{source} has other code in {place} than the run was started with. All processes share that code, and the "
            f"supervisor keeps its own: {remedy}"
        )
    await asyncio.to_thread(_check_workers, at.run_dir, folder, source)
    return version


def _own_packages(source: Path) -> list[str]:
    """Return which of Headrace's packages a folder has."""
    from protocol.headrace import PACKAGES

    return [name for name in PACKAGES if (source / name / "__init__.py").is_file()]


def _check_workers(run_dir: Path, folder: Path, source: Path) -> None:
    """Import a version's workers in a process of their own, with the run's settings. Raises
    ConfigError."""
    import subprocess

    from pipeline.process.descendants import worker_mark
    from pipeline.supervisor.starter import marked_environment
    from protocol import headrace

    command = headrace.of_root(headrace.command("workers.code_check", str(run_dir)), folder)
    environment = marked_environment(worker_mark(run_dir, "code-check"))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment,
            timeout=_CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{source}: its workers are not imported within {_CHECK_S:g} s; nothing is changed") from None
    except OSError as error:
        raise ConfigError(f"{source}: its workers cannot be imported: {error}; nothing is changed") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"its process ended with code {done.returncode}"]
        raise ConfigError(f"{source}: its workers cannot be imported: {lines[-1]}; nothing is changed")


async def check_reach(at: Attached, config: RunConfig, key: str) -> None:
    """Raise ConfigError where workers that a version of this setting concerns are out of the run's
    host."""
    from pipeline.config.changing import coded_roles
    from pipeline.config.operations import REWARDS
    from pipeline.supervisor.takeover import is_own

    reason = "rewards of one group must be comparable" if key == REWARDS else "its workers must go by the same code"
    for role in sorted(coded_roles(key)):
        guests = [beat for beat in await at.registry.heartbeats(role) if not is_own(beat.who.worker)]
        if guests or role in config.launch.launched:
            there = (
                f"{guests[0].who.worker} is on {guests[0].host}"
                if guests
                else f"launch.roles has {role} workers elsewhere"
            )
            raise ConfigError(
                f"{there}, which the new code would not reach, and {reason}: end those workers first (`headrace "
                f"fleet drain`), or use `headrace down` and `headrace up --resume`"
            )
