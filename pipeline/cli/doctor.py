"""``headrace doctor``: can this machine run Headrace, and a configuration? ``headrace fleet
selfcheck``: does this machine compute correctly, and do all generators of a run agree?"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from pipeline.cli.common import PATH, answer, echo_json, json_option, run_argument, set_option
from pipeline.process.exit_codes import ExitCode
from protocol.errors import ConfigError, HeadraceError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.operator.fleet_check import AskedGenerators
    from pipeline.preflight.engine_reports import CheckedDevice
    from pipeline.preflight.findings import CheckFinding

_EPILOG = """\b
Examples:
  headrace doctor                                  # this machine
  headrace doctor configs/demo.toml configs/fleets/demo.toml
  headrace doctor run.toml --set fleet.generator=8 --json
  headrace doctor run.toml --card-gib 24           # plan for a GPU elsewhere

Exit code 0; 2 when it finds an error, such as a wrong configuration.
"""
_STYLES: Final[Mapping[str, str]] = {"ok": "green", "warning": "yellow", "error": "red"}
_MARGIN: Final = 25


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, type=PATH)
@set_option
@click.option(
    "--card-gib",
    "cards",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    metavar="GIB",
    help="Plan for a GPU of this size instead of this machine's; may be repeated.",
)
@json_option
def doctor(files: tuple[Path, ...], overrides: tuple[str, ...], cards: tuple[float, ...], as_json: bool) -> int:
    """Check this machine, and run files on it. Nothing is started or changed.

    Checks Python, torch and GPU, vLLM, threads, memory, the ledger's server, limits and shared
    memory; with run files also clock, ports, disk, memory by role and GPU, all of `config check`,
    and unwise combinations of settings. Each finding says what to do."""
    from pipeline.preflight.doctor import examine
    from pipeline.preflight.findings import refuse, worst
    from pipeline.preflight.host import Gpu, probe_host
    from pipeline.process.progress_bar import progress
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    if cards and not files:
        raise click.UsageError("--card-gib plans a run: give its files, too")
    try:
        config, refused = _config(files, overrides) if files or overrides else None, []
    except HeadraceError as error:
        config, refused = None, [refuse("settings", str(error))]
    if sys.stderr.isatty():
        click.echo("examining the machine; importing torch takes some seconds", err=True)
    with progress("examining the machine"):
        host = probe_host()
    sizes = [int(size * 2**30) for size in cards]
    planned = [
        Gpu(name=f"{gib:g} GiB", memory_bytes=size, free_bytes=size) for gib, size in zip(cards, sizes, strict=True)
    ]
    found = examine(host, config, planned)
    if refused:
        found["configuration"] = refused
    gravest = worst(finding for findings in found.values() for finding in findings)
    if as_json:
        echo_json({"ok": gravest != "error", "level": gravest, **found})
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
    """Return the findings as lines of at most ``width`` characters, styles aside. Without a width
    each finding is one line, for a pipe."""
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


_SELFCHECK_EPILOG = """\b
Examples:
  headrace fleet selfcheck                    # each device of this machine
  headrace fleet selfcheck --fleet            # the newest run's generators
  headrace fleet selfcheck --fleet runs/demo --json

Exit code 0; 1 when something differs. Remove a worker that differs with `headrace fleet evict WORKER`."""


@click.command(epilog=_SELFCHECK_EPILOG)
@run_argument
@click.option("--fleet", is_flag=True, help="Let all generators of a running run answer the same prompts.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait at most.")
@json_option
def selfcheck(run: Path | None, fleet: bool, timeout_s: float, as_json: bool) -> int:
    """Find devices and generators that silently compute wrong results.

    Without --fleet, computes a small model several times on each device of this machine. The passes
    must be bitwise equal, and close to those in float64.

    With --fleet, each generator cuts its current windows short and samples two prompts greedily,
    with nothing else in the batch. Tokens and log-probs must equal those of the other generators
    with the same policy version. The run continues meanwhile."""
    if not fleet:
        if run is not None:
            raise click.UsageError("a run is only checked with --fleet: headrace fleet selfcheck --fleet RUN")
        return _machine(timeout_s, as_json=as_json)
    found = asyncio.run(_fleet(run, timeout_s))
    answer(as_json, found, *_words(found))
    return ExitCode.OK if found.is_sound else ExitCode.FAILURE


async def _fleet(run: Path | None, timeout_s: float) -> AskedGenerators:
    from pipeline.config.load import read_resolved
    from pipeline.operator.attached import attach
    from pipeline.operator.fleet_check import check_fleet

    async with attach(run) as at:
        config = read_resolved(at.run_dir)
        if not config.has_sampling:
            raise ConfigError(
                f"the generators of {config.run.name} have no model to check: they read data.responses, and there is no "
                "evaluation; to check the devices of this machine, leave out --fleet"
            )
        return await check_fleet(at, timeout_s)


def _words(found: AskedGenerators) -> list[str]:
    lines: list[str] = []
    for worker, of in sorted(found.answers.items()):
        version = max(of)
        state = "  DIFFERS" if worker in found.found.workers else "  differs" if worker in found.found.undecided else ""
        lines.append(printable_line(f"{worker}: version {version}: {of[version]}{state}"))
    if not found.is_sound:
        lines += [printable_line(f"{worker}: no answer for a version that others have") for worker in found.silent]
    if found.found.undecided:
        names = ", ".join(found.found.undecided)
        lines.append(printable_line(f"{names} differ from one another, and there is no majority"))
    lines += [
        printable_line(f"all generators of host {host} differ: its devices may be of another kind, or faulty")
        for host in found.found.hosts
    ]
    if found.is_sound:
        others = f"{len(found.found.compared)} generators compute the same"
        lines.append(others if found.found.compared else "one generator alone: there is no other to compare it with")
    return lines or ["no generator has answered: `headrace status` shows what they do"]


def _machine(timeout_s: float, *, as_json: bool) -> int:
    from pipeline.preflight.engine_reports import check_devices
    from pipeline.process.progress_bar import progress

    with progress("computing a small model on each device"):
        devices = check_devices(timeout_s)
    answer(as_json, devices, *map(_device_line, devices))
    return ExitCode.OK if all(one.is_sound for one in devices) else ExitCode.FAILURE


def _device_line(one: CheckedDevice) -> str:
    if one.is_sound:
        return f"{one.device}: {one.num_passes} passes are the same; off by {one.error:.1e} from float64"
    if one.num_unlike:
        return f"{one.device}: {one.num_unlike} of {one.num_passes} passes DIFFER from the first; test its memory"
    return f"{one.device}: its passes are off by {one.error:.1e} from float64, which is WRONG; the limit is {one.limit:.0e}"
