"""``headrace run logs`` shows workers' logs from every host; ``headrace fleet stacks`` shows the stacks of
this host's workers, and which differ."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli.common import echo_json, json_option, run_among
from pipeline.operator.attached import find_run
from protocol.errors import ConfigError
from protocol.printable import printable, printable_line

_LEVELS = ("info", "warning", "error")
_POLL_S = 0.5


@click.command(
    epilog="""\b
Examples:
  headrace run logs                         # the last 50 lines of all workers
  headrace run logs learner reward-0 runs/demo
  headrace run logs --level warning --last 200
  headrace run logs generator-0 --follow    # until Ctrl-C

Logs of joined and launched workers are copied into the run's folder. With --json each line is the
JSON object in the file."""
)
@click.argument("workers", nargs=-1, metavar="[WORKER]... [RUN]")
@run_among("workers")
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="Number of lines.")
@click.option("--level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Lowest level shown.")
@click.option("--follow", is_flag=True, help="Keep printing new lines.")
@json_option
def logs(workers: tuple[str, ...], run: Path | None, last: int, level: str, follow: bool, as_json: bool) -> None:
    """Show the workers' logs, in order of time."""
    from pipeline.observability.log_lines import LogReader

    run_dir = find_run(run)
    reader = LogReader(run_dir, workers=frozenset(workers) or None, level=level)
    if unknown := sorted(set(workers) - set(reader.known())):
        there = ", ".join(reader.known()) or "none"
        raise ConfigError(f"{run_dir} has no log of {', '.join(unknown)}; it has those of: {there}")
    lines = reader.new(last)
    while True:
        for line in lines:
            click.echo(line.as_json() if as_json else line.shown())
        if not follow:
            return
        if not reader.is_behind:
            time.sleep(_POLL_S)
        lines = reader.new()


_NATIVE_S = 60.0
"""Time limit of py-spy for one worker."""


@click.command(
    epilog="""\b
Examples:
  headrace fleet stacks                       # all of this host, newest run
  headrace fleet stacks generator-2 --all     # every thread and task of one
  headrace fleet stacks generator-2 --native  # with native calls, by py-spy

A worker stands still when its stack is the same in all samples. Workers of a role that stand still
at the same place form a group, and the smaller groups are marked as different. This works while a
worker's event loop is blocked, but not when its process is frozen. For another host's workers, run
it there, in the folder of the join."""
)
@click.argument("workers", nargs=-1, metavar="[WORKER]... [RUN]")
@run_among("workers")
@click.option(
    "--looks", type=click.IntRange(1, 20), default=3, show_default=True, help="Number of samples, half a second apart."
)
@click.option("--all", "show_all", is_flag=True, help="Show every thread and task, from the last sample.")
@click.option("--native", is_flag=True, help="Include native calls, by py-spy, which must be installed.")
@json_option
def stacks(workers: tuple[str, ...], run: Path | None, looks: int, show_all: bool, native: bool, as_json: bool) -> None:
    """Show workers' stacks, and which differ from the rest of their role."""
    from pipeline.process.stacks.parse import StackSnapshot, stack_groups
    from pipeline.process.stacks.request import LOOK_EVERY_S, request_stacks

    run_dir = find_run(run)
    if native:
        _show_native(run_dir, workers)
        return
    found: dict[str, list[StackSnapshot]] = {}
    missing: dict[str, str] = {}
    for number in range(looks):
        if number:
            time.sleep(LOOK_EVERY_S)
        answers = request_stacks(run_dir, found.keys() if number else workers or None)
        missing |= answers.missing
        for worker, look in answers.looks.items():
            found.setdefault(worker, []).append(look)
    if not found:
        reasons = "; ".join(f"{worker}: {reason}" for worker, reason in missing.items()) or "no worker was started here"
        raise ConfigError(f"{run_dir} has no stacks: {reasons}")
    groups = stack_groups(found)
    if as_json:
        last = {worker: [asdict(stack) for stack in of[-1].stacks] for worker, of in found.items()}
        echo_json({"groups": [asdict(group) for group in groups], "missing": missing, "stacks": last})
        return
    for group in groups:
        state = "  UNLIKE the others" if group.is_unlike else ""
        where = "moves, or waits for work" if group.where == "moves" else f"stands in {group.where}"
        click.echo(f"{group.role}: {', '.join(group.workers)}: {where}{state}")
        for call in group.calls:
            click.echo(f"    {printable_line(call)}")
    for worker, reason in sorted(missing.items()):
        click.echo(f"{worker}: {reason}")
    if show_all:
        for worker, of in sorted(found.items()):
            for stack in of[-1].stacks:
                click.echo(f"\n{worker}, {printable_line(stack.name)}:")
                for frame in stack.frames:
                    click.echo(f"    {printable_line(str(frame))}")


def _show_native(run_dir: Path, workers: tuple[str, ...]) -> None:
    import shutil

    from pipeline.process import records

    program = shutil.which("py-spy")
    if program is None:
        raise ConfigError(
            "py-spy is not installed; --native needs it: pip install py-spy, and allow it to trace processes"
        )
    started = records.read_started(run_dir)
    for worker in workers or sorted(started):
        record = started.get(worker)
        if record is None or records.identify(record.identity.pid) != record.identity:
            click.echo(f"{worker}: no process of it runs on this host")
            continue
        click.echo(f"{worker}:")
        click.echo(printable(_native_stacks(program, record.identity.pid)))


def _native_stacks(program: str, pid: int) -> str:
    """Return what py-spy prints about a process, or why it prints nothing."""
    import subprocess

    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_NATIVE_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"    py-spy has not answered within {_NATIVE_S:g} s: the process is frozen, or the machine is busy"
    except OSError as error:
        return f"    {program} cannot be run: {error.strerror}"
    return done.stdout if done.returncode == 0 else f"    {done.stderr.strip()}"
