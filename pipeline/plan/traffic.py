"""What the ranks of a learner send one another, counted in the programs of their split.

A program has one layer, the embedding and the head with their real sizes, and one token a micro-batch on each share of
the batch. It is made by the three phases of ``pipeline.plan.programs`` and checked: a split whose program is wrong is an
error, so it is never planned. What two micro-batches send more than one is for each, the rest for each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from pipeline.plan.decoder import OF_HEADS, OF_INNER, decoder
from pipeline.plan.devices import PER_HOST
from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.programs.check import check_program
from pipeline.plan.programs.operators import Model
from pipeline.plan.programs.placing import Placed, Stage, place
from pipeline.plan.programs.preserve import Zero, preserve
from pipeline.plan.programs.split import Split, transform
from pipeline.plan.transformer import Transformer
from pipeline.schedule.baselines import known_orders
from pipeline.schedule.blocks import Block, chain
from pipeline.schedule.shapes import shape
from protocol.errors import ConfigError

_MOST_RANKS: Final = PER_HOST
"""Of a program. More shares of a batch do the same in larger groups."""
_STAGES: Final = 3
"""Of a program: the first, one between, and the last."""
_ALONE: Final = chain("one", 1, (Block("f0", 1, 1), Block("b0", 1, -1)))
What = Literal["weights", "gradients", "states", "state gradients"]


class RankGrid(NamedTuple):
    """How a learner is split over ranks."""

    shares: int = 1
    """Of the batch."""
    tensor: int = 1
    """Ranks that share each layer of a share."""
    zero: Zero = 0
    """Stage of ZeRO by which the shares store parameters."""
    stages: int = 1
    """Of a pipeline."""


class Flow(NamedTuple):
    """Numbers that a rank sends by one kind of collective; of unequal ranks the most that one sends."""

    kind: Kind
    ranks: int
    """Of a group; 2 for a send."""
    what: What
    per_step: float
    per_pass: float
    """For each micro-batch."""
    per_token: float
    """Of its share of a micro-batch."""

    @property
    def of_states(self) -> bool:
        return self.what in ("states", "state gradients")


_Key = tuple[Kind, int, What, bool]
"""Kind, ranks of a group, what moves, and whether it belongs to a layer."""


@lru_cache(maxsize=1024)
def flows(model: Transformer, grid: RankGrid, recomputed: int = 0) -> tuple[Flow, ...]:
    """Return what a rank sends; ``recomputed``: layers. Raises ConfigError if the split's program is not right."""
    shares = min(grid.shares, max(2, _MOST_RANKS // grid.tensor))
    small = grid._replace(shares=shares, stages=min(grid.stages, _STAGES))
    one, two = (_counted(model, small, number) for number in (1, 2))
    # with whole layers nothing moves while they are computed
    again = _counted(model, small, 1, recompute=True) if recomputed and grid.tensor > 1 else one
    per_pass, per_step = defaultdict[_Key, float](float), defaultdict[_Key, float](float)
    for kind, ranks, what, is_layer in one.keys() | two.keys() | again.keys():
        key = kind, ranks, what, is_layer
        layers = model.layers if is_layer and grid.stages == 1 else 1
        grown, many = 1.0, ranks
        if grid.shares > shares and ranks % shares == 0 and ranks != grid.tensor:
            many = ranks * grid.shares // shares
            grown = (1 - 1 / many) / (1 - 1 / ranks)
        of_one, of_two, of_again = (counts.get(key, 0.0) for counts in (one, two, again))
        more = recomputed * (of_again - of_one) if is_layer else 0.0
        total = kind, many, what, False
        per_pass[total] += grown * (layers * (of_two - of_one) + more)
        per_step[total] += grown * layers * (2 * of_one - of_two)
    found = list[Flow]()
    for (kind, ranks, what, _), of_pass in sorted(per_pass.items()):
        one = Flow(kind, ranks, what, per_step[kind, ranks, what, False], of_pass, 0.0)
        found.append(one._replace(per_pass=0.0, per_token=of_pass) if one.of_states else one)
    return tuple(found)


@lru_cache(maxsize=4096)
def _counted(
    model: Transformer, grid: RankGrid, micro_batches: int, *, recompute: bool = False
) -> Mapping[_Key, float]:
    """Return the most numbers that one rank sends."""
    operators = decoder(model, grid.shares, layers=grid.stages, parts=grid.shares * grid.tensor)
    placed = _placed(operators, grid, micro_batches, recompute=recompute)
    try:
        moved = check_program(operators, preserve(placed, grid.zero))
    except ConfigError as error:
        raise ConfigError(f"the program of {grid} is refused, so it cannot be planned: {error}") from error
    sent = dict[_Key, dict[int, float]]()
    for one in moved:
        if one.tensor == operators.loss:
            continue
        kinds: tuple[What, What] = ("states", "state gradients") if one.micro_batch >= 0 else ("weights", "gradients")
        what = kinds[one.is_gradient]
        ranks = sent.setdefault((one.kind, len(one.devices), what, one.tensor[0].isdigit()), {})
        for rank in one.devices[:1] if one.kind is Kind.MOVE else one.devices:
            ranks[rank] = ranks.get(rank, 0.0) + one.sent
    return {key: max(ranks.values()) for key, ranks in sent.items()}


def _placed(model: Model, grid: RankGrid, micro_batches: int, *, recompute: bool) -> Placed:
    """Transform and place: the ranks of a share are neighbours, each stage has as many."""
    shares, tensor = grid.shares, grid.tensor
    splits = dict[str, Split]()
    for name in model.by_name:
        kind = name.partition(".")[2]
        dimension = "g" if kind in OF_HEADS else "f" if kind in OF_INNER else None
        cut = {} if dimension is None else {dimension: tensor}
        splits[name] = Split({**cut, "b": shares}, copies=1 if cut else tensor)
    ranks = tuple(share * tensor + rank for rank in range(tensor) for share in range(shares))
    placement = _ALONE if grid.stages == 1 else shape("V", grid.stages)
    stages = dict[str, Stage]()
    for stage in range(grid.stages):
        own = tuple(name for name in model.by_name if _stage_of(name, grid.stages) == stage)
        stages[f"f{stage}"] = Stage(own, tuple(stage * len(ranks) + rank for rank in ranks), recompute)
    orders = known_orders(placement)["GPipe"](micro_batches)
    return place(model, transform(model, splits), stages, placement, orders)


def _stage_of(name: str, stages: int) -> int:
    layer = name.partition(".")[0]
    return int(layer) if layer.isdigit() else 0 if name == "embed" else stages - 1
