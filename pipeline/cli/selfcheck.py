"""``headrace fleet selfcheck``: whether this machine computes right, or all generators of a run alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import answer, json_option, run_argument
from pipeline.process.exit_codes import ExitCode
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.operator.fleet_check import AskedGenerators
    from pipeline.preflight.engine_reports import CheckedDevice

_EPILOG = """\b
Examples:
  headrace fleet selfcheck                    # each device of this machine
  headrace fleet selfcheck --fleet            # the newest run's generators
  headrace fleet selfcheck --fleet runs/demo --json

Exit code 0; 1 when something differs. Remove a worker that differs with `headrace fleet evict WORKER`."""


@click.command(epilog=_EPILOG)
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
    from protocol.errors import ConfigError

    async with attach(run) as at:
        config = read_resolved(at.run_dir)
        if not config.has_sampling:
            raise ConfigError(
                f"the generators of {config.run.name} have no model to check: they read data.responses, and there is no "
                "evaluation; `headrace fleet selfcheck` checks the devices of this machine"
            )
        return await check_fleet(at, timeout_s)


def _words(found: AskedGenerators) -> list[str]:
    lines: list[str] = []
    for worker, of in sorted(found.answers.items()):
        version = max(of)
        state = "  DIFFERS" if worker in found.found.workers else "  differs" if worker in found.found.undecided else ""
        lines.append(printable_line(f"{worker}: version {version}: {of[version]}{state}"))
    if not found.is_sound:
        lines += [printable_line(f"{worker}: no answer under a version that others have") for worker in found.silent]
    if found.found.undecided:
        names = ", ".join(found.found.undecided)
        lines.append(printable_line(f"{names} differ from one another, and no answer is that of most"))
    lines += [
        printable_line(f"all generators of host {host} differ: its devices may be of another kind, or faulty")
        for host in found.found.hosts
    ]
    if found.is_sound:
        others = f"{len(found.found.compared)} generators compute the same"
        lines.append(others if found.found.compared else "one generator alone: there is none to compare it with")
    return lines or ["no generator has answered: `headrace status` shows what they do"]


def _machine(timeout_s: float, *, as_json: bool) -> int:
    from pipeline.preflight.engine_reports import check_devices
    from pipeline.process.progress_bar import progress

    with progress("computing a small model on each device"):
        devices = check_devices(timeout_s)
    answer(as_json, devices, *map(_line, devices))
    return ExitCode.OK if all(one.is_sound for one in devices) else ExitCode.FAILURE


def _line(one: CheckedDevice) -> str:
    if one.is_sound:
        return f"{one.device}: {one.num_passes} passes are the same; off by {one.error:.1e} from float64"
    if one.num_unlike:
        return f"{one.device}: {one.num_unlike} of {one.num_passes} passes DIFFER from the first; test its memory"
    return f"{one.device}: its passes are off by {one.error:.1e} from float64, which is WRONG; the limit is {one.limit:.0e}"
