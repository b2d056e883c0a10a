"""Placements that a person writes, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from pipeline.schedule.blocks import Block, Dependency, Placement
from protocol.errors import ConfigError

_T = TypeVar("_T")


class PlacementFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A placement, with the memory that its devices have."""

    blocks: tuple[Block, ...]
    devices: int
    chains: tuple[tuple[str, ...], ...] = ()
    """Blocks of which each waits for the one before it."""
    dependencies: tuple[Dependency, ...] = ()
    """More of them, also of earlier micro-batches."""
    memory: int | tuple[int, ...] | None = None
    """Limit of all devices, or of each."""


def read_placement(path: Path) -> tuple[Placement, tuple[int, ...] | None]:
    """Return the placement of a file, and the limits of its memory by device. Raises ConfigError."""
    file = read_json(path, PlacementFile)
    waits = [Dependency(before, after) for row in file.chains for before, after in pairwise(row)]
    placement = Placement(path.stem, file.devices, file.blocks, (*waits, *file.dependencies)).check()
    return placement, None if file.memory is None else limits(file.memory, file.devices)


def limits(memory: int | Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Return the limit of each device. Raises ConfigError for another number of them, and for negative ones."""
    by_device = (memory,) * num_devices if isinstance(memory, int) else tuple(memory)
    if len(by_device) != num_devices or min(by_device, default=0) < 0:
        raise ConfigError(f"memory is {memory}; expected a limit of 0 or more, or {num_devices} of them")
    return by_device


def read_json(path: Path, kind: type[_T]) -> _T:
    """Return a file's record. Raises ConfigError with the place of what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; `headrace schedule --help` shows a whole file") from error
