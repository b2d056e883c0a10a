"""``<run_dir>/ledger.json``: where a run's ledger is, for every later command and worker.

*Consumes* the address that the supervisor settled on. *Produces* a file of mode 0600, since the
address holds a password. *Waits for* nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.files import write_private
from pipeline.ledger.url import hide_password, is_hidden
from pipeline.process.records import ProcessIdentity
from protocol.errors import ConfigError

LEDGER_FILE = "ledger.json"


class LedgerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ledger is and, when it is embedded, which process serves it."""

    url: str
    """``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://``, with the password."""
    is_embedded: bool = False
    socket: str = ""
    """Path of the embedded server's socket."""
    pid: int = 0
    """Of the embedded server when it was started; 0 in the moment before. ``process`` says whether
    that is still the server.
    """
    process: ProcessIdentity | None = None
    """The same process, for ever; None as well in what an earlier release wrote."""
    server: str = ""
    """Path of the embedded server's program."""
    server_version: str = ""

    def __repr__(self) -> str:
        """Return what may be logged: no password."""
        return f"LedgerAddress({hide_password(self.url)!r}, is_embedded={self.is_embedded}, pid={self.pid})"


def write_address(run_dir: Path, address: LedgerAddress) -> None:
    """Say where the ledger of this run is."""
    write_private(run_dir / LEDGER_FILE, msgspec.json.format(msgspec.json.encode(address)) + b"\n")


def read_address(run_dir: Path) -> LedgerAddress | None:
    """Return where the ledger of this run is; None when none was ever started.

    Raises:
        ConfigError: the file is not what was written.
    """
    path = run_dir / LEDGER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LedgerAddress)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a ledger address: {error}; remove it, and start the run again") from error


def known_url(run_dir: Path, configured: str | None) -> str | None:
    """Return the URL that a run which is resumed means by what its resolved configuration says.

    That configuration has no password; the address has. None: neither says anything, the ledger was
    embedded or never started.

    Raises:
        ConfigError: the configuration speaks of another server than the address.
    """
    if configured is not None and not is_hidden(configured):
        return configured
    address = read_address(run_dir)
    known = None if address is None or address.is_embedded else address.url
    if configured is not None and (known is None or hide_password(known) != configured):
        raise ConfigError(
            f"ledger.url is {configured!r}, whose password is not kept there, and {run_dir / LEDGER_FILE} does not know it "
            "either: give the whole URL again, in a run file or with --set ledger.url=URL"
        )
    return known


def read_ledger_url(run_dir: Path) -> str:
    """Return the URL of this run's ledger.

    Raises:
        ConfigError: no ledger was ever started for this run.
    """
    address = read_address(run_dir)
    if address is None:
        raise ConfigError(f"{run_dir} has no {LEDGER_FILE}: its ledger was never started; run `headrace up` first")
    return address.url
