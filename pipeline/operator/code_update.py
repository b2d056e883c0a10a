"""Another version of the reward functions for a running run: copied, checked, then a change of its
settings (``pipeline.operator.updating``).

The check imports the functions in a process of its own, with the sandbox's limits. A version that
fails there never reaches the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


async def prepare_rewards(at: Attached, config: RunConfig, source: Path) -> str:
    """Copy and check another version of the run's reward functions; return it. ``config``: what
    holds now. Raises ConfigError: the code cannot be copied or imported, has none of the run's
    functions, or would not reach all of its reward workers."""
    import asyncio

    from pipeline.files.code_copies import checked_code, keep_code

    await _check_reach(at, config)
    version = await asyncio.to_thread(keep_code, source, at.run_dir)
    if version == config.code.rewards:
        raise ConfigError(f"{source} is version {version}, which holds already; nothing is changed")
    await check_rewards(config, checked_code(at.run_dir, version), source)
    return version


async def check_rewards(config: RunConfig, folder: Path, source: Path) -> None:
    """Import the run's reward functions with a version's folder first. Raises ConfigError."""
    from pipeline.config.import_path import is_import_path
    from pipeline.files.code_copies import module_names
    from pipeline.rewards.pool import VerifierPool
    from protocol.headrace import PACKAGES

    there = module_names(folder)
    if own := sorted(there & set(PACKAGES)):
        raise ConfigError(
            f"{source} has {own[0]}, a package of Headrace's own: reward functions alone are updated while a run goes on. For "
            f"another Headrace: `headrace down`, install it, `headrace up --resume {config.run_dir}`"
        )
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


async def _check_reach(at: Attached, config: RunConfig) -> None:
    """Raise ConfigError where reward workers are out of the run's host: rewards of one group must
    come from the same functions."""
    from pipeline.supervisor.takeover import is_own
    from protocol.ids import Role

    beats = await at.registry.heartbeats(Role.REWARD)
    guests = [beat for beat in beats if not is_own(beat.who.worker)]
    if guests or Role.REWARD in config.launch.launched:
        there = (
            f"{guests[0].who.worker} is on {guests[0].host}" if guests else "launch.roles has reward workers elsewhere"
        )
        raise ConfigError(
            f"{there}, which the new code would not reach, and rewards of one group must be comparable: end those workers "
            "first (`headrace drain`), or go by `headrace down` and `headrace up --resume`"
        )
