"""Every setting's kind, unit, default and meaning, for ``headrace config show`` and ``explain``."""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, cast

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.catalogue import BUILT_IN, preset_of
from pipeline.config.public import public_settings
from pipeline.config.schema import RunConfig
from pipeline.config.units import unit_of

WIDTH: Final = 79
_PLAIN: Final[dict[Any, str]] = {bool: "true or false", int: "integer", float: "number", str: "text"}
_KINDS: Final[dict[Any, str]] = _PLAIN | {Path: "path", dict: "table", tuple: "list"}
_LIMITS: Final = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


class Absent(Enum):
    """Why a setting has no default value."""

    REQUIRED = "none: it must be given"
    NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    key: str
    """``section.name``"""
    kind: str
    """In words: integer, text, list of paths, one of ..."""
    limits: str
    """In words: above 0; may be empty."""
    unit: str | None
    """None for a setting that is not a number."""
    default: Any
    """As in JSON, or why there is none."""
    presets: dict[str, Any]
    """Other defaults, by algorithm."""
    description: str

    @property
    def section(self) -> str:
        """The section that holds it."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in the section."""
        return self.key.rpartition(".")[2]

    def default_in(self, algorithm: str) -> Any:
        """Return the default that a run of this algorithm has."""
        if algorithm in BUILT_IN or not self.key.startswith("algorithm."):
            return self.presets.get(algorithm, self.default)
        return preset_of(algorithm).get(self.name, self.default)

    def facts(self, algorithm: str | None = None) -> str:
        """Return kind, limits, unit and default in one line, for one algorithm or for all."""
        shown = [f"{self.kind}, {self.limits}" if self.limits else self.kind]
        if self.unit is not None:
            shown.append(f"unit: {self.unit}")
        shown.append(f"default: {in_toml(self.default if algorithm is None else self.default_in(algorithm))}")
        if algorithm is None and self.presets:
            shown[-1] += f" ({', '.join(f'{name}: {in_toml(value)}' for name, value in self.presets.items())})"
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
    """Return the model of a table of sections, which a run file names; None for another field."""
    found = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is dict else ()
    return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def section_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section; None for a setting."""
    kinds = (kind for kind in _options(info.annotation) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def table_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a list of tables; None for another."""
    for kind in _options(info.annotation):
        for item in () if typing.get_origin(kind) is dict else typing.get_args(kind):
            if isinstance(item, type) and issubclass(item, BaseModel):
                return item
    return None


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the schema."""
    return tuple(
        _setting(f"{section}.{name}", info)
        for section, model in sections()
        for name, info in model.model_fields.items()
        if section_model(info) is None
    )


def defaults_of(algorithm: str) -> dict[str, Any]:
    """Return the defaults of a run of this algorithm, by key, as in JSON. Left out are settings
    without one, those of sections that a run may lack, and ``[algorithm]`` of one's own rule."""
    always = {*_sections_of_each_run()} - (set() if algorithm in BUILT_IN else {"algorithm"})
    found = ((one.key, one.default_in(algorithm)) for one in settings() if one.section in always)
    known = {key: value for key, value in found if not isinstance(value, Absent)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}  # pyright: ignore[reportUnknownArgumentType]


def _sections_of_each_run(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if (inner := section_model(info)) is not None and info.default is not None:
            yield f"{prefix}{name}"
            yield from _sections_of_each_run(inner, f"{prefix}{name}.")


def explained(config: RunConfig, sources: Mapping[str, str] | None = None) -> str:
    """Return a configuration as TOML with every setting explained, and the source of those that
    ``sources`` has by key. It reads back unchanged, but for secrets."""
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
        lines += [f"{off}{title}", *comment(purpose(model))]
        for setting in by_section.get(section, []):
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
        default = Absent.NOT_SET if made is None else str(made) if isinstance(made, Path) else made
    section, _, name = key.rpartition(".")
    brought = {of: preset_of(of) for of in BUILT_IN} if section == "algorithm" else {}
    presets = {of: preset[name] for of, preset in brought.items() if name in preset}
    unit = unit_of(key) if is_number(info) else None
    return Setting(key, _kind(info.annotation), _limits(info), unit, default, presets, info.description or "")


def is_number(info: FieldInfo) -> bool:
    """Return whether a field's value is a number, or a list of numbers."""
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
    kind = _options(annotation)[0]
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
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
    """Return what a section is for, in one line."""
    return " ".join((model.__doc__ or "").split())


def comment(text: str) -> list[str]:
    """Return a text as lines of a TOML comment."""
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _at(values: dict[str, Any], section: str) -> dict[str, Any] | None:
    """Return the values of a section; None where it is absent, or a list of tables."""
    found = _value(values, section)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _value(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
    return found
