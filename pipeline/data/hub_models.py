"""Models and tokenizers on the Hugging Face hub, by name: ``hf://OWNER/NAME@REVISION``.

``@REVISION`` is a branch, tag or commit, by default ``main``. A command that starts or checks a run
fetches the model into the hub's cache. It puts the folder of that commit in the name's place. So
the run's configuration holds the commit, and workers and resumes read the same bytes. Weights in
pickled files are not fetched. A local GGUF file is refused here, with the command that converts it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pipeline.config.base import Section
from pipeline.config.load import HUB_MODEL
from pipeline.config.schema import RunConfig
from pipeline.data.gguf import refuse_gguf
from pipeline.data.hub_errors import plain_errors
from pipeline.data.hub_progress import fetching
from protocol.errors import ConfigError

_NAME: Final = re.compile(r"(?P<repository>[^/@]+/[^/@]+)(?:@(?P<revision>.+))?")
_FILES: Final = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_FOLDER: Final = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


def pin_models(config: RunConfig) -> RunConfig:
    """Return a configuration in which each model on the hub is the local folder of its commit.
    Raises ConfigError: no such model, no access, neither a network nor a cached copy, or a GGUF
    file."""
    model = {name: pinned for name in ("path", "reference_path") if (pinned := _pinned(getattr(config.model, name)))}
    changed: dict[str, Section] = {"model": config.model.model_copy(update=model)} if model else {}
    if path := _pinned(config.value.path):
        changed["value"] = config.value.model_copy(update={"path": path})
    if config.reward.model is not None and (path := _pinned(config.reward.model.path)):
        judge = config.reward.model.model_copy(update={"path": path})
        changed["reward"] = config.reward.model_copy(update={"model": judge})
    return config.model_copy(update=changed) if changed else config


def with_hub_names(config: RunConfig) -> RunConfig:
    """Return a configuration in which each folder of the hub's cache that this host lacks is a name
    again. Such a run was begun on another host."""
    model = {name: named for name in ("path", "reference_path") if (named := _renamed(getattr(config.model, name)))}
    changed: dict[str, Section] = {"model": config.model.model_copy(update=model)} if model else {}
    if path := _renamed(config.value.path):
        changed["value"] = config.value.model_copy(update={"path": path})
    if config.reward.model is not None and (path := _renamed(config.reward.model.path)):
        changed["reward"] = config.reward.model_copy(
            update={"model": config.reward.model.model_copy(update={"path": path})}
        )
    return config.model_copy(update=changed) if changed else config


def _renamed(path: Path | None) -> Path | None:
    name = None if path is None or path.exists() else hub_name(path)
    return Path(f"hf://{name}") if name else None


def pinned_model(path: Path) -> Path:
    """Return the folder of a model: ``path``, or that of a name on the hub. Raises as above."""
    return _pinned(path) or path


def hub_name(folder: Path) -> str | None:
    """Return ``OWNER/NAME@COMMIT`` of a model's folder in the hub's cache; None for any other."""
    found = _FOLDER.fullmatch(folder.parent.parent.name)
    return f"{found['owner']}/{found['name']}@{folder.name}" if found and folder.parent.name == "snapshots" else None


def _pinned(path: Path | None) -> Path | None:
    """Return the folder of a name on the hub; None for what is no such name."""
    if path is None:
        return None
    if not str(path).startswith(HUB_MODEL):
        refuse_gguf(path)
        return None
    name = str(path).removeprefix(HUB_MODEL).lstrip("/")
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"hf://{name}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION; correct the name")
    return _fetch(found["repository"], found["revision"] or "main")


def _fetch(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    name = f"hf://{repository}@{revision}"
    with plain_errors(name, repository, "model"), fetching(name) as bars:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES, tqdm_class=bars))
