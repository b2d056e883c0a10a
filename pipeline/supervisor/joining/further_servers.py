"""Ledger servers beside the home, as a joining host learns of them and reaches them.

The manifest has their addresses, and the authorities of their certificates. A join token is the
same user, with the same secret, on each. So all URLs of a joined folder name one token file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.token import read_authority
from pipeline.ledger.url import (
    AUTHORITY,
    JOINED_BY,
    refuse_plaintext,
    split_token_file,
    with_options,
    without_credentials,
)
from pipeline.runtime.worker_process import leaves
from protocol.errors import ConfigError, LedgerRefused, LedgerUnavailable

_ANSWER_S: Final = 2.0
_PATIENCE_S: Final = 5.0


class FurtherServer(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger server beside the home."""

    url: str
    """Without user, password and paths of the run's host."""
    ca: str = ""
    """PEM text of the authority of its certificate; "" for the system's."""


def further_servers(urls: Iterable[str]) -> tuple[FurtherServer, ...]:
    """Return what other hosts need of these servers. Raises ConfigError: an authority cannot be
    read."""
    return tuple(FurtherServer(url=without_credentials(url), ca=read_authority(url)) for url in urls)


def joined_urls(
    servers: Sequence[FurtherServer], home: str, folder: Path, *, allows_plaintext: bool
) -> tuple[str, ...]:
    """Return the servers' URLs for workers of a joined folder. They name the token file of the
    home's URL, and authorities that are written here.

    Raises ConfigError: the host joins without a token, or the token would go unencrypted over the
    network."""
    _, token_file = split_token_file(home)
    if servers and token_file is None:
        raise ConfigError(
            f"the run's ledger is on {1 + len(servers)} servers, and the password given is for one; join with --token FILE, "
            "since a join token is a user of them all: `headrace fleet tokens create`"
        )
    urls: list[str] = []
    for number, server in enumerate(servers, start=1):
        if not allows_plaintext:
            refuse_plaintext(server.url, "give --allow-plaintext")
        options = {JOINED_BY: str(token_file)}
        if server.ca:
            path = folder / f"ledger-ca-{number}.pem"
            write_private(path, server.ca.encode())
            options[AUTHORITY] = str(path.absolute())
        urls.append(with_options(server.url, options))
    return tuple(urls)


async def check_servers(urls: Iterable[str]) -> None:
    """Connect to each server once. Raises LedgerUnavailable or LedgerRefused, which name it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for url in urls:
                tasks.create_task(_check(url))
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from None


async def _check(url: str) -> None:
    client = connect(url, timeout_s=_ANSWER_S, patience_s=_PATIENCE_S)
    connection, name = PipelinedConnection(client), without_credentials(url)
    try:
        with ledger_faults("join"):
            await connection.ask("PING")
    except LedgerUnavailable as error:
        raise LedgerUnavailable(
            f"the ledger server {name}, a further one of this run, cannot be reached from {socket.gethostname()}: {error}"
        ) from error
    except LedgerRefused as error:
        raise LedgerRefused(f"ledger server {name}: {error}") from error
    finally:
        await connection.aclose()
        await client.aclose()
