"""``<run_dir>/standbys/``: messages between standbys and their supervisor, as files.

    <standby>.json         by the standby, once a second: its process, roles, weights and memory
    <standby>.order.json   by the supervisor: which worker it becomes; the standby removes it, and obeys

An order names the process too, so that no process of an earlier supervisor obeys it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from pipeline.files import write_private

_FOLDER = "standbys"
_ORDER = ".order.json"


class StandbyReport(msgspec.Struct, frozen=True):
    """A standby's own record, renewed while it loads and waits."""

    pid: int
    turn: int
    """Grows with each report."""
    roles: tuple[str, ...]
    """Of the workers that it may become; none while it loads."""
    version: int | None
    """Of the weights that it serves; None where it follows none."""
    memory_bytes: int
    """Of this process alone; pages that others share do not count."""
    prepared_s: float
    """From its start until all was loaded, in seconds; 0 before that."""
    progress: int = 0
    """Pieces of its loading so far."""
    is_taking: bool = False
    """Whether it loads a newer version of the weights."""

    def in_words(self, name: str) -> str:
        """Return a sentence: ``standby-1 waits to be a generator or reward: 812 MiB idle``."""
        if not self.roles:
            return f"{name} loads: {self.memory_bytes >> 20} MiB so far"
        weights = "" if self.version is None else f", weights of version {self.version}"
        return f"{name} waits to be a {' or '.join(self.roles)}: {self.memory_bytes >> 20} MiB idle{weights}"


class StandbyOrder(msgspec.Struct, frozen=True):
    """Become a worker."""

    pid: int
    role: str
    worker: str


def standbys_folder(run_dir: Path) -> Path:
    """Return the folder of a run's standbys."""
    return run_dir / _FOLDER


def clear_standbys(run_dir: Path) -> None:
    """Make the folder, and remove what earlier standbys left in it. Raises OSError."""
    folder = standbys_folder(run_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def write_report(run_dir: Path, standby: str, report: StandbyReport) -> None:
    """Renew this standby's record. Raises OSError."""
    write_private(standbys_folder(run_dir) / f"{standby}.json", msgspec.json.encode(report))


def read_report(run_dir: Path, standby: str) -> StandbyReport | None:
    """Return a standby's newest record; None without a readable one."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((standbys_folder(run_dir) / f"{standby}.json").read_bytes(), type=StandbyReport)
    return None


def read_reports(run_dir: Path) -> dict[str, StandbyReport]:
    """Return the newest records of all standbys, by name."""
    found: dict[str, StandbyReport] = {}
    with suppress(OSError):
        names = [path.stem for path in standbys_folder(run_dir).glob("*.json") if not path.name.endswith(_ORDER)]
        found = {name: report for name in sorted(names) if (report := read_report(run_dir, name)) is not None}
    return found


def remove_report(run_dir: Path, standby: str) -> None:
    """Remove a standby's files: it has ended, or is a worker. A refusal is ignored."""
    for path in (standbys_folder(run_dir) / f"{standby}.json", order_path(run_dir, standby)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def order_path(run_dir: Path, standby: str) -> Path:
    """Return the file of a standby's order."""
    return standbys_folder(run_dir) / f"{standby}{_ORDER}"


def give_order(run_dir: Path, standby: str, order: StandbyOrder) -> None:
    """Give a standby its order. Raises OSError."""
    write_private(order_path(run_dir, standby), msgspec.json.encode(order))


def take_order(run_dir: Path, standby: str, pid: int) -> StandbyOrder | None:
    """Return and remove the order that process ``pid`` was given; None without one."""
    path = order_path(run_dir, standby)
    with suppress(OSError, msgspec.MsgspecError):
        order = msgspec.json.decode(path.read_bytes(), type=StandbyOrder)
        if order.pid == pid:
            path.unlink()
            return order
    return None
