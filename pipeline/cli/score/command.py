"""``headrace score``: check a verifier on a file of responses before training with it.

Progress goes to standard error. Only click is imported until there is something to score."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.cli.score.distribution import Quantiles, ScoreReport
    from pipeline.config.schema import RunConfig
    from pipeline.process.exit_codes import ExitCode

_EPILOG = """\b
Examples:
  headrace score responses.jsonl --verifier math
  headrace score responses.jsonl --verifier my_rewards:judge --path .
  headrace score responses.jsonl --verifier arithmetic --by difficulty --json
  headrace score responses.jsonl --verifier math --out verdicts.jsonl
  headrace score responses.jsonl --config run.toml
  headrace score responses.jsonl --verifier math --judgments math

Exit code 0; 11 when a line has no verdict, was not judged in time, or cannot be read.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=PATH)
@click.option(
    "--config",
    "files",
    multiple=True,
    type=PATH,
    help="Run file whose data.verifier and [reward] section judge the responses; may be repeated, later files win.",
)
@click.option("--verifier", help="Registered name, or package.module:function. Default: the one that each line names.")
@click.option(
    "--judgments",
    help="Judgments of wrong responses, as guidance.judgments writes them: arithmetic, math, recorded, endpoint/NAME, "
    "or package.module:function. Default: the run file's.",
)
@click.option(
    "--path",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with your verifier's module, as reward.path; may be repeated.",
)
@click.option("--by", metavar="COLUMN", help="Break accuracy down by this column of the file.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.01), help="Seconds for one response. Default: 5.")
@click.option("--processes", type=click.IntRange(min=1), help="Sandbox processes. Default: one for each core.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a JSON line for each response: accuracy, reward, parts, judged, reason, and judgment if asked for.",
)
@click.option(
    "--pass-rates",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a JSON line for each prompt, to train on: its pass rate and its difficulty, 1 - pass rate.",
)
@json_option
def score(
    file: Path,
    files: tuple[Path, ...],
    verifier: str | None,
    judgments: str | None,
    folders: tuple[Path, ...],
    by: str | None,
    timeout_s: float | None,
    processes: int | None,
    out: Path | None,
    pass_rates: Path | None,
    as_json: bool,
) -> ExitCode:
    """Score the responses in FILE (JSONL or Parquet) and print the distribution.

    A line has `response` and `answer`, and may have `prompt`, `verifier`, `num_tokens`,
    `finish_reason` and other columns."""
    from pipeline.cli.score.offline import score_file, scoring_settings
    from pipeline.config.load import load_config
    from pipeline.data.files import count_rows
    from pipeline.process.exit_codes import ExitCode
    from pipeline.process.progress_bar import progress

    run = load_config(files, (), os.environ) if files else None
    reward = None if run is None else run.reward
    config = scoring_settings(folders, timeout_s=timeout_s, processes=processes, config=reward)
    total = count_rows(file)
    click.echo(f"scoring {total:,} lines, with up to {config.processes} verifier processes", err=True)
    with progress("scoring", total=total, unit="responses") as bar:
        report = score_file(
            file,
            verifier,
            config=config,
            default_verifier=None if run is None else run.data.verifier,
            max_response_tokens=None if run is None else run.generation.max_response_tokens,
            by=by,
            out=out,
            pass_rates=pass_rates,
            on_judged=bar.advance,
            judgments=judgments or ("" if run is None else run.guidance.judgments),
            model=None if run is None else _model(run),
        )
    if as_json:
        echo_json(report)
    else:
        from rich.console import Console

        show_report(report, Console(highlight=False, markup=False))
    return ExitCode.OK if report.all_judged else ExitCode.NOT_ALL_JUDGED


def _model(run: RunConfig) -> Path | None:
    return run.model.path if run.model.path.is_dir() else None


def show_report(report: ScoreReport, console: Console) -> None:
    """Print a report. Texts of the file are made safe for the terminal."""
    from rich.table import Table

    share = "no verdicts" if report.accuracy is None else f"accuracy {report.accuracy:.1%}"
    by = report.verifier or "each line’s verifier"
    console.print(printable_line(f"{report.path} by {by}: {share}"), soft_wrap=True)

    outcomes = Table("outcome", "responses", box=None, pad_edge=False)
    wrong = report.num_scored - report.num_correct - report.num_partial
    rows = [("correct", report.num_correct), ("partial", report.num_partial), ("wrong", wrong)]
    rows += [("  of these not judged in time", report.num_not_judged)]
    rows += [(f"no verdict: {kind}", count) for kind, count in report.failures.items()]
    rows += [("judgments of wrong responses", report.num_judgments)]
    rows += [(f"no judgment: {kind}", count) for kind, count in report.judgments_absent.items()]
    rows += [("unreadable lines", report.num_bad_lines), ("masked (over-long)", report.num_masked)]
    for name, count in rows:
        if count or name in ("correct", "wrong"):
            outcomes.add_row(name, str(count))
    console.print(outcomes)

    spread = Table("", "mean", "min", "p10", "median", "p90", "p99", "max", box=None, pad_edge=False)
    _add(spread, "reward", report.reward, "{:.3g}")
    _add(spread, f"{report.length_unit}, correct", report.correct_lengths, "{:.0f}")
    _add(spread, f"{report.length_unit}, others", report.other_lengths, "{:.0f}")
    if spread.row_count:
        console.print(spread)
    if len(report.parts) > 1:
        parts = Table("part of the reward", "mean", box=None, pad_edge=False)
        for name, mean in report.parts.items():
            parts.add_row(printable_line(name), f"{mean + 0.0:+.3g}")
        console.print(parts)

    if report.groups:
        groups = Table("value", "responses", "no verdict", "accuracy", box=None, pad_edge=False)
        for group in report.groups:
            accuracy = "-" if group.accuracy is None else f"{group.accuracy:.1%}"
            groups.add_row(printable_line(group.value), str(group.num_responses), str(group.num_failed), accuracy)
        console.print(groups)
    for example in (*report.judgment_examples, *report.failure_examples, *report.bad_lines):
        console.print(printable(example), soft_wrap=True)


def _add(table: Table, name: str, values: Quantiles | None, form: str) -> None:
    from dataclasses import astuple

    if values is not None:
        table.add_row(name, *(form.format(value) for value in astuple(values)))
