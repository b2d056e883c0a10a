"""Settings that were given, but that no part of this run reads, by the ``read_if`` of their declarations.

A setting counts as given when a file or ``--set`` has it. A default that a run's resolved file
repeats does not count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pipeline.config.describe import Setting, section_conditions, settings
from pipeline.config.load import section_of
from pipeline.config.schema import RunConfig


def unread(config: RunConfig) -> dict[str, str]:
    """Return every given setting that no part of this run reads, with the reason, in the schema's
    order."""
    return {one.key: why for one in _given(config) if (why := why_unread(config, one))}


def why_unread(config: RunConfig, setting: Setting) -> str:
    """Return why a run does not read a setting; empty if it does."""
    of_sections = chain.from_iterable(section_conditions(setting.section))
    whys = (one.otherwise for one in (*of_sections, *setting.read_if) if not one.holds(config))
    return next(whys, "").format(algorithm=config.algorithm.name)


def in_words(config: RunConfig) -> list[str]:
    """Return a sentence for each reason, with the given settings that are not read."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, why in unread(config).items():
        keys_by_reason.setdefault(why, []).append(key)
    return [f"set, but not read: {', '.join(keys)} ({why})" for why, keys in keys_by_reason.items()]


def given_keys(config: RunConfig) -> Iterator[str]:
    """Yield the keys that a file or an override gave, in the schema's order."""
    return (one.key for one in _given(config))


def _given(config: RunConfig) -> Iterator[Setting]:
    for one in settings():
        section = section_of(config, one.section)
        is_given = section is not None and one.name in section.model_fields_set
        if is_given and getattr(section, one.name) is not None:
            yield one
