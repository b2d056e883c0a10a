"""Where a simulation's costs and responses come from: files, a run, or the engine itself."""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.import_path import import_own, is_import_path
from pipeline.observability.history import HISTORY_NAME, Histogram, UpdateRow, run_history
from pipeline.plan.costs import Costs, read_costs
from pipeline.plan.profile import profile_run
from pipeline.plan.simulate.run import Responses
from pipeline.plan.workload import Lengths, read_lengths
from protocol.errors import ConfigError
from protocol.ids import TrajectoryId

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_PRIME = 1_000_003
_MEMBERS = 65_537


def costs_and_responses(config: RunConfig, given: Path | None, lengths: Path | None) -> tuple[Costs, Responses]:
    """Return what a run's work costs and what its responses are like. Raises ConfigError.

    ``given`` is a file of costs or a run's folder; ``lengths`` a file of lengths, as `headrace plan` reads it, or a run's
    folder. An engine of the user's own may know both: its module then has ``SIMULATED``, the import path of a function of
    the configuration that returns them."""
    own = _of_own_engine(config)
    known = Lengths()
    if given is None:
        if own is None:
            raise ConfigError(
                f"the costs of generation.engine {config.generation.engine} are not known: measure them with `headrace profile "
                "RUN` and give the run, or a file: --costs RUN or --costs FILE"
            )
        costs, _ = own
    elif given.is_dir():
        profile = profile_run(given)
        costs, known, lengths = profile.costs, profile.lengths, lengths or given
    else:
        costs = read_costs(given)
    if lengths is None and own is not None:
        return costs, own[1]
    most, seed = config.generation.max_response_tokens, config.run.seed
    draw, words = (lambda _: most), f"all of generation.max_response_tokens, {most}: give --lengths for others"
    if lengths is not None:
        words = f"as in {lengths}"
        if lengths.is_dir():
            draw = _run_lengths(lengths)
        else:
            told = read_lengths(lengths)
            draw = _log_normal(told, most) if isinstance(told, Lengths) else _chosen(told)
            known = told if isinstance(told, Lengths) else known

    def stream(group: int, member: int) -> random.Random:
        return random.Random((seed * _PRIME + group) * _MEMBERS + member)

    # a share of the groups has signal
    share = (known.trained_share or 1.0) if config.algorithm.dynamic_sampling else 1.0

    def accuracy(name: TrajectoryId) -> float:
        is_mixed = share >= 1.0 or stream(name.group, _MEMBERS - 1).random() < share
        return float(name.member % 2) if is_mixed else 1.0

    if share < 1.0:
        words += f", {share:.0%} of the groups with signal"
    prompt_tokens = known.prompt_tokens or config.data.max_prompt_tokens / 2
    words += f", after prompts of {prompt_tokens:.0f}"
    found = Responses(
        lambda name: draw(stream(name.group, name.member)), accuracy, prompt_tokens=prompt_tokens, words=words
    )
    return costs, found


def _log_normal(told: Lengths, most: int) -> Callable[[random.Random], int]:
    mean, variance = told.response_tokens or most / 2, math.log1p(told.variation**2)
    return lambda stream: max(1, round(mean * math.exp(stream.gauss(0.0, math.sqrt(variance)) - variance / 2)))


def _chosen(numbers: Sequence[int]) -> Callable[[random.Random], int]:
    return lambda stream: stream.choice(numbers)


def _of_own_engine(config: RunConfig) -> tuple[Costs, Responses] | None:
    engine = config.generation.engine
    if not is_import_path(engine):
        return None
    import_own("generation.engine", engine)
    path = getattr(sys.modules[engine.partition(":")[0]], "SIMULATED", None)
    return None if path is None else import_own("SIMULATED", path)(config)


def _run_lengths(run_dir: Path) -> Callable[[random.Random], int]:
    rows, _ = run_history(run_dir / HISTORY_NAME).read()
    found = [row.histograms["length"] for row in rows if isinstance(row, UpdateRow) and "length" in row.histograms]
    bins = [(low, wide, count) for one in found for low, wide, count in _bins(one) if count]
    if not bins:
        raise ConfigError(f"{run_dir} has no lengths of responses in its history; expected a run with updates")
    sums: Sequence[int] = list(accumulate(count for *_, count in bins))

    def draw(stream: random.Random) -> int:
        low, wide, _ = bins[bisect(sums, stream.randrange(sums[-1]))]
        return max(1, round(low + wide * stream.random()))

    return draw


def _bins(histogram: Histogram) -> list[tuple[float, float, int]]:
    wide = (histogram.high - histogram.low) / max(1, len(histogram.counts))
    return [(histogram.low + place * wide, wide, count) for place, count in enumerate(histogram.counts)]
