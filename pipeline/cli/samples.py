"""``headrace samples``: prompts with responses, rewards and verdicts, from ``samples.jsonl``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import answer, json_option, run_argument, titled
from pipeline.operator.attached import find_run
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.observability.samples import ResponseSample


@click.command(
    epilog="""\b
Examples:
  headrace samples                       # of the newest update with samples
  headrace samples runs/demo --last 5    # of the newest five
  headrace samples --update 1 --json

For each update the learner keeps samples.per_update responses, and as many from evaluations and
from groups dropped without signal since the previous one. Of older updates it keeps an evenly
spaced selection (samples.keep_updates). The middle of long texts is cut (samples.max_chars)."""
)
@run_argument
@click.option(
    "--last", type=click.IntRange(1), default=1, show_default=True, help="Show this many of the newest updates."
)
@click.option("--update", type=click.IntRange(1), help="Show this update, or the nearest earlier one with samples.")
@json_option
def samples(run: Path | None, last: int, update: int | None, as_json: bool) -> None:
    """Show prompts, responses, rewards and verdicts of updates, also of a running run."""
    run_dir = find_run(run)
    shown = newest_samples(run_dir, last=last, update=update)
    texts = ["\n".join(render(sample)) for sample in shown]
    none = f"no samples in {run_dir}: no update yet, or samples.per_update is 0"
    answer(as_json, shown, "\n\n".join(texts) if shown else none)


def newest_samples(run_dir: Path, *, last: int, update: int | None) -> list[ResponseSample]:
    """Return the samples of the ``last`` newest updates that have any; with ``update``, of it or of
    the nearest earlier one."""
    from pipeline.observability.samples import SAMPLES_NAME, read_samples

    kept = [s for s in read_samples(run_dir / SAMPLES_NAME) if update is None or s.update <= update]
    updates = sorted({sample.update for sample in kept})[-(last if update is None else 1) :]
    return [sample for sample in kept if sample.update in updates]


def render(sample: ResponseSample) -> list[str]:
    """Return one sample as lines, safe for a terminal."""
    colour = "green" if sample.accuracy == 1.0 else "red"
    head = f"update {sample.update} (made version {sample.policy_version})  {printable_line(sample.trajectory)}  "
    lines = [head + click.style(sample.verdict, fg=colour, bold=True)]
    lines += textwrap.wrap(printable_line(sample.facts), 79, initial_indent="  ", subsequent_indent="  ")
    return lines + titled({"prompt": sample.prompt, "response": sample.response, "answer": sample.answer})
