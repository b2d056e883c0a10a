"""``headrace simulate``: what a run would do, before it costs anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, echo_json, fleet_option, json_option, set_option
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.plan.simulate.prediction import Prediction
    from pipeline.plan.simulate.run import Responses

_EPILOG = """\b
Examples:
  headrace simulate configs/demo.toml --costs runs/demo
  headrace simulate configs/demo.toml --costs costs.toml --lengths lengths.txt --set staleness.eta=4
  headrace simulate run.toml --fleet fleet.toml --costs costs.toml --set fleet.generator=64 --svg run.svg
  headrace simulate configs/overlap.toml --set 'data.train=["x"]'     emulated engines know their costs
"""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="CONFIG...")
@fleet_option
@set_option
@click.option("--costs", type=PATH, help="File of costs in TOML, or a run's folder, whose costs are then measured.")
@click.option("--lengths", type=PATH, help="File of lengths, as for `headrace plan`, or a run's folder.")
@click.option("--updates", type=click.IntRange(2), help="Updates to simulate. Default: 20, and more with staleness.")
@click.option("--svg", type=PATH, help="Draw slots, learner, queues and staleness to this file.")
@json_option
def simulate(
    files: tuple[Path, ...],
    fleet: Path | None,
    overrides: tuple[str, ...],
    costs: Path | None,
    lengths: Path | None,
    updates: int | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Predict a run: tokens a second, time of an update, use of each role, staleness, queues, what holds it up.

    The run's own rules of admission, staleness and pacing decide in simulated time; only work is replaced by its costs,
    and responses by their lengths. Failures, evaluations and environments of several turns are left out, and that
    processes share cores: there take the costs of a run with as many."""
    from pipeline.config.load import load_config
    from pipeline.plan.simulate.drawing import draw
    from pipeline.plan.simulate.inputs import costs_and_responses
    from pipeline.plan.simulate.run import simulate as run_simulation

    config = load_config([*files, fleet] if fleet else files, overrides, os.environ)
    known, responses = costs_and_responses(config, costs, lengths)
    num_updates = updates or 20 + 2 * config.staleness.eta
    warm_up = min(config.staleness.eta + 3, num_updates // 2)
    found = run_simulation(config, known, responses, num_updates=num_updates, warm_up=warm_up)
    if svg is not None:
        try:
            svg.write_text(draw(found, config.run.name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{svg} cannot be written: {error.strerror}") from error
    if as_json:
        echo_json(found)
    else:
        click.echo("\n".join(_lines(found, known.source, responses)))


def _lines(found: Prediction, source: str, responses: Responses) -> list[str]:
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in sorted(found.staleness.items()))
    waits = ", ".join(f"{role} {depth:.3g}" for role, depth in found.mailboxes.items())
    counted = found.num_updates - found.warm_up
    rows = [
        ["update", f"{found.update_s:.3g} s, of which the learner waits {found.wait_s:.3g} s for units"],
        ["tokens/s", f"{found.tokens_per_s:,.0f} trained, {found.sampled_per_s:,.0f} sampled"],
        ["use", ", ".join(f"{role} {share:.0%}" for role, share in found.use.items())],
        ["staleness", f"{found.staleness_mean:.2f} on average, at most {found.staleness_max} of {found.eta}; {ages}"],
        ["queues", f"{found.ready_mean:.4g} units ready (an update takes {found.needed}); in mailboxes: {waits}"],
    ]
    if found.dropped:
        rows.append(["dropped", ", ".join(f"{number:,} units: {reason}" for reason, number in found.dropped.items())])
    rows += [["held up by", f"{found.bottleneck}; what helps: {found.advice}"]]
    return [
        f"{counted} updates after {found.warm_up} of warm-up, {found.num_generators:,} generators of {found.slots} slots",
        *(f"  {line}" for line in aligned(rows)),
        f"costs: {source}; lengths: {responses.words}",
    ]
