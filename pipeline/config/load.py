"""From TOML files and ``--set`` to one frozen RunConfig, and back to a file beside the run.

*Consumes* files, later wins, then ``key=value`` overrides. *Produces* a RunConfig, or a ConfigError that names the key, where
it was set, the nearest valid key, and what was expected. Nothing is started before this has passed.

Relative paths are relative to the folder in which the command is started; the resolved file holds absolute ones.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.schema import RunConfig
from pipeline.config.secrets import hide_password
from pipeline.runtime.private_files import write_private
from protocol.errors import ConfigError

RESOLVED_NAME = "config.toml"
"""The resolved configuration, in the run's folder."""

Tree = dict[str, Any]
Origins = dict[tuple[str, ...], str]


def load_config(files: Iterable[Path], overrides: Iterable[str] = ()) -> RunConfig:
    """Merge ``files`` (later wins) and ``overrides`` (``section.key=value``, last) into one checked configuration.

    Raises:
        ConfigError: a file is missing or not TOML, a key is unknown, or a value does not fit.
    """
    merged: Tree = {}
    origins: Origins = {}
    for path in files:
        _merge(merged, _read(path), str(path), origins)
    for override in overrides:
        _merge(merged, _parse_override(override), f"--set {hide_password(override)}", origins)
    return _validate(merged, origins)


def parse_config(text: str, origin: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Check a configuration that is at hand as TOML, named ``origin`` in errors, with ``overrides`` of ``--what-if``.

    Raises:
        ConfigError: It is not TOML, a key is unknown, or a value does not fit.
    """
    merged: Tree = {}
    origins: Origins = {}
    try:
        _merge(merged, tomllib.loads(text), origin, origins)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not TOML: {error}") from None
    for override in overrides:
        _merge(merged, _parse_override(override), f"--what-if {override}", origins)
    return _validate(merged, origins)


def read_resolved(run_dir: Path) -> RunConfig:
    """Read the configuration that a run was started with. Raises ConfigError when the folder holds no run."""
    path = run_dir / RESOLVED_NAME
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} is not a run: it has no {RESOLVED_NAME}; give the folder that `headrace up` printed"
        )
    return load_config([path])


def write_resolved(config: RunConfig, run_dir: Path) -> Path:
    """Write the resolved configuration beside the run and return its path."""
    path = run_dir / RESOLVED_NAME
    text = "# Resolved configuration of this run: every setting, defaults included. Passwords are not kept here.\n"
    write_private(path, (text + to_toml(config)).encode())
    return path


def to_toml(config: RunConfig) -> str:
    """Render every set value as TOML; settings that are absent (None) are left out, since TOML has no null."""
    return tomli_w.dumps(_without_none(public_settings(config)))


def public_settings(config: RunConfig) -> Tree:
    """Return every setting as plain values, the ledger's password hidden."""
    settings = config.model_dump(mode="json")
    if config.ledger.url is not None:
        settings["ledger"]["url"] = hide_password(config.ledger.url)
    return settings


def resolve_paths(config: RunConfig) -> RunConfig:
    """Make every path absolute, so that workers may start in any folder."""
    model = config.model.model_copy(
        update={
            "path": config.model.path.absolute(),
            "reference_path": config.model.reference_path.absolute() if config.model.reference_path else None,
        }
    )
    data = config.data.model_copy(
        update={
            "train": tuple(path.absolute() for path in config.data.train),
            "evaluation": tuple(path.absolute() for path in config.data.evaluation),
        }
    )
    value = config.value.model_copy(update={"path": config.value.path.absolute() if config.value.path else None})
    reward = config.reward
    if reward.model is not None:
        judge = reward.model.model_copy(update={"path": reward.model.path.absolute()})
        reward = reward.model_copy(update={"model": judge})
    run = config.run.model_copy(update={"dir": config.run.dir.absolute()})
    return config.model_copy(update={"model": model, "data": data, "reward": reward, "value": value, "run": run})


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a run file such as configs/demo.toml") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give a run file such as configs/demo.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _parse_override(text: str) -> Tree:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"--set {hide_password(text)}: expected section.key=value, for example --set learner.learning_rate=1e-5"
        )
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    tree: Tree = {parts[-1]: parsed}
    for part in reversed(parts[:-1]):
        tree = {part: tree}
    return tree


def _merge(into: Tree, tree: Mapping[str, Any], origin: str, origins: Origins, prefix: tuple[str, ...] = ()) -> None:
    for key, value in tree.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            child = into.setdefault(key, {})
            if not isinstance(child, dict):
                child = into[key] = {}
            _merge(cast("Tree", child), cast("Tree", value), origin, origins, path)
        else:
            into[key] = value
        origins[path] = origin


def _validate(tree: Tree, origins: Origins) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as failure:
        lines = [_explain(error, origins) for error in failure.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _explain(error: ErrorDetails, origins: Origins) -> str:
    path = tuple(str(part) for part in error["loc"])
    where = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "the configuration")
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key `{key}`{_suggest(key)}"
    if error["type"] == "missing":
        return f"{where}: `{key}` is missing; it has no default, so set it in a run file"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{where}: {message}"
    return f"{where}: `{key}` is {hide_password(repr(error['input']))}: {message}"


def _suggest(key: str) -> str:
    known = list(known_keys())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        last = key.rpartition(".")[2]
        by_name = {name.rpartition(".")[2]: name for name in known}
        close = [by_name[name] for name in difflib.get_close_matches(last, list(by_name), n=1, cutoff=0.7)]
    return f"; did you mean `{close[0]}`?" if close else "; `headrace config show` lists the valid keys"


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every valid key as ``section.key``, and the sections themselves."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        annotation = info.annotation
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from known_keys(option, f"{key}.")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in cast("Tree", value).items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in cast("list[Any]", value)]
    return value
