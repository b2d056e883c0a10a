"""Writes settings as TOML whose comments are the schema's own words, so that they stay true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.describe import comment, in_toml, purpose, sections, settings


def commented(values: Mapping[str, Any], reasons: Mapping[str, str], *, algorithm: str, head: str = "") -> str:
    """Return settings, given by ``section.name``, as TOML in the schema's order. Above each stand
    its meaning, unit and default, and where ``reasons`` has one, why it has this value. ``head``
    begins the file. Raises KeyError for a setting that the schema lacks."""
    known = {setting.key: setting for setting in settings()}
    given = {key: known[key] for key in values}
    lines = [line for paragraph in head.splitlines() for line in (comment(paragraph) if paragraph else ["#"])]
    for section, model in sections():
        there = [key for key in known if key in given and given[key].section == section]
        if there:
            lines += [*([""] if lines else []), f"[{section}]", *comment(purpose(model))]
        for key in there:
            setting = given[key]
            lines += ["", *comment(setting.description), *comment(setting.facts(algorithm))]
            if key in reasons:
                lines += comment(f"Here: {reasons[key]}")
            lines.append(f"{setting.name} = {in_toml(values[key])}")
    return "\n".join(lines) + "\n"
