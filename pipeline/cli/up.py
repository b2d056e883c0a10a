"""``headrace up``: from configuration files to a finished run, in one command."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import echo_json, json_option

if TYPE_CHECKING:
    from pipeline.supervisor import Outcome, Supervisor

_EPILOG = """\b
Examples:
  headrace up configs/demo.toml --fleet configs/fleets/demo.toml
  headrace up configs/demo.toml --set run.name=lr3 --set learner.learning_rate=3e-4
  headrace up --resume runs/demo

\b
Exit codes: 0 done; 2 a setting or file is wrong, nothing was started; 6 the data is exhausted or hopeless;
8 a worker failed too often; 130 stopped twice. Ctrl-C drains and keeps everything for --resume.
"""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="CONFIG...")
@click.option("--fleet", type=click.Path(path_type=Path), help="Fleet file: how many workers of each role.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Applied last; may be repeated.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with the run in this folder.")
@click.option("--plain", is_flag=True, help="One line a second instead of the live view, also when on a terminal.")
@json_option
def up(
    files: tuple[Path, ...],
    fleet: Path | None,
    overrides: tuple[str, ...],
    resume: Path | None,
    plain: bool,
    as_json: bool,
) -> int:
    """Start a run and stay with it until it ends."""
    from pipeline.config.load import RESOLVED_NAME, load_config, resolve_paths
    from pipeline.preflight import preflight
    from pipeline.supervisor import Supervisor, prepare_run_dir, run_lock

    if resume is None and not files:
        raise click.UsageError("give a run file, for example: headrace up configs/demo.toml")
    given = [*([resume / RESOLVED_NAME] if resume else []), *files, *([fleet] if fleet else [])]
    config = resolve_paths(load_config(given, overrides))
    checked = preflight(config)
    for finding in checked.findings:
        click.echo(finding, err=True)
    run_dir = prepare_run_dir(config, resume=resume is not None)
    with run_lock(run_dir):
        outcome = asyncio.run(_run(Supervisor(config, run_dir, checked.spec), plain=plain or as_json))
    return _tell(run_dir, outcome, as_json=as_json)


async def _run(supervisor: Supervisor, *, plain: bool) -> Outcome:
    from pipeline.live import LiveView, PlainView

    view = PlainView() if plain or not sys.stderr.isatty() else LiveView()
    with view:
        return await supervisor.run(view.show)


def _tell(run_dir: Path, outcome: Outcome, *, as_json: bool) -> int:
    from pipeline.report import summarize

    summary = summarize(run_dir)
    if as_json:
        echo_json({"run": run_dir, "state": outcome.status.state, "detail": outcome.status.detail, "summary": summary})
        return outcome.exit_code
    click.echo(f"\n{outcome.status.state}: {outcome.status.detail}")
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        click.echo(
            f"held-out accuracy: {100 * summary.accuracy_before:.1f} % before, {100 * summary.accuracy_after:.1f} % after "
            f"({summary.num_held_out} responses, {summary.num_updates} updates, {summary.train_s:.0f} s of training)"
        )
    click.echo(f"report:     {run_dir / 'report.html'}")
    click.echo(f"checkpoint: {_newest(run_dir / 'checkpoints')}")
    click.echo(f"logs:       {run_dir / 'logs'}")
    if outcome.failure is not None:
        click.echo(f"\nlast lines of {outcome.failure.worker}:\n{outcome.last_lines}", err=True)
    return outcome.exit_code


def _newest(folder: Path) -> Path:
    found = sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []
    return found[-1] if found else folder
