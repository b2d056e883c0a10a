"""Gathers the files of a copy while the run goes on.

Checkpoints and ended segments of the update log never change, so they are hard-linked into a
staging folder: a checkpoint that the run removes meanwhile survives until it is copied. Growing
files are copied. The ledger's append-only file comes last, so that it knows of every claim whose
effect is in the checkpoint; a resume gives back what later checkpoints had settled.

    <run_dir>/.copying/    the same paths as in the run's folder; removed after the copy

A run's passwords, keys, logs and sockets are never copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.config.load import read_resolved, write_resolved
from pipeline.ledger.address import read_address
from pipeline.ledger.url import hide_password
from pipeline.training.checkpoints import CHECKPOINTS, VALUE_CHECKPOINTS, list_checkpoints, sealed_digests
from pipeline.training.mirror.layout import LEDGER, RECORDS, TALLIES
from pipeline.training.update_log.folder import UPDATES_FOLDER, segments_before
from protocol.errors import StorageFailed

STAGING: Final = ".copying"
SEGMENT_KEY: Final = "update_log_segment"
"""Key in a checkpoint's state: number of the log segment that starts with it."""
_AOF: Final = "appendonly.aof"
_AOF_FOLDER: Final = "appendonlydir"
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Staged:
    folder: Path
    checkpoint: str
    """Name of the newest checkpoint."""
    version: int
    digests: dict[str, str]
    """Digests already known, by path."""

    def paths(self) -> Iterator[tuple[str, Path]]:
        """Yield every file with its path in the run's folder."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                yield path.relative_to(self.folder).as_posix(), path


def stage(run_dir: Path) -> Staged | None:
    """Gather the files of a copy; None before the first checkpoint. Raises StorageFailed if the
    disk cannot hold them, DataError if a checkpoint's manifest is unreadable."""
    folder = run_dir / STAGING
    for tried in range(_TRIES):
        clear(run_dir)
        try:
            return _stage(run_dir, folder)
        except FileNotFoundError as error:
            # a checkpoint was superseded just now: take the next
            if tried == _TRIES - 1:
                raise StorageFailed(
                    f"{error.filename} disappeared while it was being copied; the next copy tries again"
                ) from error
        except OSError as error:
            raise StorageFailed(
                f"{folder} cannot hold a copy of the run: {error}; make room, or repair the disk"
            ) from error
    return None


def clear(run_dir: Path) -> None:
    shutil.rmtree(run_dir / STAGING, ignore_errors=True)


def _stage(run_dir: Path, folder: Path) -> Staged | None:
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if not found:
        return None
    config = read_resolved(run_dir)
    newest = found[-1]
    # the best one is among those that the learner keeps
    chosen = [checkpoint.path for checkpoint in (found if config.evaluation.keep_best else found[-1:])]
    chosen += [checkpoint.path for checkpoint in list_checkpoints(run_dir / VALUE_CHECKPOINTS)[-1:]]
    digests: dict[str, str] = {}
    for path in chosen:
        kind = path.parent.name
        digests |= {f"{kind}/{path.name}/{name}": digest for name, digest in sealed_digests(path).items()}
        for file in sorted(path.rglob("*")):
            if file.is_file():
                _link(file, folder / kind / path.name / file.relative_to(path))
    for segment in segments_before(run_dir / UPDATES_FOLDER, int(newest.state.get(SEGMENT_KEY, 0))):
        _link(segment, folder / UPDATES_FOLDER / segment.name)
    for name in RECORDS:
        if (run_dir / name).is_file():
            _copy(run_dir / name, folder / name)
    for tally in sorted((run_dir / TALLIES).glob("*")):
        _copy(tally, folder / TALLIES / tally.name)
    address = read_address(run_dir)
    if address is None or address.is_embedded:
        _stage_ledger(run_dir / LEDGER, folder / LEDGER)
    else:
        # keep the server's address: a resume without it would start with an empty ledger
        hidden = {"url": hide_password(address.url)}
        config = config.model_copy(update={"ledger": config.ledger.model_copy(update=hidden)})
    write_resolved(config, folder)
    return Staged(folder, newest.path.name, newest.version, digests)


def _stage_ledger(ledger: Path, to: Path) -> None:
    """Copy the append-only file as of now. Retry while Redis rewrites it, because its parts then change."""
    for _ in range(_TRIES):
        shutil.rmtree(to, ignore_errors=True)
        before = _parts(ledger)
        for part in before:
            _link(part, to / ".held" / part.relative_to(ledger))
        if _parts(ledger) == before:
            break
    else:
        raise StorageFailed(f"{ledger} kept being rewritten while it was copied; the next copy tries again")
    for part in before:
        held, copied = to / ".held" / part.relative_to(ledger), to / part.relative_to(ledger)
        if part.name.endswith(".rdb"):
            _link(held, copied)
        else:
            _copy(held, copied)
    shutil.rmtree(to / ".held")


def _parts(ledger: Path) -> dict[Path, int]:
    """Return the parts of the append-only file, with their inode numbers."""
    found = sorted(path for path in (ledger / _AOF, *(ledger / _AOF_FOLDER).glob(f"{_AOF}*")) if path.is_file())
    return {path: path.stat().st_ino for path in found}


def _link(path: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        # the filesystem has no hard links
        shutil.copyfile(path, to)


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(path, to)
