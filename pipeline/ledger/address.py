"""``<run_dir>/ledger.json``: where a run's ledger is, for every later command and worker.

The file has mode 0600, since the address holds a password."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.files import write_private
from pipeline.ledger.url import hide_password, is_hidden
from pipeline.process.records import ProcessIdentity
from protocol.errors import ConfigError

LEDGER_FILE = "ledger.json"


class _Former(msgspec.Struct, frozen=True):
    """What only files of earlier releases have."""

    shards: tuple[str, ...] = ()
    """Further servers, which had parts of the run."""


class LedgerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ledger is and, if it is embedded, its server process."""

    url: str
    """With the password; ``pipeline.ledger.redis.client`` has the schemes."""
    is_embedded: bool = False
    socket: str = ""
    """Path of the embedded server's socket."""
    pid: int = 0
    """Of the embedded server at its start; 0 before. ``process`` identifies it."""
    process: ProcessIdentity | None = None
    """The same process, safe against reuse of its pid; None in files of earlier releases."""
    server: str = ""
    """Path of the embedded server's program."""
    server_version: str = ""

    def __repr__(self) -> str:
        """Return the address without its password."""
        return f"LedgerAddress({hide_password(self.url)!r}, is_embedded={self.is_embedded}, pid={self.pid})"


def write_address(run_dir: Path, address: LedgerAddress) -> None:
    """Write a run's ledger address."""
    write_private(run_dir / LEDGER_FILE, msgspec.json.format(msgspec.json.encode(address)) + b"\n")


def read_address(run_dir: Path) -> LedgerAddress | None:
    """Return a run's ledger address; None when no ledger was ever started.

    Raises ConfigError when the file is not a ledger address."""
    path = run_dir / LEDGER_FILE
    try:
        content = path.read_bytes()
        former = msgspec.json.decode(content, type=_Former)
        address = msgspec.json.decode(content, type=LedgerAddress)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a ledger address: {error}; remove it, and start the run again") from error
    if former.shards:
        raise ConfigError(
            f"{path} names {1 + len(former.shards)} servers, and a run has one: its groups are on all of them. Read it with "
            "the release that made it, or start another run from its newest checkpoint's model"
        )
    return address


def known_url(run_dir: Path, configured: str | None) -> str | None:
    """Return the URL of a resumed run's ledger, with its password; None when it is embedded or new.

    The resolved configuration has no password; the address has. Raises ConfigError when the
    configuration and the address name different servers."""
    if configured is not None and not is_hidden(configured):
        return configured
    address = read_address(run_dir)
    known = None if address is None or address.is_embedded else address.url
    if configured is not None and (known is None or hide_password(known) != configured):
        raise ConfigError(
            f"ledger.url is {configured!r}, without its password, and {run_dir / LEDGER_FILE} does not have "
            "it either. Give the whole URL again, in a run file or with --set ledger.url=URL"
        )
    return known


def read_ledger_url(run_dir: Path) -> str:
    """Return a run's ledger URL. Raises ConfigError when its ledger was never started."""
    address = read_address(run_dir)
    if address is None:
        raise ConfigError(f"{run_dir} has no {LEDGER_FILE}: its ledger was never started; run `headrace up` first")
    return address.url
