"""Text of pages that is generated from the code: settings, commands, exit codes, metrics, rules.

Each function returns Markdown for the end of the page that ``ENDINGS`` names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import click
from prometheus_client.core import Metric

from ops.docs.whole_fleet import whole_collector
from pipeline.cli import headrace
from pipeline.config.catalogue import BUILT_IN, declare
from pipeline.config.describe import Setting, about, in_toml, purpose, sections, settings, whys_unread
from pipeline.config.learning import all_settings, settings_of
from pipeline.ledger.types import DropReason
from pipeline.observability.history import EvaluationRow, RefusedRow, UpdateRow, ValueRow
from pipeline.process.exit_codes import ExitCode

_WIDTH: Final = 88
"""Width of a command's usage."""
_LINE: Final = 200
"""Longest summary of a command in its group's table."""
_HIDDEN: Final = "\b"
"""Click's mark before lines that must not be joined."""


def settings_list() -> list[str]:
    """Return the table of all sections of a run file, and their pages for the navigation."""
    about = [(name, model) for name, model in sections() if "." not in name]
    rows = [f"| [{code(f'[{name}]')}](settings/{name}.md) | {plain(purpose(model))} |" for name, model in about]
    names = [f"settings/{name}" for name, _ in about]
    return ["| section | what it is for |", "|---|---|", *rows, "", *toctree(names)]


def settings_pages() -> dict[str, str]:
    """Return a page for each section of a run file, by its file name."""
    held: dict[str, list[Setting]] = {}
    for setting in settings():
        held.setdefault(setting.section, []).append(setting)
    pages: dict[str, list[str]] = {}
    for name, model in sections():
        lines = pages.setdefault(name.partition(".")[0], [])
        lines += [f"{'##' if lines else '#'} [{name}]", "", plain(about(name, model)), ""]
        for setting in held.get(name, []):
            level = "###" if "." in name else "##"
            lines += [f"{level} {setting.key}", "", plain(setting.description), "", _facts(setting), ""]
    return {name: "\n".join(lines) for name, lines in pages.items()}


def _facts(setting: Setting) -> str:
    """Return a setting's type, limits, unit and defaults in one paragraph."""
    facts = [plain(f"{setting.kind}, {setting.limits}" if setting.limits else setting.kind)]
    if setting.unit is not None:
        facts.append(f"unit: {plain(setting.unit)}")
    facts.append(f"default: {_value(setting.default)}")
    by_value = _by_value(setting.presets).items()
    facts += [f"with {', '.join(map(code, names))}: {value}" for value, names in by_value]
    if setting.read_if:
        facts.append(plain(f"not always read: {whys_unread(setting.read_if)}"))
    return f"{{.facts}}\n{'; '.join(facts)}"


def _by_value(presets: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in presets.items():
        found.setdefault(_value(value), []).append(name)
    return found


def _value(value: Any) -> str:
    """Format a default as code; None and enum members in words."""
    return in_toml(value) if value is None or isinstance(value, Enum) else code(in_toml(value))


def commands() -> list[str]:
    """Return every command from its own help, with a group's commands below the group."""
    below = [line for words, command in _commands(headrace, "headrace") for line in _command(words, command)]
    return [*_members(headrace, "headrace"), *below]


def _commands(group: click.Group, words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group, with its words; a group before its commands."""
    context = click.Context(group, info_name=words)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{words} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{words} {name}")


def _members(group: click.Group, words: str) -> list[str]:
    context = click.Context(group, info_name=words)
    found = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    rows = [f"| {code(f'{words} {name}')} | {plain(one.get_short_help_str(_LINE))} |" for name, one in found if one]
    return ["| command | what it does |", "|---|---|", *rows, ""]


def _command(words: str, command: click.Command) -> list[str]:
    """Return a command's part of the page: help, usage, options, examples."""
    names = headrace.context_settings["help_option_names"]
    context = click.Context(command, info_name=words, terminal_width=_WIDTH, help_option_names=names)
    lines = ["#" * len(words.split()) + f" {words}", "", *_help(command.help), ""]
    if isinstance(command, click.Group):
        return [*lines, *_members(command, words), *_help(command.epilog)]
    lines += fenced(command.get_usage(context).removeprefix("Usage: "), "text")
    records = [found for option in command.get_params(context) if (found := option.get_help_record(context))]
    rows = [f"| {code(name)} | {plain(text)} |" for name, text in records if text]
    lines += ["| option | effect |", "|---|---|", *rows, ""]
    return lines + _help(command.epilog)


def _help(text: str | None) -> list[str]:
    """Return a command's text as Markdown: paragraphs as they are, marked lines as code."""
    lines: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        if part.startswith(_HIDDEN):
            title, _, rest = part.removeprefix(_HIDDEN).strip("\n").partition("\n")
            is_titled = title.endswith(":") and rest
            lines += [title, ""] if is_titled else []
            language = "sh" if title.startswith("Example") else "text"
            lines += fenced(textwrap.dedent(rest if is_titled else f"{title}\n{rest}").rstrip(), language)
        elif part:
            lines += [plain(" ".join(part.split())), ""]
    return lines


def exit_codes() -> list[str]:
    """Return the table of exit codes, from the docstrings of their members."""
    texts = documented(inspect.getsource(ExitCode))
    rows = [f"| {member.value} | {code(member.name)} | {plain(texts[member.name])} |" for member in ExitCode]
    return ["| code | name | meaning |", "|---|---|---|", *rows]


def drop_reasons() -> list[str]:
    """Return the reasons for dropping work, from the docstrings of their members."""
    texts = documented(inspect.getsource(DropReason))
    rows = [f"| {code(reason)} | {plain(texts[reason.name])} |" for reason in DropReason]
    return ["## Reasons of a drop", "", "| reason | meaning |", "|---|---|", *rows]


def metrics() -> list[str]:
    """Return the metrics that a run's endpoint serves, and the figures of its history."""
    rows = [
        f"| {code(metric.name)} | {metric.type} | {_labels(metric)} | {plain(metric.documentation)} |"
        for metric in whole_collector().collect()
    ]
    head = ["## Of the fleet, for Prometheus", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    return [*head, *rows, "", "## Of learning, in history.jsonl", *_figures()]


def _figures() -> Iterator[str]:
    """Yield a table for each kind of row in ``history.jsonl``."""
    kinds = {
        "An update": UpdateRow,
        "An update of which no step was applied": RefusedRow,
        "An evaluation": EvaluationRow,
        "A step of the critic": ValueRow,
    }
    for title, kind in kinds.items():
        texts = documented(inspect.getsource(kind))
        rows = (f"| {code(name)} | {plain(texts.get(name, ''))} |" for name in kind.__annotations__)
        yield from ("", f"### {title}", "", "| figure | meaning |", "|---|---|", *rows)


def _labels(metric: Metric) -> str:
    return ", ".join(map(code, getattr(metric, "_labelnames", ())))


def rules() -> list[str]:
    """Return the learning rules: the text of each file, and what the rule declares."""
    lines: list[str] = []
    for module, names in groupby(BUILT_IN, lambda name: BUILT_IN[name].partition(":")[0]):
        own = list(names)
        lines += [f"## {', '.join(own)}", "", *_docstring(module), ""]
        for name in own:
            declared = declare(name)
            critic = "a value process serves it" if declared.has_critic else "no value process"
            sets = settings_of(name).model_fields
            preset = [
                f"{key} = {in_toml(sets[key].default)}"
                for key, info in all_settings().model_fields.items()
                if key in sets and key != "name" and sets[key].default != info.default
            ]
            defaults = "" if preset else " The defaults of `[algorithm]` are its settings."
            lines += [f"The learner claims a {declared.unit} at once; {critic}.{defaults}", ""]
            lines += fenced("\n".join(["[algorithm]", f"name = {in_toml(name)}", *preset]), "toml")
    return lines


def _docstring(module: str) -> list[str]:
    """Return the docstring of a module without importing it; its indented lines become code."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    text = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""
    return text.splitlines()


def documented(source: str) -> dict[str, str]:
    """Return the docstrings of a class's attributes, by name."""
    (body,) = (node.body for node in ast.parse(textwrap.dedent(source)).body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for statement, text in pairwise(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = text.value if isinstance(text, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = " ".join(value.value.split())
    return found


def plain(text: str) -> str:
    """Escape Markdown in a text; code in backticks stays code."""
    parts = re.split(r"(``.+?``|`[^`]+`)", " ".join(text.split()))
    return "".join(
        part.replace("|", "\\|") if at % 2 else re.sub(r"([\\*_<>|\[\]{}])", r"\\\1", part)
        for at, part in enumerate(parts)
    )


def code(text: str) -> str:
    """Format a text as code on one line, valid in a table too."""
    mark = "``" if "`" in text else "`"
    return f"{mark}{text}{mark}".replace("|", "\\|")


def fenced(text: str, language: str) -> list[str]:
    """Return a text as a block of code, and an empty line."""
    return [f"```{language}", *text.splitlines(), "```", ""]


def toctree(places: list[str], caption: str = "") -> list[str]:
    """Return a list of pages for the site's navigation, which the page itself does not show."""
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return ["```{toctree}", *head, "", *places, "```", ""]


ENDINGS: Final[Mapping[str, Callable[[], list[str]]]] = {
    "ops/docs/settings.md": settings_list,
    "ops/docs/commands.md": commands,
    "ops/docs/exit-codes.md": exit_codes,
    "ops/docs/metrics.md": metrics,
    "ops/docs/rules.md": rules,
    "pipeline/ledger/README.md": drop_reasons,
}
"""The function that makes the end of each page."""
