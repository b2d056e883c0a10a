"""``headrace run list``, ``compare`` and ``replay``: the runs of a folder, runs side by side, and a
run's updates repeated from its update log. All of them read only run folders.

``replay`` prints the output of ``workers.replay``, which is a separate process because commands
import no torch."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, answer, echo_json, json_option, run_argument
from pipeline.cli.watch_option import Picture, keep_looking, watch_option
from pipeline.operator.attached import find_run
from protocol import headrace
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.operator.runs import ListedRun

_HEAD = ("run", "state", "updates", "accuracy", "best", "started", "took", "algorithm", "model")


@click.command(
    epilog="""\b
Examples:
  headrace run list                     # those under ./runs, the newest first
  headrace run list /data/runs --json
  headrace run list --watch 10

Accuracy is that on held-out prompts, at the first and last evaluation. A run that died has no
supervisor and no recorded end; headrace up --resume RUN continues it."""
)
@click.argument("folder", required=False, type=PATH)
@json_option
@watch_option
def list_(folder: Path | None, as_json: bool, every_s: float | None) -> None:
    """List the runs in a folder: state, updates, accuracy, start and duration."""
    place = Path("runs") if folder is None else folder
    if every_s is None:
        picture = _picture(place)
        # One line per run, however narrow the terminal, since scripts count them.
        answer(as_json, picture.value, *picture.shown())
        return
    import asyncio

    keep_looking(lambda: asyncio.to_thread(_picture, place), every_s, as_json=as_json)


def _picture(folder: Path) -> Picture:
    from pipeline.operator.runs import list_runs

    found = list_runs(folder)
    return Picture(found, lambda: _lines(found))


def _lines(found: Sequence[ListedRun]) -> Iterator[str]:
    from pipeline.files.records import skipped_words

    yield from aligned([_HEAD, *map(_cells, found)])
    for row in found:
        name = printable_line(row.run.name)
        if row.detail and row.state in ("died", "unreadable", "failed"):
            yield f"{name}: {printable_line(row.detail)}"
        if row.num_skipped:
            yield f"{name}: {skipped_words(row.num_skipped, 'its records')}"


def _cells(row: ListedRun) -> tuple[str, ...]:
    updates = f"{row.num_updates:,}" if row.num_wanted is None else f"{row.num_updates:,} of {row.num_wanted:,}"
    first, last = _percent(row.accuracy_first), _percent(row.accuracy_last)
    return (
        printable_line(row.run.name),
        str(row.state),
        updates,
        "–" if row.accuracy_first is None else f"{first} → {last}",
        _percent(row.accuracy_best),
        "–" if row.started_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started_s)),
        "–" if row.took_s is None else _duration(row.took_s),
        printable_line(row.algorithm) or "–",
        printable_line(_short(row.model)) or "–",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _short(model: str) -> str:
    return model if "://" in model else "/".join(Path(model).parts[-2:])


_EPILOG = """\b
Examples:
  headrace run replay runs/demo                    # compares each update
  headrace run replay runs/demo --from 40 --to 45  # from a checkpoint on
  headrace run replay runs/demo --to 37 --out w37  # writes w37/model
  headrace run replay runs/demo --from 40 --what-if learner.learning_rate=1e-4

\b
Exit codes:
  1    an update differs; its tensors are named
  2    there is no log, it is damaged, or the model or checkpoint to begin
       from is missing

Bitwise equality is promised only on a CPU, with the same libraries and threads.
"""


@click.command(epilog=_EPILOG)
@run_argument
@click.option(
    "--from",
    "after",
    type=click.IntRange(min=0),
    metavar="VERSION",
    help="Begin at the newest checkpoint up to this version.",
)
@click.option("--to", "until", type=click.IntRange(min=0), metavar="VERSION", help="End with this version.")
@click.option(
    "--check/--no-check",
    default=None,
    help="Stop at the first difference. Default: --check, unless --what-if is given.",
)
@click.option(
    "--what-if", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a setting; the data stays the same."
)
@click.option("--out", type=PATH, metavar="FOLDER", help="Save the final state in this new folder.")
@json_option
def replay(
    run: Path | None,
    after: int | None,
    until: int | None,
    check: bool | None,
    what_if: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> int:
    """Repeat a run's updates from its update log, and compare the weights bit by bit.

    Scores, reference log-probs and values come from the log: only the learner's part is repeated.
    """
    from pipeline.config.load import read_resolved
    from pipeline.files.urls import without_store_credentials
    from pipeline.ledger.url import without_ledger_password
    from pipeline.process.environment import without_sink_credentials
    from pipeline.runtime.process_setup import thread_environment

    run_dir = find_run(run)
    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists; give a new folder")
    if after is not None and until is not None and until <= after:
        raise ConfigError(f"--to {until} is not after --from {after}, so there is no update to repeat")
    given = [("--from", after), ("--to", until), *(("--what-if", setting) for setting in what_if), ("--out", out)]
    command = headrace.command("workers.replay", str(run_dir))
    command += [word for option, value in given if value is not None for word in (option, str(value))]
    command += ["--check" if (not what_if if check is None else check) else "--no-check"]
    command += ["--json"] if as_json else []
    environment = without_sink_credentials(without_store_credentials(without_ledger_password(os.environ)))
    environment |= thread_environment(read_resolved(run_dir).learner.threads)
    return subprocess.run(command, check=False, env=environment).returncode


if TYPE_CHECKING:
    from pipeline.observability.comparison import Comparison

_MOST_RUNS = 24
_MOST_NAMED = 8
_WIDEST = 36
"""Longest value of a setting that is shown; the page shows it in full."""


@click.command(
    epilog="""\b
Examples:
  headrace run compare runs/a runs/b
  headrace run compare runs/dapo-* runs/vapo-* --html compared.html
  headrace run compare a b --json       # names of runs under ./runs

Runs that differ only in their seed count as one configuration, with a mean and a t-interval. Where
95 % intervals overlap, no difference is reported. Runs that recorded the accuracy of each prompt
are also compared prompt by prompt."""
)
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN RUN...")
@click.option("--html", type=PATH, metavar="FILE", help="Write the report's page with all runs, in one file.")
@json_option
def compare(runs: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Compare runs: settings, seeds, accuracy at equal cost, throughput, drops."""
    from pipeline.observability.comparison import compare_runs, read_runs

    folders = [_known(run) for run in runs]
    if len(folders) < 2:
        raise click.UsageError(f"one run given: expected at least two, as in: headrace run compare {runs[0]} OTHER")
    if len(folders) > _MOST_RUNS:
        raise click.UsageError(f"{len(folders)} runs given: expected at most {_MOST_RUNS}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise click.UsageError("a run is given twice: give each once")
    found = compare_runs(read_runs(folders))
    if html is not None:
        from pipeline.observability.comparison_page import write_comparison

        try:
            write_comparison(found, html)
        except OSError as error:
            raise ConfigError(f"--html {html} cannot be written: {error.strerror}; give another file") from error
    if as_json:
        echo_json(_as_json(found))
    else:
        click.echo("\n".join(map(printable_line, in_lines(found))))
    if html is not None:
        click.echo(f"page: {html}", err=as_json)


def _known(run: Path) -> Path:
    """Return a run's folder, given by its path or by its name under ./runs. Raises ConfigError that
    names the existing runs."""
    from pipeline.config import RESOLVED_NAME
    from pipeline.operator.runs import unknown_run_words

    for folder in (run, Path("runs") / run):
        if (folder / RESOLVED_NAME).is_file():
            return folder
    raise ConfigError(unknown_run_words(run))


def in_lines(found: Comparison) -> list[str]:
    from pipeline.observability.comparison_page import (
        basis_rows,
        configuration_rows,
        drop_rows,
        role_rows,
        run_rows,
        setting_rows,
    )

    lines = [*_turned(run_rows(found)), "", "accuracy at equal cost"]
    lines += [*_turned(basis_rows(found)), ""]
    if len(found.configurations) < len(found.runs):
        lines += [*aligned(configuration_rows(found)), ""]
    lines += [each.words for each in found.differences]
    if len(found.configurations) == 1:
        lines.append("All runs have the same configuration: there is no difference to report.")
    if found.differing:
        lines += ["", *aligned([tuple(_shortened(cell) for cell in row) for row in setting_rows(found)])]
    elif not found.lacking:
        lines += ["", "no setting differs except the seed"]
    if found.lacking:
        names = ", ".join(list(found.lacking)[:_MOST_NAMED])
        more = f" and {len(found.lacking) - _MOST_NAMED} more" if len(found.lacking) > _MOST_NAMED else ""
        lines.append(f"set only in some runs: {names}{more}")
    for found_rows in (role_rows(found), drop_rows(found)):
        if len(found_rows) > 1:
            lines += ["", *aligned(found_rows)]
    return lines + ([""] if found.notes else []) + list(found.notes)


def _turned(table: list[tuple[str, ...]]) -> list[str]:
    return aligned(list(zip(*table, strict=True)))


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"…{cell[1 - _WIDEST :]}"


def _as_json(found: Comparison) -> dict[str, object]:
    """Return the figures of a comparison, without the histories and samples, which are in the runs'
    folders."""
    runs = [
        {
            "run": run.folder, "name": run.name, "seed": run.seed, "algorithm": run.algorithm, "num_updates": run.num_updates,
            "num_trained_tokens": run.num_tokens, "train_s": run.train_s, "tokens_per_s": run.tokens_per_s,
            "learner_wait_share": run.wait_share, "staleness_mean": run.staleness_mean, "staleness_max": run.staleness_max,
            "dropped": run.dropped, "roles": run.uses,
            "curve": [
                {
                    "update": point.update, "num_tokens": point.num_tokens, "train_s": point.train_s,
                    "accuracy": point.accuracy.value, "low": point.accuracy.low if point.has_interval else None,
                    "high": point.accuracy.high if point.has_interval else None, "num_responses": point.num_responses,
                }
                for point in run.curve
            ],
        }
        for run in found.runs
    ]  # fmt: skip
    bases = [
        {
            "name": basis.name,
            "limit": basis.limit,
            "accuracy": [point and point.accuracy.value for point in basis.points],
        }
        for basis in found.bases
    ]
    return {
        "runs": runs, "differing": found.differing, "lacking": found.lacking, "bases": bases,
        "configurations": found.configurations, "differences": found.differences, "notes": found.notes,
    }  # fmt: skip
