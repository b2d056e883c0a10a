"""The orders that a learner's stages can have: of forward and backward passes that are each on one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.schedule.baselines import Order, known_orders
from pipeline.schedule.blocks import Block, Dependency, Placement, chain
from pipeline.schedule.plan import read_plan
from pipeline.schedule.play import play
from pipeline.schedule.search import search
from pipeline.schedule.shapes import Costs, shape
from pipeline.schedule.timetable import Orders
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    """In ``baselines``."""
    shape: str = "V"
    splits: bool = False


NAMED: Final = {
    "gpipe": _Named("GPipe"),
    "1f1b": _Named("1F1B"),
    "zb-h1": _Named("ZB-H1", splits=True),
    "interleaved": _Named("interleaved 1F1B", "loop"),
    "zb-v": _Named("ZB-V", "wave", splits=True),
    "dualpipev": _Named("DualPipeV", "wave", splits=True),
}
"""By the name that ``learner.pipeline.schedule`` takes."""
_SEARCH_S: Final = 10.0
_PASS: Final = re.compile(r"[fbiw]\d+")


@dataclass(frozen=True)
class StageOrders:
    """Where a model's stages are, and the order of their passes for any number of micro-batches."""

    placement: Placement
    order: Order
    words: str
    """What it is, for a person."""

    @property
    def ranks(self) -> list[int]:
        """The rank of each stage."""
        names = self.placement.by_name
        return [names[f"f{stage}"].devices[0] for stage in range(sum(name.startswith("f") for name in names))]

    @property
    def splits(self) -> bool:
        """Whether gradients for inputs and for weights are computed apart."""
        return "w0" in self.placement.by_name

    def orders(self, num: int) -> Orders:
        """Return the orders of so many micro-batches, or of the next larger number that the schedule can do."""
        most = num + 2 * self.placement.num_devices
        for number in range(num, most):
            try:
                return self.order(number)
            except ConfigError:
                # some need a multiple of the ranks, or twice as many
                continue
        return self.order(most)


def stage_ranks(schedule: str | Path, num_ranks: int, num_stages: int = 0) -> list[int]:
    """Return the rank of each stage without finding an order; a file's stages are taken to be placed as those of search."""
    row = list(range(num_ranks))
    named = NAMED.get(str(schedule))
    placed = named.shape if named is not None else "wave" if num_stages > num_ranks else "V"
    return {"V": row, "loop": [*row, *row], "wave": [*row, *reversed(row)]}[placed]


def stage_orders(
    schedule: str | Path, num_ranks: int, num_stages: int = 0, *, memory: int = 0, recomputes: bool = False
) -> StageOrders:
    """Return the orders of a schedule: a name in :data:`NAMED`, ``search``, or a file with a plan.

    Args:
        schedule: As ``learner.pipeline.schedule``.
        num_ranks: At least 2.
        num_stages: One or two for each rank; 0: as many as the schedule needs.
        memory: For ``search``: micro-batches that a rank may hold in each of its stages. 0: as many as there are ranks.
        recomputes: Whether the backward pass computes the forward pass again.

    Raises ConfigError if the schedule does not exist or does not fit."""
    if schedule == "search":
        each = max(1, num_stages // num_ranks)
        placement = shape("V" if each == 1 else "wave", num_ranks, Costs(backward=3 if recomputes else 2))
        found = search(placement, [(memory or num_ranks) * each] * num_ranks, time_limit_s=_SEARCH_S)
        repetend = found.repetend
        if repetend is None:
            raise ConfigError(f"no order was found in {_SEARCH_S:g} s; set learner.pipeline.schedule to 1f1b")
        words = f"found order, period {found.period} ({found.period_proof})"
        return StageOrders(placement, lambda num: repetend.timetable(num).orders, words)
    if isinstance(schedule, Path):
        made = _planned(schedule, num_ranks)
    else:
        named = NAMED[schedule]
        placement = shape(named.shape, num_ranks, Costs(backward=2, split=named.splits))
        made = StageOrders(placement, known_orders(placement)[named.name], named.name)
    if num_stages not in (0, len(made.ranks)):
        raise ConfigError(
            f"learner.pipeline.schedule {schedule} has {len(made.ranks)} stages on {num_ranks} ranks, but "
            f"learner.pipeline.stages is {num_stages}; leave it out, or set it to {len(made.ranks)}"
        )
    if made.splits and recomputes:
        raise ConfigError(
            f"learner.pipeline.schedule {schedule} splits the backward pass, which would recompute each layer several times; "
            "set model.gradient_checkpointing to false, or the schedule to 1f1b"
        )
    return made


def _planned(path: Path, num_ranks: int) -> StageOrders:
    """Read a plan whose blocks are the passes of stages, each on one rank. Raises ConfigError."""
    if not path.is_file():
        known = f"search, one of {', '.join(NAMED)}, or a file that `headrace schedule --json` wrote"
        raise ConfigError(f"learner.pipeline.schedule is {path.name!r}, and there is no file {path}; expected {known}")
    plan = read_plan(path)
    placement, repetend = plan.placement, plan.repetend
    if placement.num_devices != num_ranks:
        raise ConfigError(
            f"{path} is for {placement.num_devices} devices, but learner.ranks is {num_ranks}; set it to "
            f"{placement.num_devices}, or plan for {num_ranks} with headrace schedule --devices {num_ranks}"
        )
    for block in placement.blocks:
        if not _PASS.fullmatch(block.name) or len(block.devices) > 1:
            raise ConfigError(
                f"{path} has block {block.name!r} on {len(block.devices)} devices, which a learner cannot compute; expected "
                "passes of stages on one device each: f0, b0 or, split, i0 and w0, and so on, as of shapes V, loop and wave"
            )
    of_stages = _chain(placement)
    if of_stages.by_name.keys() != placement.by_name.keys():
        odd = ", ".join(sorted(of_stages.by_name.keys() ^ placement.by_name.keys()))
        raise ConfigError(f"{path}: {odd} are missing or too many; expected the same passes of each stage, from 0 on")

    def order(num: int) -> Orders:
        orders = repetend.timetable(num).orders
        # whatever waits for one another by the file, stages do
        play(of_stages, orders)
        return orders

    order(plan.micro_batches)
    words = f"order of {path.name}, period {plan.period.value:g} ({plan.period.proof})"
    return StageOrders(placement, order, words)


def _chain(placement: Placement) -> Placement:
    """Return the passes of as many stages, with what they wait for. Both passes of a stage are where the forward one is."""
    names = placement.by_name
    stages = range(sum(name.startswith("f") for name in names))
    split = "w0" in names
    row = [f"f{stage}" for stage in stages] + [f"{'i' if split else 'b'}{stage}" for stage in reversed(stages)]
    where = {stage: names[f"f{stage}"].devices for stage in stages if f"f{stage}" in names}
    blocks = {
        name: Block(name, 1, 0, where.get(int(name[1:]), (0,)))
        for name in [*row, *(f"w{stage}" for stage in stages if split)]
    }
    made = chain(placement.name, placement.num_devices, tuple(blocks[name] for name in row))
    waits = tuple(Dependency(f"i{stage}", f"w{stage}") for stage in stages if split)
    return Placement(made.name, made.num_devices, tuple(blocks.values()), made.dependencies + waits)
