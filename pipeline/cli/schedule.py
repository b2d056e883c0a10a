"""``headrace schedule``: the best order of a pipeline's work, with proofs, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, echo_json, json_option
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.schedule.blocks import Placement
    from pipeline.schedule.iteration import IterationPlan
    from pipeline.schedule.plan import Measured, Plan, Proven

_EPILOG = """\b
Examples:
  headrace schedule V --devices 4 --memory 3
  headrace schedule M --devices 8 --memory 12 --against all --svg m.svg
  headrace schedule V --devices 4 --memory 3 --unroll 3 --json > plan.json
  headrace schedule mine.json --micro-batches 32
  headrace schedule --iteration configs/schedules/iteration.json

\b
A file of your own, here two stages on two devices that hold 20 each:
  {"devices": 2, "memory": 20,
   "blocks": [{"name": "f0", "span": 5, "memory": 8, "devices": [0]},
              {"name": "f1", "span": 6, "memory": 9, "devices": [1]},
              {"name": "b1", "span": 11, "memory": -9, "devices": [1]},
              {"name": "b0", "span": 10, "memory": -8, "devices": [0]}],
   "chains": [["f0", "f1", "b1", "b0"]],
   "dependencies": []}

\b
Shapes, f for forward, b for backward, | for a block of all devices:
  V         f f f b b b                M         | f f f b b b |
  MLLM      | f f f | | b b b |        NN        | f f | f f b b | b b |
  K         two branches, joined       X         two chains, one of them backwards
  NN-eager  NN, decoder's | early      finetune  M with frozen embedding
  3F1B      three forward passes       loop, wave: two stages a device
"""


@click.command(epilog=_EPILOG)
@click.argument("what", metavar="[SHAPE|FILE]", required=False)
@click.option("--devices", type=click.IntRange(1, 256), help="Devices of a shape. A file has its own.")
@click.option("--memory", type=click.IntRange(0), help="What each device can hold. Default: the file's, or no limit.")
@click.option("--micro-batches", "num", type=int, default=16, show_default=True, help="Micro-batches of one step.")
@click.option(
    "--unroll", type=click.IntRange(1, 8), default=1, show_default=True, help="Let up to so many repeat together."
)
@click.option(
    "--backward", type=click.IntRange(2), default=3, show_default=True, help="Span of a backward pass; forward is 1."
)
@click.option(
    "--split-backward",
    is_flag=True,
    help="Gradients for input and weights apart. A stage then holds 2, and each gives back 1.",
)
@click.option("--inference", is_flag=True, help="Forward passes alone.")
@click.option("--against", type=click.Choice(["all"]), help="Measure the known orders, too: 1F1B, GPipe, zero bubble.")
@click.option("--svg", type=PATH, help="Draw it, above the best known order within the memory, to this file.")
@click.option(
    "--time-limit", "time_limit_s", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds."
)
@click.option("--iteration", type=PATH, help="A file of an RL iteration: its period by staleness, and its queues.")
@click.option("--chunks", type=int, help="Chunks of the iteration. Default: the file's.")
@json_option
def schedule(
    what: str | None,
    devices: int | None,
    memory: int | None,
    num: int,
    unroll: int,
    backward: int,
    split_backward: bool,
    inference: bool,
    against: str | None,
    svg: Path | None,
    time_limit_s: float,
    iteration: Path | None,
    chunks: int | None,
    as_json: bool,
) -> None:
    """Find the order of a pipeline's work with the shortest period, and prove it.

    The work is a known SHAPE on --devices, a FILE of your own, or an RL iteration. Times and memory are in any unit,
    the same for all. The period is proven least ("optimal"), or at least a bound ("bounded", when time was short)."""
    from pipeline.schedule.drawing import draw_plan
    from pipeline.schedule.files import limits
    from pipeline.schedule.iteration import NO_LIMIT, plan_iteration
    from pipeline.schedule.plan import make_plan
    from pipeline.schedule.search import search

    if (what is None) == (iteration is None):
        raise click.UsageError("expected a shape, a file or --iteration FILE, and one of them")
    if iteration is None and chunks is not None:
        raise click.UsageError("--chunks is of an iteration; expected --iteration FILE")
    if iteration is not None:
        of_a_pipeline = {"--devices": devices, "--memory": memory, "--against": against, "--svg": svg}
        given = [name for name, value in of_a_pipeline.items() if value is not None]
        if given or split_backward or inference or unroll > 1:
            raise click.UsageError(
                f"--iteration FILE has its own devices and blocks; expected only --chunks, --time-limit and --json, without "
                f"{', '.join(given) or 'options of a pipeline'}"
            )
        plans = plan_iteration(iteration, chunks=chunks, time_limit_s=time_limit_s)
        echo_json(plans) if as_json else click.echo("\n".join(_iteration_lines(plans)))
        return
    assert what is not None
    if num < 1:
        raise ConfigError(f"--micro-batches is {num}; expected 1 or more")
    placement, limit = _work(what, devices, backward, split_backward, inference)
    limit = limit if memory is None else limits(memory, placement.num_devices)
    found = search(
        placement, limit or limits(NO_LIMIT, placement.num_devices), unroll=unroll, time_limit_s=time_limit_s
    )
    plan = make_plan(found, num, limit, against=bool(against or svg))
    if svg is not None:
        try:
            svg.write_text(draw_plan(plan), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{svg} cannot be written: {error.strerror}") from error
    if as_json:
        echo_json(plan)
    else:
        click.echo("\n".join(_lines(plan, unroll, bool(against))))


def _work(
    what: str, devices: int | None, backward: int, split: bool, inference: bool
) -> tuple[Placement, tuple[int, ...] | None]:
    from pipeline.schedule.files import read_placement
    from pipeline.schedule.shapes import Costs, shape

    if what.endswith(".json") or "/" in what:
        if devices or split or inference:
            raise click.UsageError(
                "--devices, --split-backward and --inference are of shapes; a file has its own blocks"
            )
        return read_placement(Path(what))
    costs = Costs(backward=backward, split=split, training=not inference)
    if split:
        costs = Costs(backward=backward, memory=2, weights_memory=1, split=True, training=not inference)
    if devices is None:
        raise click.UsageError(f"--devices is missing: how many devices has shape {what}?")
    return shape(what, devices, costs), None


def _lines(plan: Plan, unroll: int, against: bool) -> list[str]:
    bounds = ", ".join(f"{name} {value}" for name, value in plan.bounds.items())
    limit = "" if plan.memory is None else f", memory {_list(plan.memory)}"
    every = f" ({plan.unroll} micro-batches every {plan.repeats_every})" if plan.unroll > 1 else ""
    most = f"repeat after at most {unroll} micro-batches" if unroll > 1 else "repeat after each micro-batch"
    rows = [["order", "period", "makespan", "bubble", "peak memory by device"], _row(plan.found, plan)]
    if against:
        rows += [_row(each, plan) for each in plan.baselines]
    return [
        f"{plan.placement.name} on {plan.placement.num_devices} devices{limit}, {plan.micro_batches} micro-batches",
        f"  period   {plan.period.value:.4g}{every}, {_proof(plan.period)} among all orders that {most}",
        f"  latency  {plan.latency.value:g}, {_proof(plan.latency)} with this period",
        f"  bounds   of the period: {bounds}; of the makespan: {plan.makespan_bound}",
        f"  search   {plan.seconds:.2f} s, {plan.num_solves} models",
        "",
        *(f"  {line}" for line in aligned(rows)),
    ]


def _row(each: Measured, plan: Plan) -> list[str]:
    peaks = _list(each.peaks)
    if not each.fits:
        peaks += f"  does not fit {_list(plan.memory or ())}"
    return [each.name, f"{each.period:.4g}", str(each.makespan), f"{each.bubble:.1%}", peaks]


def _list(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))


def _proof(number: Proven) -> str:
    return "optimal" if number.proof == "optimal" else f"{number.proof}: at least {number.bound:.4g}"


def _iteration_lines(plans: list[IterationPlan]) -> list[str]:
    rows = [["staleness", "period", "proof", "latency", "bounds: work, recurrence"]]
    rows += [
        [
            str(plan.staleness),
            f"{plan.period.value:.4g}",
            _proof(plan.period),
            f"{plan.latency.value:g}",
            f"{plan.bounds.work}, {plan.bounds.recurrence}",
        ]
        for plan in plans
    ]
    last = plans[-1]
    queues = [["from", "to", "chunks that wait", "iterations under way"]]
    queues += [[each.before, each.after, str(each.chunks), str(each.iterations)] for each in last.queues]
    return [*aligned(rows), "", f"queues at staleness {last.staleness}:", *(f"  {line}" for line in aligned(queues))]
