"""``headrace dev check-model``: whether and how our engines compute a model, before a run names it."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import aligned, echo_json, json_option
from protocol.printable import printable

_EPILOG = """\b
Examples:
  headrace dev check-model models/mine
  headrace dev check-model hf://Qwen/Qwen2.5-0.5B --json
  headrace dev check-model models/mine --device cuda
"""


@click.command(epilog=_EPILOG)
@click.argument("model", metavar="PATH|hf://NAME")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--timeout", "timeout_s", default=1800.0, show_default=True, help="Seconds to wait at most.")
@json_option
def check_model(model: str, device: str, timeout_s: float, as_json: bool) -> int:
    """Compare learner, local engine and critic with plain transformers on a model.

    The table shows the largest log-prob difference, the relative difference of the gradient, and
    the speed on short sequences. Exit code 0 when every engine computes the model correctly, else
    2."""
    import msgspec

    from pipeline.data.hub import pinned_model
    from pipeline.preflight.engine_reports import remarks_of, report_model, rows_of
    from pipeline.process.exit_codes import ExitCode
    from pipeline.process.progress_bar import progress

    folder = pinned_model(Path(model))
    with progress("computing the model with each engine"):
        report = report_model(folder, device, timeout_s=timeout_s)
    if as_json:
        found = msgspec.to_builtins(report)
        rights = [{**part, "right": one.is_right} for part, one in zip(found["parts"], report.parts, strict=True)]
        echo_json({**found, "right": report.is_right, "parts": rights})
    else:
        size = f"{report.num_weights / 1e6:,.2f} million weights"
        click.echo(printable(f"{report.path}: {report.architecture}, {size}, float32 on {report.device}"))
        click.echo()
        for line in [*aligned(rows_of(report)), "", *remarks_of(report)]:
            click.echo(printable(line))
    return ExitCode.OK if report.is_right else ExitCode.CONFIG
