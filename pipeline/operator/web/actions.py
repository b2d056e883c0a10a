"""Changes that the page requests, by the functions of the commands.

Each takes a connected run and a request's values, and returns what is now wanted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from pipeline.ledger.types import Pause
from pipeline.operator import steering
from pipeline.operator.attached import Attached
from pipeline.runtime.registry.contract import Fleet
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.errors import ConfigError
from protocol.ids import ELASTIC_ROLES, Role

_MAX_COUNT: Final = 100_000


async def scale(at: Attached, values: Mapping[str, Any]) -> Fleet:
    """Set how many workers a role has: ``role``, ``count``; null is auto, for generators. Raises
    ConfigError."""
    role, count = values.get("role"), values.get("count")
    if role not in ELASTIC_ROLES:
        raise ConfigError(f"role {role!r}: expected one of {', '.join(ELASTIC_ROLES)}")
    is_number = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= _MAX_COUNT
    if not is_number and not (count is None and role == Role.GENERATOR):
        raise ConfigError(f"count {count!r}: expected a whole number from 1, or null for generators by demand")
    _check_running(at)
    return await steering.change_fleet(at, {Role(role): count})


async def pause(at: Attached, values: Mapping[str, Any]) -> Pause:
    """Stop the admission of new groups; ``reason``: in the operator's words. Raises ConfigError."""
    _check_running(at)
    return await steering.pause(at, str(values.get("reason", "")))


async def resume(at: Attached, _: Mapping[str, Any]) -> dict[str, bool]:
    """Admit new groups again. Raises ConfigError."""
    _check_running(at)
    return {"was_paused": await steering.resume(at) is not None}


async def drain(at: Attached, values: Mapping[str, Any]) -> Fleet:
    """Have one worker finish, take no new work, and leave: ``worker``. Raises ConfigError."""
    _check_running(at)
    return await steering.drain(at, str(values.get("worker", "")))


def _check_running(at: Attached) -> None:
    """Raise ConfigError for a run without a supervisor, and for a copy: a change of it would be
    lost."""
    if supervisor_pid(at.run_dir) is None:
        raise ConfigError(f"{at.run_dir.name} is not running; continue it with `headrace up --resume {at.run_dir}`")
    if at.is_copy:
        raise ConfigError(
            f"{at.run_dir.name} has just been started again, and the page still reads a copy of it; try again in a "
            f"few seconds"
        )


ACTIONS: Final[Mapping[str, Callable[[Attached, Mapping[str, Any]], Awaitable[object]]]] = {
    "scale": scale,
    "pause": pause,
    "resume": resume,
    "drain": drain,
}
"""By their addresses."""
