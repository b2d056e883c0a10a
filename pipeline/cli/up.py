"""``headrace up``: from configuration files to a finished run, in one command.

*Consumes* files and overrides. *Produces* a run, or one error before any of it is started. *Waits
for* the run's end. *Unblocked by* the learner, or by Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, RUN_OR_URL, echo_json, fleet_option, json_option, plain_option, set_option
from pipeline.operator.attached import find_run
from protocol.errors import ConfigError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.cli.start_phases import StartPhases
    from pipeline.config.schema import RunConfig
    from pipeline.fleet.status import RunSnapshot
    from pipeline.observability.live_view import View
    from pipeline.observability.summary import Summary
    from pipeline.supervisor.launchers.seam import ConfiguredLauncher
    from pipeline.supervisor.starter import EarlyProcesses
    from pipeline.supervisor.supervisor import RunOutcome

_EPILOG = """\b
Examples:
  headrace up configs/demo.toml --fleet configs/fleets/demo.toml
  headrace up configs/demo.toml --set run.name=lr3 --set run.seed=3
  headrace up --resume runs/demo
  headrace up --resume runs/demo --set run.num_updates=80
  headrace up --resume runs/demo --from-version 40
  headrace up configs/demo.toml --on slurm --dry-run
  headrace up run.toml --on ray --address head:6379
  headrace up --resume s3://bucket/runs/demo

\b
Exit codes:
  0    done, or drained after Ctrl-C; --resume continues, and nothing is lost
  2    a setting, a file or the data is wrong; nothing was started
  3    the ledger's server does not answer
  5    the learner did not drain in time; --resume finds its last checkpoint
  6    the data is exhausted, or gives no signal; checkpoints are kept
  7    training has diverged: steps or weights are not finite;
       earlier checkpoints are kept
  8    a worker froze or got stuck too often
  130  stopped twice, so ended at once; or stopped while waiting for the
       ledger's server, before anything was started

A worker that fails more often than supervisor.max_restarts or supervisor.max_data_failures allow
ends the run. The command prints the worker's last log lines and exits with its code: 1 for an
error, 9 for the host's disk, memory or files, 128 + N for signal N.
"""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, type=PATH, metavar="CONFIG...")
@fleet_option
@set_option
@click.option(
    "--resume", type=RUN_OR_URL, metavar="RUN", help="Continue the run in this folder, or at its mirror's URL."
)
@click.option(
    "--from-version", type=int, metavar="N", help="With --resume: start from this checkpoint, not the newest."
)
@click.option(
    "--on", "place", metavar="PLACE", help="Where workers are started: local, join, ssh, slurm, kubernetes or ray."
)
@click.option("--address", metavar="HOST:PORT", help="With --on ray: the cluster's head. Default: this host's cluster.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted there, without starting anything.")
@plain_option
@json_option
def up(
    files: tuple[Path, ...],
    fleet: Path | None,
    overrides: tuple[str, ...],
    resume: Path | str | None,
    from_version: int | None,
    place: str | None,
    address: str | None,
    dry_run: bool,
    plain: bool,
    as_json: bool,
) -> int:
    """Start a run and stay with it until it ends."""
    from pipeline.config import RESOLVED_NAME
    from pipeline.config.load import load_config, resolve_paths
    from pipeline.data.hub import pin_models, with_hub_names
    from pipeline.data.places import pin_data
    from pipeline.ledger.address import known_url
    from pipeline.operator.top.run import has_screen
    from pipeline.supervisor.run_folder import check_no_run, prepare_run_dir

    if resume is None and not files:
        raise click.UsageError("no run file given; for example: headrace up configs/demo.toml")
    if resume is None and from_version is not None:
        raise click.UsageError("--from-version chooses a checkpoint of a run: give --resume RUN too")
    if isinstance(resume, str):
        resume = _fetched(resume, overrides, from_version)
        from_version = None
    if resume is not None:
        find_run(resume)
    if address is not None:
        if place != "ray":
            raise click.UsageError("--address names a Ray cluster: give --on ray too")
        overrides = (f"launch.ray.address={address}", *overrides)
    if place is not None:
        overrides = (f"launch.on={place}", *overrides)
    given = [*([resume / RESOLVED_NAME] if resume else []), *files, *([fleet] if fleet else [])]
    config = resolve_paths(load_config(given, overrides, os.environ))
    if dry_run:
        from pipeline.supervisor.launchers.build import dry_run as what_would_be

        click.echo(what_would_be(config), nl=False)
        return 0
    if resume is not None:
        config = _at(config, resume.resolve())
        known = {"url": known_url(config.run_dir, config.ledger.url)}
        config = with_hub_names(config.model_copy(update={"ledger": config.ledger.model_copy(update=known)}))
    else:
        # First, because the other checks take longer.
        check_no_run(config)
    config = with_compute_types(pin_models(pin_data(config)))
    if config.checkpoint.mirror is not None:
        from pipeline.preflight.mirror import check_mirror

        click.echo(check_mirror(config, is_new=resume is None), err=True)
    is_live = not (plain or as_json) and has_screen()

    def choose(run_dir: Path) -> None:
        if from_version is not None:
            from pipeline.training.checkpoints import choose_checkpoint

            chosen = choose_checkpoint(run_dir / "checkpoints", from_version)
            click.echo(f"continuing from {chosen}; later checkpoints are set aside", err=True)

    prepare = partial(prepare_run_dir, config, resume=resume is not None)
    outcome = carry_out(config, prepare, begin=choose, is_live=is_live)
    return _report(config.run_dir, outcome, as_json=as_json)


def with_compute_types(config: RunConfig) -> RunConfig:
    """Return a run's configuration with the number types that it will compute in, and tell which were chosen."""
    from pipeline.preflight.compute_types import decide, with_types
    from pipeline.runtime.machine import this_machine

    decision = decide(config, this_machine())
    if decision is not None:
        click.echo(printable(decision.words), err=True)
    return with_types(config, decision)


def carry_out(
    config: RunConfig, prepare: Callable[[], Path], *, is_live: bool, begin: Callable[[Path], None] | None = None
) -> RunOutcome:
    """Check a resolved configuration, then run it to its end. ``prepare`` creates or finds the
    run's folder, and is called once the configuration has passed the checks. ``begin`` is called
    with the locked run folder, before anything is started."""
    from pipeline.cli.start_phases import StartPhases
    from pipeline.runtime.log import log_to_stderr
    from pipeline.supervisor.starter import EarlyProcesses

    log_to_stderr()
    phases = StartPhases()
    launcher = None
    if config.launch.launched:
        from pipeline.supervisor.launchers.build import launcher_of

        launcher = launcher_of(config, config.run_dir)
        if launcher is not None:
            launcher.reach()
    with EarlyProcesses(config, config.run_dir) as early:
        return _checked_run(config, prepare, begin, early, phases, launcher, is_live=is_live)


def _checked_run(
    config: RunConfig,
    prepare: Callable[[], Path],
    begin: Callable[[Path], None] | None,
    early: EarlyProcesses,
    phases: StartPhases,
    launcher: ConfiguredLauncher | None,
    *,
    is_live: bool,
) -> RunOutcome:
    from pipeline.observability.live_view import PlainView
    from pipeline.operator.top.child import ChildView
    from pipeline.preflight.checks import preflight
    from pipeline.preflight.passed import PassedCheck
    from pipeline.runtime.log import open_log
    from pipeline.supervisor.run_folder import run_lock
    from pipeline.supervisor.supervisor import Supervisor
    from protocol.ids import Role

    click.echo("checking model, data, verifiers and engines while workers import", err=True)
    checked = preflight(config, plain=not is_live, ask_vllm=early.check_vllm)
    for finding in checked.findings:
        click.echo(printable(finding), err=True)
    if estimate := phases.checked(PassedCheck("start", config)):
        click.echo(estimate, err=True)
    run_dir = prepare()
    with run_lock(run_dir):
        if begin is not None:
            begin(run_dir)
        view: View = (ChildView if is_live else PlainView)(config, run_dir)
        terminal = view.log_terminal or sys.stderr
        who = Role.SUPERVISOR
        log = open_log(run_dir, role=who, worker=str(who), run=config.run.name, terminal=terminal)

        def show(snapshot: RunSnapshot) -> None:
            if words := phases.observe(snapshot):
                log.logger.info("first_tokens", detail=words)
                if not is_live:
                    click.echo(words, err=True)
            view.show(snapshot)

        try:
            with view:
                supervisor = Supervisor(config, run_dir, checked.spec, launcher=launcher, early=early)
                outcome = asyncio.run(supervisor.run(show, leave=view.end if is_live else None))
            if launcher is not None:
                _clear_jobs(launcher, run_dir)
            return outcome
        finally:
            log.close()


def _clear_jobs(launcher: ConfiguredLauncher, run_dir: Path) -> None:
    """Remove what ended jobs left on this host. A failure does not change the run's end."""
    from pipeline.supervisor.launchers.seam import LaunchFailed

    try:
        launcher.clear(run_dir / "logs")
    except LaunchFailed as error:
        click.echo(f"folders of joined workers are left: {printable_line(str(error))}", err=True)


def _fetched(url: str, overrides: tuple[str, ...], version: int | None) -> Path:
    """Fetch a run from its mirror; return its folder, below the overrides' run.dir or ./runs."""
    from pipeline.training.mirror.fetching import fetch_run

    places = [text.partition("=")[2].strip() for text in overrides if text.partition("=")[0].strip() == "run.dir"]
    parent = Path(places[-1] if places else "runs")
    run_dir, copy = fetch_run(url, parent, version=version, tell=lambda line: click.echo(printable(line), err=True))
    click.echo(f"continuing from {copy.checkpoint} in {run_dir}", err=True)
    return run_dir


def _at(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return a run's configuration with the folder's current place, since folders can be moved."""
    if run_dir.name != config.run.name:
        why = f"{run_dir} holds the run {config.run.name!r}, and the ledger's keys have that name"
        raise ConfigError(f"{why}: rename the folder to {config.run.name}, and leave run.name as it is")
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir.parent})})


def _report(run_dir: Path, outcome: RunOutcome, *, as_json: bool) -> int:
    from pipeline.observability.summary import summarize

    summary = summarize(run_dir)
    failure = outcome.failure
    if as_json:
        ending = {"state": outcome.status.state, "detail": outcome.status.detail, "exit_code": outcome.exit_code}
        failed = failure.worker if failure else None
        echo_json({"run": run_dir, **ending, "summary": summary, "failed_worker": failed})
    else:
        click.echo(f"\n{outcome.status.state}: {printable(outcome.status.detail)}")
        _report_places(run_dir, summary)
    if failure is not None:
        click.echo(f"\nlast lines of {failure.worker}:\n{printable(outcome.last_lines)}", err=True)
        click.echo(f"its log: {run_dir / 'logs' / f'{failure.worker}.jsonl'}", err=True)
    return outcome.exit_code


def _report_places(run_dir: Path, summary: Summary) -> None:
    before, after = summary.accuracy_before, summary.accuracy_after
    if before is not None and after is not None:
        click.echo(
            f"held-out accuracy: {100 * before:.1f} % before, {100 * after:.1f} % after ({summary.num_held_out} responses, "
            f"{summary.num_updates} updates, {summary.train_s:.0f} s of training)"
        )
    checkpoints = sorted(path for path in (run_dir / "checkpoints").glob("[0-9]*") if path.is_dir())
    best = [path for path in checkpoints[:-1] if path.name.endswith(f".version-{summary.best_version}")]
    places = {
        "report": [run_dir / "report.html"],
        "checkpoint": checkpoints[-1:],
        "best": best[-1:],
        "logs": [run_dir / "logs"],
    }
    for name, paths in places.items():
        for path in paths:
            if path.exists():
                click.echo(f"{name + ':':<12}{path}")
