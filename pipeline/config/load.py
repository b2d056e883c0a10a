"""Reads TOML files, the environment and ``--set`` into one frozen RunConfig, and writes it into the
run's folder.

A ConfigError names the key, where it was set, the nearest valid key, and the expected value.
Relative paths start at the folder in which the command runs; the resolved file holds absolute
ones."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from pipeline.config import CHANGES_NAME, RESOLVED_NAME
from pipeline.config.changed import changed_settings
from pipeline.config.describe import in_toml, meant_by, named_model, section_model, settings, table_model
from pipeline.config.learning import all_settings, rules_with, settings_class
from pipeline.config.other_names import REMOVED, drop_idle
from pipeline.config.public import kept_settings
from pipeline.config.schema import RunConfig
from pipeline.files import write_private
from pipeline.ledger.url import hide_password
from protocol.errors import ConfigError

_MOST_LISTED = 12
"""Largest number of settings that an error about an unknown key lists."""
_IN_OUR_WORDS = {"a valid (?=[aeiou])": "an ", "a valid ": "a ", "(?=greater|less)": "a value ", "": ""}

ENVIRONMENT: Final = "HEADRACE__"
"""Prefix of environment variables that are settings: ``HEADRACE__LEARNER__LEARNING_RATE``."""

HUB_MODEL: Final = "hf:/"
"""How the path of a hub model begins, since ``pathlib`` turns hf://OWNER/NAME into
hf:/OWNER/NAME."""

_MAX_DEPTH: Final = 64
_MAX_INCLUDED: Final = 64
_TOO_DEEP: Final = f"it is nested more than {_MAX_DEPTH} levels deep; expected sections and keys, write it flatter"

Tree = dict[str, Any]
Origins = dict[tuple[str, ...], str]


@dataclass(frozen=True, slots=True)
class SourcedConfig:
    config: RunConfig
    sources: Mapping[str, str]
    """By key: a file, an environment variable, or ``--set``."""


def load_config(
    files: Iterable[Path], overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """Merge ``files`` (later ones win), variables ``HEADRACE__SECTION__KEY`` of ``environment``,
    and ``overrides`` (``section.key=value``). A file wins over the files that it includes.

    Only commands that start or check a run pass the environment; everything else reads the file
    that these resolved. Raises ConfigError if a file is missing or not TOML, a key is unknown, or a
    value is invalid."""
    return load_sourced(files, overrides, environment).config


def load_sourced(
    files: Iterable[Path], overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> SourcedConfig:
    """Load a configuration as ``load_config`` does, and record the source of each setting."""
    merged: Tree = {}
    origins: Origins = {}
    for path in files:
        for file, tree in _with_included(path):
            _merge(merged, tree, str(file), origins)
        if path.name == RESOLVED_NAME:
            for key, value in changed_settings(path.parent).items():
                _merge(merged, _parse_override(f"{key}={value}"), str(path.parent / CHANGES_NAME), origins)
    for name, tree in _from_environment(environment or {}):
        _merge(merged, tree, name, origins)
    config = _overridden(merged, origins, "--set", overrides)
    return SourcedConfig(config, {".".join(key): origin for key, origin in origins.items()})


def parse_config(text: str, origin: str, overrides: Iterable[str] = (), *, option: str = "--what-if") -> RunConfig:
    """Check TOML text and overrides. Errors call the text ``origin``, and the overrides by
    ``option``. Raises as ``load_config``."""
    merged: Tree = {}
    origins: Origins = {}
    try:
        _merge(merged, _parsed(text), origin, origins)
    except ValueError as error:
        raise ConfigError(f"{origin}: not TOML: {error}") from None
    return _overridden(merged, origins, option, overrides)


def _overridden(merged: Tree, origins: Origins, option: str, overrides: Iterable[str]) -> RunConfig:
    for override in overrides:
        _merge(merged, _parse_override(override), f"{option} {hide_password(override)}", origins)
    return _validate(merged, origins)


def overrides_as_tree(overrides: Iterable[str]) -> Tree:
    """Return ``section.key=value`` texts as the sections of a file. Raises ConfigError for one of another form."""
    merged: Tree = {}
    for override in overrides:
        _merge(merged, _parse_override(override), override, {})
    return merged


def read_resolved(run_dir: Path) -> RunConfig:
    """Read a run's resolved configuration, including changes since its start. Raises ConfigError if
    the folder holds no run."""
    path = run_dir / RESOLVED_NAME
    if not path.is_file():
        give = "give the folder that `headrace up` printed"
        raise ConfigError(f"{run_dir} is not a run: it has no {RESOLVED_NAME}; {give}")
    return load_config([path])


def write_resolved(config: RunConfig, run_dir: Path) -> Path:
    path = run_dir / RESOLVED_NAME
    text = "# Resolved configuration of this run: every setting, defaults included. Passwords are not kept here.\n"
    write_private(path, (text + to_toml(config)).encode())
    return path


def to_toml(config: RunConfig) -> str:
    """Return every set value as TOML, for the run's own files. Absent settings (None) are left out:
    TOML has no null."""
    return settings_to_toml(kept_settings(config))


def settings_to_toml(settings: Tree) -> str:
    """Return a tree of plain values as TOML, without those that are None."""
    return tomli_w.dumps(_without_none(settings))


def resolve_paths(config: RunConfig) -> RunConfig:
    """Make every path absolute, so that workers may start in any folder. Expands ``~``."""
    return _absolute(config)


def _absolute(held: Any) -> Any:
    if isinstance(held, BaseModel):
        found = {name: _absolute(value) for name, value in held}
        changed = {name: value for name, value in found.items() if value is not getattr(held, name)}
        return held.model_copy(update=changed) if changed else held
    if isinstance(held, tuple):
        items = cast("tuple[Any, ...]", held)
        return tuple(map(_absolute, items)) if any(isinstance(item, Path | BaseModel) for item in items) else items
    return held.expanduser().absolute() if isinstance(held, Path) and not str(held).startswith(HUB_MODEL) else held


def _with_included(
    path: Path, including: tuple[Path, ...] = (), read: list[Path] | None = None
) -> Iterator[tuple[Path, Tree]]:
    """Yield a file's table after those of the files that it includes, without ``include``. Raises
    ConfigError for a file that includes itself, too many files, or an `include` that is not a list of paths."""
    place = path.resolve()
    if place in including:
        circle = " includes ".join(file.name for file in (*including[including.index(place) :], place))
        raise ConfigError(f"{including[-1]}: `include` is circular: {circle}; remove one of these includes")
    read = [] if read is None else read
    read.append(place)
    if len(read) > _MAX_INCLUDED:
        raise ConfigError(
            f"{read[0]}: `include` reads more than {_MAX_INCLUDED} files, the last {path}; include each file only once"
        )
    tree = _read(path)
    included: Any = tree.pop("include", [])
    if not isinstance(included, list) or not all(isinstance(name, str) for name in cast("list[Any]", included)):
        raise ConfigError(f'{path}: `include` is {included!r}: expected a list, for example ["base.toml"]')
    for name in cast("list[str]", included):
        file = path.parent / name
        if not file.is_file():
            raise ConfigError(f"{path}: `include` names {name}, but there is no file {file}; correct or remove it")
        yield from _with_included(file, (*including, place), read)
    yield path, tree


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Tree]]:
    """Yield the name and the table of each variable that is a setting, in the order of names."""
    for name in sorted(name for name in environment if name.startswith(ENVIRONMENT)):
        key = name.removeprefix(ENVIRONMENT).lower().replace("__", ".")
        parts = key.split(".")
        if not all(parts) or not 1 < len(parts) <= _MAX_DEPTH:
            example = f"{ENVIRONMENT}LEARNER__LEARNING_RATE=1e-5"
            raise ConfigError(f"{name} is not a setting; expected {ENVIRONMENT}SECTION__KEY, for example {example}")
        yield name, _nested(parts, _value(environment[name]))


def _read(path: Path) -> Tree:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        fault = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{path}: {fault}; give a run file such as configs/demo.toml") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _parse_override(text: str) -> Tree:
    return _nested(override_key(text).split("."), _value(text.partition("=")[2]))


def override_key(text: str) -> str:
    """Return the key of ``section.key=value``. Raises ConfigError for other text."""
    key, equals, _ = text.partition("=")
    key = key.strip()
    if key.count(".") > _MAX_DEPTH:
        raise ConfigError(f"--set {key[:40]}...: {_TOO_DEEP}")
    if not equals or not all(key.split(".")) or key in RunConfig.model_fields:
        expected = "expected section.key=value, for example --set learner.learning_rate=1e-5"
        raise ConfigError(f"--set {hide_password(text)}: {expected}")
    return key


def _value(text: str) -> Any:
    """Parse a value as TOML; an unquoted word is a string."""
    try:
        return _parsed(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    except ValueError as error:
        raise ConfigError(f"the setting {hide_password(text)[:40]!r}... has no value: {error}") from None


def _parsed(text: str) -> Tree:
    """Parse TOML. Raises ValueError if it is not TOML, is nested too deeply, or has a number of
    thousands of digits."""
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    left: list[tuple[Any, int]] = [(tree, 0)]
    while left:
        held, depth = left.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(held, dict | list):
            below = cast("Tree", held).values() if isinstance(held, dict) else cast("list[Any]", held)
            left += [(one, depth + 1) for one in below]
    return tree


def _nested(parts: Sequence[str], value: Any) -> Tree:
    tree: Tree = {parts[-1]: value}
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
    drop_idle(tree)
    _drop_other_rules(tree, origins)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as failure:
        errors = _one_for_each_setting(failure.errors(include_url=False), origins)
        lines = [line for error in errors for line in _explain(error, origins)]
        raise ConfigError("\n".join(lines)) from None
    _forget_defaults(config, origins)
    return config


def _drop_other_rules(tree: Tree, origins: Origins) -> None:
    """Delete settings of other rules that a run's resolved file has: runs begun when all rules had
    the same settings kept them, and did not read them."""
    given = tree.get("algorithm")
    if not isinstance(given, dict):
        return
    section = cast("Tree", given)
    for key in [key for key in section if Path(origins.get(("algorithm", key), "")).name == RESOLVED_NAME]:
        if key in all_settings().model_fields and key not in settings_class(section).model_fields:
            del section[key]


def _forget_defaults(config: RunConfig, origins: Origins) -> None:
    """Treat defaults that a run's resolved file repeats as not set."""
    for setting in settings():
        path = tuple(setting.key.split("."))
        if Path(origins.get(path, "")).name == RESOLVED_NAME and setting.is_in(config.algorithm.name):
            held = section_of(config, setting.section)
            default = setting.default_in(config.algorithm.name)
            if held is not None and to_jsonable_python(getattr(held, setting.name)) == to_jsonable_python(default):
                held.model_fields_set.discard(setting.name)


def section_of(config: RunConfig, key: str) -> BaseModel | None:
    """Return a section of a configuration; None if it is absent, or a list of tables."""
    held: Any = config
    for part in key.split("."):
        held = getattr(held, part, None)
    return held if isinstance(held, BaseModel) else None


def _one_for_each_setting(errors: Sequence[ErrorDetails], origins: Origins) -> list[ErrorDetails]:
    """Merge the errors of a setting that may be of several kinds: there is one for each kind, whose
    name ends its place."""
    found: dict[tuple[int | str, ...], ErrorDetails] = {}
    for error in errors:
        place = error["loc"]
        path = tuple(map(str, place))
        is_kind = path not in origins and path[:-1] in origins and not path[-1].isdecimal()
        if is_kind and error["type"] not in ("extra_forbidden", "missing") and not isinstance(error["input"], dict):
            place = place[:-1]
        merged = error.copy()
        merged["loc"] = place
        if place in found:
            merged["msg"] = f"{_expected(found[place])} or {_expected(error).removeprefix('expected ')}"
        found[place] = merged
    return list(found.values())


def _explain(error: ErrorDetails, origins: Origins) -> list[str]:
    path = tuple(str(part) for part in error["loc"])
    where = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "the configuration")
    key, given = ".".join(path), error["input"]
    if error["type"] == "extra_forbidden":
        leaves: dict[tuple[str, ...], object] = {path: given}
        if isinstance(given, dict) and given:
            leaves = _leaves(cast("Tree", given), path)
        return [_unknown(".".join(leaf), value, origins.get(leaf, where)) for leaf, value in leaves.items()]
    if error["type"] == "missing":
        if path[-1].isdecimal():
            return [f"{where}: `{'.'.join(path[:-1])}` has too few values"]
        return [f"{where}: `{key}` is missing; it has no default, so set it in a run file"]
    message = _expected(error)
    if not key or isinstance(given, dict):
        return [f"{where}: {message}"]
    return [f"{where}: `{key}` is {hide_password(repr(given))}: {message}"]


def _unknown(key: str, value: object, origin: str) -> str:
    if key in REMOVED:
        return (
            f"{origin}: `{key}` is {hide_password(repr(value))}, but this setting no longer exists: {REMOVED[key].why}"
        )
    section, _, name = key.rpartition(".")
    if section == "algorithm" and (having := rules_with(name)):
        return (
            f"{origin}: `{key}` is {hide_password(repr(value))}, but the run's algorithm has no such setting; it belongs to "
            f"{', '.join(having)}: leave it out, or choose one of them"
        )
    # With `--set rediss://user:password@host?x=1` the key contains a password.
    return f"{origin}: unknown key `{hide_password(key)}`{suggest(key)}"


def _leaves(tree: Tree, path: tuple[str, ...]) -> dict[tuple[str, ...], object]:
    """Return every value in an unknown table, by its path."""
    found: dict[tuple[str, ...], object] = {}
    for key, value in tree.items():
        inner = (*path, key)
        found |= _leaves(cast("Tree", value), inner) if isinstance(value, dict) and value else {inner: value}
    return found


def _expected(error: ErrorDetails) -> str:
    """Return what was expected, in TOML's words."""
    given = error["input"]
    if error["type"] in ("tuple_type", "list_type"):
        item = given if isinstance(given, str | int | float) else "..."
        return f"expected a list, for example {in_toml([item])}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected a section of settings, for example --set {'.'.join(map(str, error['loc']))}.NAME=VALUE"
    message = error["msg"].removeprefix("Value error, ")
    for words, ours in _IN_OUR_WORDS.items():
        message = re.sub(f"^Input should be {words}", f"expected {ours}", message)
    return message


def suggest(key: str) -> str:
    """Return a hint for an unknown key: another system's name for a setting, or the nearest key."""
    last = key.rpartition(".")[2]
    if meant := meant_by(last):
        return f"; {meant}"
    known = list(known_keys())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        by_name = {name.rpartition(".")[2]: name for name in known}
        close = [by_name[name] for name in difflib.get_close_matches(last, list(by_name), n=1, cutoff=0.7)]
    if not close:
        return "; `headrace config show` lists the valid keys"
    if key.startswith(f"{close[0]}."):
        inside = [name for name in known if name.rpartition(".")[0] == close[0]]
        if 0 < len(inside) <= _MOST_LISTED:
            return f"; expected one of {', '.join(inside)}"
        return f"; `headrace config explain {close[0]}` lists its settings"
    return f"; did you mean `{close[0]}`?"


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every valid key as ``section.key``, and the sections themselves."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        if (inner := section_model(info) or table_model(info)) is not None:
            yield from known_keys(inner, f"{key}.")
        elif (inner := named_model(info)) is not None:
            yield f"{key}.NAME"
            yield from known_keys(inner, f"{key}.NAME.")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in cast("Tree", value).items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in cast("list[Any]", value)]
    return value
