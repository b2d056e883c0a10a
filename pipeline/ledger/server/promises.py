"""Checks an external ledger server: version, eviction, persistence and connections.

Nearly everything comes from INFO, since managed servers often forbid CONFIG. Unknown properties are None,
never guessed."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, cast

import redis.asyncio
from redis.exceptions import ResponseError

from pipeline.ledger.redis.errors import NOT_NOW, ledger_faults
from pipeline.ledger.server.binary import MIN_VERSION
from protocol.errors import ConfigError

CONNECTIONS_A_WORKER: Final = 3
"""For calls, notifications and heartbeats (``pipeline.runtime.worker_process``)."""
_OTHER_CONNECTIONS: Final = 32
"""For the supervisor, and commands such as `headrace status`."""
_KEEPS = "noeviction"


@dataclass(frozen=True, slots=True)
class ServerPromises:
    """A server's properties; None if unknown.

    Example: ``ServerPromises((7, 0, 15), 0, "noeviction", True, "everysec")``."""

    version: tuple[int, ...] | None
    """The Redis version that it implements."""
    max_memory_bytes: int | None
    """0 means no limit."""
    eviction_policy: str | None
    has_append_only_file: bool | None
    flushes: str | None
    """``appendfsync``: always, everysec or no."""
    max_clients: int | None = None
    """Connections that it accepts."""
    num_clients: int = 0
    """Connections that it has."""


async def read_promises(client: redis.asyncio.Redis, doing: str) -> ServerPromises:
    """Read a server's properties. ``doing`` names the setting in errors.

    Raises LedgerUnavailable without an answer, LedgerError for a refused password and other errors."""
    ask = cast("Any", client)
    with ledger_faults(doing):
        await ask.ping()
        server, memory, persistence, clients = [
            await _permitted(ask.info(section)) for section in ("server", "memory", "persistence", "clients")
        ]
        config = {**await _permitted(ask.config_get("maxmemory*")), **await _permitted(ask.config_get("append*"))}
    return ServerPromises(
        version=_version(server.get("redis_version")),
        max_memory_bytes=_integer(memory.get("maxmemory", config.get("maxmemory"))),
        eviction_policy=memory.get("maxmemory_policy", config.get("maxmemory-policy")),
        has_append_only_file=_truth(persistence.get("aof_enabled"), config.get("appendonly")),
        flushes=config.get("appendfsync"),
        max_clients=_integer(clients.get("maxclients")),
        num_clients=_integer(clients.get("connected_clients")) or 0,
    )


def judge_terms(terms: ServerPromises, place: str, *, num_workers: int = 0) -> tuple[str, ...]:
    """Return warnings about a usable server; ``place`` is its URL without the password.

    Raises ConfigError when it would lose parts of the ledger in normal operation, is too old, or accepts
    fewer connections than ``num_workers`` need."""
    if terms.version is not None and terms.version[:2] < MIN_VERSION:
        raise ConfigError(
            f"the ledger's server {place} is version {'.'.join(map(str, terms.version))}; expected Redis "
            f"{'.'.join(map(str, MIN_VERSION))} or later, or Valkey"
        )
    if terms.max_memory_bytes and terms.eviction_policy not in (None, _KEEPS):
        raise ConfigError(
            f"the ledger's server {place} has maxmemory-policy {terms.eviction_policy} at maxmemory "
            f"{terms.max_memory_bytes / 2**20:,.0f} MB, where it deletes parts of the ledger; expected {_KEEPS}. Set "
            f"`maxmemory-policy {_KEEPS}` in its configuration (or by CONFIG SET), or give the run a separate server"
        )
    needed = num_workers * CONNECTIONS_A_WORKER + _OTHER_CONNECTIONS
    if terms.max_clients is not None and num_workers and needed > terms.max_clients:
        raise ConfigError(
            f"the ledger's server {place} accepts {terms.max_clients:,} connections (maxclients); {num_workers:,} workers need "
            f"{needed:,}. Set `maxclients {needed + terms.num_clients}` in its configuration, and its limit of open files "
            "(ulimit -n) above that, or start fewer workers"
        )
    return tuple(_warnings(terms, place, needed if num_workers else 0))


def _warnings(terms: ServerPromises, place: str, needed: int) -> list[str]:
    found: list[str] = []
    if terms.max_clients is not None and needed > (free := terms.max_clients - terms.num_clients):
        found.append(
            f"warning: the ledger's server {place} has {terms.num_clients:,} of {terms.max_clients:,} connections in use; "
            f"this run needs {needed:,}, and {free:,} are free. Unless this run uses them, raise `maxclients` there"
        )
    if terms.has_append_only_file is False:
        found.append(
            f"warning: the ledger's server {place} keeps no append-only file (appendonly no). When it or its host dies, the "
            "run is lost, or repeats all training since a snapshot; set `appendonly yes` there"
        )
    elif terms.flushes == "no":
        found.append(
            f"warning: the ledger's server {place} leaves flushing to the operating system (appendfsync no): a power cut can "
            "lose half a minute of work; set `appendfsync everysec` there"
        )
    unknown = [
        name
        for name, value in (
            ("maxmemory", terms.max_memory_bytes),
            ("maxmemory-policy", terms.eviction_policy),
            ("appendonly", terms.has_append_only_file),
            ("appendfsync", terms.flushes if terms.has_append_only_file is not False else ""),
        )
        if value is None
    ]
    if unknown:
        found.append(
            f"warning: could not check {', '.join(unknown)} of the ledger's server {place}, which forbids INFO or "
            f"CONFIG to this user. Ensure that it has maxmemory-policy {_KEEPS}, appendonly yes and appendfsync everysec"
        )
    return found


async def _permitted(answer: Awaitable[Any]) -> dict[str, Any]:
    """Return a server's answer; empty when this user may not send the command, or it was renamed."""
    try:
        return await answer
    except NOT_NOW:
        raise
    except ResponseError:
        return {}


def _version(text: object) -> tuple[int, ...] | None:
    parts = str(text).split(".")
    return tuple(map(int, parts)) if text is not None and all(part.isdigit() for part in parts) else None


def _integer(value: object) -> int | None:
    return None if value is None else int(str(value))


def _truth(enabled: object, configured: object) -> bool | None:
    if enabled is not None:
        return bool(int(str(enabled)))
    return None if configured is None else configured == "yes"
