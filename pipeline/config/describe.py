"""Every setting's kind, unit, default and meaning, for ``headrace config show`` and ``explain``, and
as comments of the TOML files that commands write."""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, cast

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.base import ReadIf, conditions, fact
from pipeline.config.catalogue import BUILT_IN
from pipeline.config.learning import AlgorithmSection, all_settings, settings_of
from pipeline.config.other_names import OTHERWISE
from pipeline.config.public import public_settings
from pipeline.config.schema import RunConfig

_BY_ENDING: Final[Mapping[str, str]] = {
    "_s": "seconds",
    "_tokens": "tokens",
    "_chars": "characters",
    "_mb": "MiB",
    "_gb": "GiB",
    "_steps": "optimiser steps",
    "_updates": "updates",
    "_trajectories": "responses",
    "_prompts": "prompts",
    "_port": "port",
}


def unit_of(key: str, info: FieldInfo) -> str | None:
    """Return a numeric setting's unit in words, or None if it has no unit."""
    name = key.rpartition(".")[2]
    return fact(info, "unit") or next((unit for ending, unit in _BY_ENDING.items() if name.endswith(ending)), None)


WIDTH: Final = 79
_PLAIN: Final[dict[Any, str]] = {bool: "true or false", int: "integer", float: "number", str: "text"}
_KINDS: Final[dict[Any, str]] = _PLAIN | {Path: "path", dict: "table", tuple: "list"}
_LIMITS: Final = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


class Absent(Enum):
    REQUIRED = "none: it must be given"
    NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    """``section.name``"""
    kind: str
    """In words: integer, text, list of paths, one of ..."""
    limits: str
    """In words: above 0; may be empty."""
    unit: str | None
    """None for a setting that is not a number."""
    default: Any
    """As a JSON value, or why it has no default."""
    presets: dict[str, Any]
    """Defaults of the algorithms that have another one, by algorithm."""
    rules: tuple[str, ...]
    """The algorithms that have this setting; empty: all."""
    live: str
    """What changes when the learner takes another value between two updates; empty for a setting that
    may not change in a running run."""
    also: tuple[str, ...]
    """Its names in other systems."""
    read_if: tuple[ReadIf, ...]
    """What must hold so that a run reads it, if it reads the section."""
    description: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    def default_in(self, algorithm: str) -> Any:
        if algorithm in BUILT_IN or not self.is_in(algorithm) or self.section != "algorithm":
            return self.presets.get(algorithm, self.default)
        return settings_of(algorithm).model_fields[self.name].default

    def is_in(self, algorithm: str) -> bool:
        """Whether a run with this algorithm has the setting."""
        return self.section != "algorithm" or self.name in settings_of(algorithm).model_fields

    def facts(self, algorithm: str | None = None) -> str:
        """Return kind, limits, unit and default in one line, for one algorithm or for all."""
        shown = [f"{self.kind}, {self.limits}" if self.limits else self.kind]
        if self.unit is not None:
            shown.append(f"unit: {self.unit}")
        shown.append(f"default: {in_toml(self.default if algorithm is None else self.default_in(algorithm))}")
        if algorithm is None and self.presets:
            shown[-1] += f" ({', '.join(f'{name}: {in_toml(value)}' for name, value in self.presets.items())})"
        if algorithm is None and self.rules:
            shown.append(f"only {', '.join(self.rules)}")
        if self.read_if:
            shown.append(f"not always read: {whys_unread(self.read_if)}")
        return "; ".join(shown)


def sections(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section's name and model, in the schema's order, outer sections first."""
    for name, info in model.model_fields.items():
        if (inner := section_model(info) or table_model(info)) is not None:
            yield f"{prefix}{name}", inner
            yield from sections(inner, f"{prefix}{name}.")
        elif (inner := named_model(info)) is not None:
            yield f"{prefix}{name}.NAME", inner


def named_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a table of named sections, such as ``[reward.functions.NAME]``; None for
    another field."""
    found = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is dict else ()
    return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def section_model(info: FieldInfo) -> type[BaseModel] | None:
    kinds = (kind for kind in _options(info.annotation) if isinstance(kind, type))
    found = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
    return all_settings() if found is AlgorithmSection else found


def table_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a list of tables; None for another."""
    for kind in _options(info.annotation):
        for item in () if typing.get_origin(kind) is dict else typing.get_args(kind):
            if isinstance(item, type) and issubclass(item, BaseModel):
                return item
    return None


@cache
def settings() -> tuple[Setting, ...]:
    return tuple(
        _setting(f"{section}.{name}", info)
        for section, model in sections()
        for name, info in model.model_fields.items()
        if section_model(info) is None
    )


@cache
def _other_names() -> Mapping[str, str]:
    found: dict[str, list[str]] = {}
    # several sections may be of one class: what is meant is the data's columns and the learner's stage
    for one in sorted(settings(), key=lambda one: (one.key.count("."), not one.key.startswith(("data.", "learner.")))):
        for name in one.also:
            held = found.setdefault(name, [])
            if not held or one.key.rpartition(".")[0] == held[0].rpartition(".")[0]:
                held.append(one.key)
    return {name: " and ".join(f"`{key}`" for key in keys) for name, keys in found.items()}


def meant_by(name: str) -> str | None:
    """Return what to set instead of another system's ``name``; None for an unknown name."""
    if key := _other_names().get(name):
        return f"that is {key} here"
    return OTHERWISE.get(name)


def other_names() -> frozenset[str]:
    return frozenset({*_other_names(), *OTHERWISE})


def defaults_of(algorithm: str) -> dict[str, Any]:
    """Return the defaults under this algorithm by key, as JSON values. Leaves out settings without
    a default, optional sections, and ``[algorithm]`` for a rule of the user's own."""
    always = {*_sections_of_each_run()} - (set() if algorithm in BUILT_IN else {"algorithm"})
    there = (one for one in settings() if one.section in always and one.is_in(algorithm))
    found = ((one.key, one.default_in(algorithm)) for one in there)
    known = {key: value for key, value in found if not isinstance(value, Absent)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}  # pyright: ignore[reportUnknownArgumentType]


def _sections_of_each_run(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if (inner := section_model(info)) is not None and info.default is not None:
            yield f"{prefix}{name}"
            yield from _sections_of_each_run(inner, f"{prefix}{name}.")


def explained(config: RunConfig, sources: Mapping[str, str] | None = None) -> str:
    """Return a configuration as TOML with every setting explained, and with its source if
    ``sources`` has one for its key. Apart from secrets it reads back unchanged."""
    values = public_settings(config)
    by_section: dict[str, list[Setting]] = {}
    for setting in settings():
        by_section.setdefault(setting.section, []).append(setting)
    lines: list[str] = []
    for section, model in sections():
        held = _at(values, section)
        # an absent section, such as reward.model, is commented out
        off = "# " if held is None else ""
        title = f"[[{section}]]" if isinstance(_value(values, section), list) else f"[{section}]"
        lines += [f"{off}{title}", *comment(about(section, model))]
        for setting in by_section.get(section, []):
            if not setting.is_in(config.algorithm.name):
                continue
            value = None if held is None else held.get(setting.name)
            lines += ["", *comment(setting.description), *comment(setting.facts(config.algorithm.name))]
            if source := (sources or {}).get(setting.key):
                lines.append(f"# set by: {' '.join(source.split())}")
            lines.append(f"# {setting.name} =" if value is None else f"{setting.name} = {in_toml(value)}")
        lines += ["", ""]
    return "\n".join(lines).rstrip() + "\n"


def in_toml(value: Any) -> str:
    """Return a value as TOML on one line; an absent value in words."""
    if value is None:
        return Absent.NOT_SET.value
    if isinstance(value, Absent):
        return value.value
    if isinstance(value, dict):
        held = cast("dict[str, Any]", value)
        there = {name: item for name, item in held.items() if item is not None}
        return "{" + ", ".join(f"{_key(name)} = {in_toml(item)}" for name, item in there.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(in_toml(item) for item in cast("list[Any]", value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _setting(key: str, info: FieldInfo) -> Setting:
    if info.is_required():
        default: Any = Absent.REQUIRED
    else:
        made = info.get_default(call_default_factory=True)
        made = made.value if isinstance(made, StrEnum) else made
        default = Absent.NOT_SET if made is None else str(made) if isinstance(made, Path) else made
    section, _, name = key.rpartition(".")
    having = {of: settings_of(of).model_fields for of in BUILT_IN} if section == "algorithm" else {}
    presets = {
        of: held[name].default for of, held in having.items() if name in held and held[name].default != info.default
    }
    rules = tuple(of for of, held in having.items() if name in held)
    unit = unit_of(key, info) if is_number(info) else None
    description = info.description or ""
    only = () if len(rules) == len(having) else rules
    live, also = fact(info, "live"), tuple(fact(info, "also").split())
    kind, limits, read_if = _kind(info.annotation), _limits(info), conditions(info)
    return Setting(key, kind, limits, unit, default, presets, only, live, also, read_if, description)


def section_conditions(section: str) -> list[tuple[ReadIf, ...]]:
    """Return what must hold so that a run reads a section, for each section around it and itself."""
    model, found = RunConfig, list[tuple[ReadIf, ...]]()
    for part in section.removesuffix(".NAME").split("."):
        info = model.model_fields[part]
        found.append(conditions(info))
        model = section_model(info) or table_model(info) or named_model(info) or model
    return found


def whys_unread(read_if: Sequence[ReadIf]) -> str:
    """Return in words when a run does not read a setting or section."""
    return "; ".join(one.otherwise.format(algorithm="the algorithm") for one in read_if)


def is_number(info: FieldInfo) -> bool:
    found = {part for option in _options(info.annotation) for part in (option, *typing.get_args(option))}
    return bool(found & {int, float}) and bool not in found


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a field may hold, without None and constraints."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [kind for option in typing.get_args(annotation) for kind in _options(option)]
        return tuple(kind for kind in kinds if kind is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    return (annotation,)


def _kind(annotation: Any) -> str:
    kind, *others = _options(annotation)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}" + (", or a path" if Path in others else "")
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        many = f"{len(items)} " if Ellipsis not in items else ""
        item = _options(items[0])[0]
        return f"list of {many}{'table' if issubclass(item, BaseModel) else _KINDS[item]}s"
    return _KINDS[typing.get_origin(kind) or kind]


def _limits(info: FieldInfo) -> str:
    held = [*info.metadata]
    for part in typing.get_args(info.annotation):
        if typing.get_origin(part) is typing.Annotated:
            held += [item for given in typing.get_args(part)[1:] for item in getattr(given, "metadata", ())]
    words = [f"{_LIMITS[name]} {getattr(item, name):g}" for item in held for name in _LIMITS if hasattr(item, name)]
    return " and ".join(words)


def purpose(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def about(section: str, model: type[BaseModel]) -> str:
    """Return a section's purpose, and when a run does not read it."""
    read_if = section_conditions(section)[-1]
    return f"{purpose(model)} Not always read: {whys_unread(read_if)}." if read_if else purpose(model)


def comment(text: str) -> list[str]:
    """Wrap a text into lines of a TOML comment."""
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _at(values: dict[str, Any], section: str) -> dict[str, Any] | None:
    """Return the values of a section; None if it is absent, or a list of tables."""
    found = _value(values, section)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _value(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
    return found


def commented(values: Mapping[str, Any], reasons: Mapping[str, str], *, algorithm: str, head: str = "") -> str:
    """Return settings, given by ``section.name``, as TOML in the schema's order. Comments above
    each setting give its meaning, unit and default, and the reason for its value if ``reasons`` has
    one. ``head`` becomes a comment at the top. Raises KeyError for an unknown setting."""
    known = {setting.key: setting for setting in settings()}
    given = {key: known[key] for key in values}
    lines = [line for paragraph in head.splitlines() for line in (comment(paragraph) if paragraph else ["#"])]
    for section, model in sections():
        there = [key for key in known if key in given and given[key].section == section]
        if there:
            lines += [*([""] if lines else []), f"[{section}]", *comment(about(section, model))]
        for key in there:
            setting = given[key]
            lines += ["", *comment(setting.description), *comment(setting.facts(algorithm))]
            if key in reasons:
                lines += comment(f"Here: {reasons[key]}")
            lines.append(f"{setting.name} = {in_toml(values[key])}")
    return "\n".join(lines) + "\n"
