"""From the paths of a configuration to files: globs, names on the hub, and URLs."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pipeline.config.data_sets import HUB_PREFIX, DataSetSection
from pipeline.config.evaluating import EvaluationSetSection
from pipeline.config.schema import RunConfig
from pipeline.data.hub import fetch, parse_hub_name, pin
from protocol.errors import DataError


def pin_data(config: RunConfig) -> RunConfig:
    """Return a configuration that names each data file by itself, those on the hub with their
    commit and those of object stores with their digest. A run keeps it: files that appear later
    change nothing. Raises DataError: a pattern matches no file, or a file cannot be had."""
    data = config.data
    sets = tuple(_pinned_set(one) for one in data.sets)
    held_out = tuple(_pinned_files(one) for one in config.evaluation.sets)
    if held_out != config.evaluation.sets:
        evaluation = config.evaluation.model_copy(update={"sets": held_out})
        config = config.model_copy(update={"evaluation": evaluation})
    pinned = {"train": named_files(data.train), "evaluation": named_files(data.evaluation), "sets": sets}
    pinned |= {"responses": named_files(data.responses)}
    changed = {name: value for name, value in pinned.items() if value != getattr(data, name)}
    return config.model_copy(update={"data": data.model_copy(update=changed)}) if changed else config


def named_files(entries: Iterable[Path | str]) -> tuple[Path | str, ...]:
    """Return each file of patterns, in order of names, and other entries as they are."""
    return tuple(file for entry in entries for file in _named(entry))


def local_file(entry: Path | str) -> Path:
    """Return the file of a single entry, on this host. Raises DataError."""
    if isinstance(entry, Path):
        return entry
    return fetch(parse_hub_name(entry)) if entry.startswith(HUB_PREFIX) else _remote().fetched(entry)


def _remote() -> ModuleType:
    # Deferred: only runs with such data need it.
    from pipeline.data import remote

    return remote


def _pinned_set(one: DataSetSection) -> DataSetSection:
    files = named_files(one.train)
    return one if files == one.train else one.model_copy(update={"train": files})


def _pinned_files(one: EvaluationSetSection) -> EvaluationSetSection:
    files = named_files(one.files)
    return one if files == one.files else one.model_copy(update={"files": files})


def _named(entry: Path | str) -> list[Path | str]:
    if isinstance(entry, str):
        if entry.startswith(HUB_PREFIX):
            return [str(source) for source in pin(parse_hub_name(entry))]
        return [*_remote().pin_url(entry)]
    if not glob.has_magic(str(entry)) or entry.exists():
        return [entry]
    found = sorted(glob.glob(str(entry), recursive=True))  # noqa: PTH207  a pattern may be absolute
    files = [Path(name) for name in found if Path(name).is_file()]
    if not files:
        raise DataError(f"{entry}: no file matches; correct the pattern (** also searches folders)")
    return [*files]
