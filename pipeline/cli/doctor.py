"""``headrace doctor``: whether this machine can run Headrace, and a configuration on it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from pipeline.cli.common import PATH, echo_json, json_option, set_option
from protocol.errors import HeadraceError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.preflight.findings import CheckFinding

_EPILOG = """\b
Examples:
  headrace doctor                                  # this machine
  headrace doctor configs/demo.toml configs/fleets/demo.toml
  headrace doctor run.toml --set fleet.generator=8 --json

Exit code 0; 2 when it finds an error, such as a wrong configuration.
"""
_STYLES: Final[Mapping[str, str]] = {"ok": "green", "warning": "yellow", "error": "red"}
_MARGIN: Final = 25
"""Columns of level and check."""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, type=PATH)
@set_option
@json_option
def doctor(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and run files on it. Nothing is started or changed.

    Checks Python, torch and GPU, vLLM, threads, memory, the ledger's server, limits and shared
    memory; with run files also clock, ports, disk, memory by role, all of `config check`, and
    unwise combinations of settings. Each finding says what to do."""
    from pipeline.preflight.doctor import examine
    from pipeline.preflight.findings import refuse, worst
    from pipeline.preflight.host import probe_host
    from pipeline.process.exit_codes import ExitCode
    from pipeline.process.progress_bar import progress
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    try:
        config, refused = _config(files, overrides) if files or overrides else None, []
    except HeadraceError as error:
        config, refused = None, [refuse("settings", str(error))]
    if sys.stderr.isatty():
        click.echo("looking at the machine; torch alone takes some seconds to import", err=True)
    with progress("looking at the machine"):
        host = probe_host()
    found = examine(host, config)
    if refused:
        found["configuration"] = refused
    gravest = worst(finding for findings in found.values() for finding in findings)
    if as_json:
        told = dict(found)
        echo_json({"ok": gravest != "error", "level": gravest, **told})
    else:
        is_terminal = sys.stdout.isatty()
        width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns)) if is_terminal else None
        click.echo("\n".join(render(found, width)))
    return ExitCode.CONFIG if gravest == "error" else ExitCode.OK


def _config(files: Sequence[Path], overrides: Sequence[str]) -> RunConfig:
    from pipeline.config.load import load_config
    from pipeline.data.hub import pin_models

    return pin_models(load_config(files, overrides, os.environ))


def render(found: Mapping[str, Sequence[CheckFinding]], width: int | None) -> list[str]:
    """Return the findings as lines of at most ``width`` characters, styles aside; without a width a
    line each, for a pipe."""
    lines: list[str] = []
    for heading, findings in found.items():
        if width is not None:
            lines += ([""] if lines else []) + [click.style(heading, bold=True)]
        for one in findings:
            lines += _line(one) if width is None else _paragraph(one, width)
    numbers = {level: sum(one.level == level for of in found.values() for one in of) for level in ("error", "warning")}
    told = ", ".join(f"{number} {level}{'' if number == 1 else 's'}" for level, number in numbers.items() if number)
    style = _STYLES["error" if numbers["error"] else "warning" if numbers["warning"] else "ok"]
    verdict = click.style(told or "all is well", fg=style, bold=True)
    return [*lines, *([""] if width is not None else []), verdict]


def _line(one: CheckFinding) -> list[str]:
    return [f"{one.level}: {one.check}: {printable_line(one.words.removeprefix(f'{one.check}: '))}"]


def _paragraph(one: CheckFinding, width: int) -> list[str]:
    """Return level and check in a margin, and beside them found, expected and the next step."""
    parts = [one.found.removeprefix(f"{one.check}: ")]
    parts += [f"expected: {one.expected}"] if one.expected else []
    parts += [f"→ {one.do}"] if one.do else []
    wrapped = [
        line
        for part in parts
        for paragraph in printable(part).splitlines()
        for line in textwrap.wrap(paragraph, width - _MARGIN, break_on_hyphens=False, subsequent_indent="  ")
    ]
    head = click.style(f"{one.level:<8}", fg=_STYLES[one.level]) + f" {one.check:<15} "
    return [head + wrapped[0], *(" " * _MARGIN + line for line in wrapped[1:])]
