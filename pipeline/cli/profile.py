"""``headrace profile``: what a run's work cost, as a file that plans and simulations take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, echo_json, json_option, run_argument

if TYPE_CHECKING:
    from pipeline.plan.profile import Profile

_EPILOG = """\b
Examples:
  headrace profile runs/demo
  headrace profile runs/demo --write costs.toml && headrace plan MODEL --devices 2xCPU --costs costs.toml
"""


@click.command(epilog=_EPILOG)
@run_argument
@click.option("--write", type=PATH, help="Write the costs to this file, in TOML.")
@json_option
def profile(run: Path | None, write: Path | None, as_json: bool) -> None:
    """Measure what each role's work cost in a run: the costs of `headrace plan` and `headrace simulate`.

    Fitted by least squares to what the run has recorded; the run may have ended or go on."""
    from pipeline.operator.attached import find_run
    from pipeline.plan.costs import write_costs
    from pipeline.plan.profile import profile_run

    found = profile_run(find_run(run))
    if write is not None:
        write_costs(found.costs, write)
    if as_json:
        echo_json(found)
    else:
        click.echo("\n".join(_lines(found)))


def _lines(found: Profile) -> list[str]:
    import msgspec

    costs = found.costs
    rows = [["role", "costs in seconds"]]
    for role in ("generator", "learner", "reward", "reference", "value", "environment", "weights"):
        section = getattr(costs, role)
        if section is not None:
            values = {name: value for name, value in msgspec.structs.asdict(section).items() if value}
            rows.append([role, ", ".join(f"{name} {value:.4g}" for name, value in values.items())])
    responses = f"{found.sequences:.4g} responses an update, of {found.response_tokens / found.sequences:.4g} tokens"
    return [
        f"{costs.source}: {found.num_updates} updates of {found.update_s:.3g} s; the learner waited {found.wait_s:.3g} s of it",
        f"{responses} after prompts of {found.prompt_tokens:.4g}",
        "",
        *aligned(rows),
    ]
