"""``<run_dir>/ledger.json``: where a run's ledger is, for later commands and workers.

The file has mode 0600, since the address contains a password."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.files import write_private
from pipeline.ledger.url import hide_password, is_hidden
from pipeline.process.records import ProcessIdentity
from protocol.errors import ConfigError

LEDGER_FILE = "ledger.json"


class _Former(msgspec.Struct, frozen=True):
    """A field that only files of earlier releases have."""

    shards: tuple[str, ...] = ()
    """Further servers, each with a part of the run."""


class LedgerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's URL and, for an embedded ledger, its server process."""

    url: str
    """Includes the password; ``pipeline.ledger.redis.client`` lists the schemes."""
    is_embedded: bool = False
    socket: str = ""
    pid: int = 0
    """Pid of the embedded server when it started; 0 before that. ``process`` identifies it reliably."""
    process: ProcessIdentity | None = None
    """The same process, safe against pid reuse; None in files of earlier releases."""
    server: str = ""
    server_version: str = ""

    def __repr__(self) -> str:
        return f"LedgerAddress({hide_password(self.url)!r}, is_embedded={self.is_embedded}, pid={self.pid})"


def write_address(run_dir: Path, address: LedgerAddress) -> None:
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
            f"{path} names {1 + len(former.shards)} servers, with the run's groups spread over them; this release supports "
            "one server. Use the release that made the run, or start another run from its newest checkpoint's model"
        )
    return address


def known_url(run_dir: Path, configured: str | None) -> str | None:
    """Return the URL of a resumed run's ledger, with its password; None when it is embedded or new.

    The resolved configuration leaves the password out; the address file has it. Raises ConfigError when the
    two name different servers."""
    if configured is not None and not is_hidden(configured):
        return configured
    address = read_address(run_dir)
    known = None if address is None or address.is_embedded else address.url
    if configured is not None and (known is None or hide_password(known) != configured):
        raise ConfigError(
            f"ledger.url is {configured!r}, without its password, and {run_dir / LEDGER_FILE} does not have "
            "the password either. Give the whole URL again, in a run file or with --set ledger.url=URL"
        )
    return known


def read_ledger_url(run_dir: Path) -> str:
    """Return a run's ledger URL. Raises ConfigError when its ledger was never started."""
    address = read_address(run_dir)
    if address is None:
        raise ConfigError(f"{run_dir} has no {LEDGER_FILE}: its ledger was never started; run `headrace up` first")
    return address.url
