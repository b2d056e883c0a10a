"""``headrace run replay``: repeat the learner's part of a run from its update log, and compare bits.

*Consumes* a run's folder. *Produces* the output of ``workers.replay``, a process of its own, since
commands import no torch. *Waits for* that process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click

from pipeline.cli.common import PATH, json_option, run_argument
from pipeline.operator.attached import find_run
from protocol import headrace
from protocol.errors import ConfigError

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
