"""Where a simulation's costs and responses come from: files, a run, or the engine itself."""

from __future__ import annotations

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
from protocol.errors import ConfigError
from protocol.ids import TrajectoryId

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_PRIME = 1_000_003
_MEMBERS = 65_537


def costs_and_responses(config: RunConfig, given: Path | None, lengths: Path | None) -> tuple[Costs, Responses]:
    """Return what a run's work costs and what its responses are like. Raises ConfigError.

    ``given`` is a file of costs or a run's folder; ``lengths`` a file with a number a line, or a run's folder. An engine of
    the user's own may know both: its module then has ``SIMULATED``, the import path of a function of the configuration
    that returns them."""
    own = _of_own_engine(config)
    prompt_tokens = 0.0
    if given is None:
        if own is None:
            raise ConfigError(
                f"the costs of generation.engine {config.generation.engine} are not known: measure them with `headrace profile "
                "RUN` and give the run, or a file: --costs RUN or --costs FILE"
            )
        costs, _ = own
    elif given.is_dir():
        profile = profile_run(given)
        costs, prompt_tokens, lengths = profile.costs, profile.prompt_tokens, lengths or given
    else:
        costs = read_costs(given)
    if lengths is None and own is not None:
        return costs, own[1]
    most = config.generation.max_response_tokens
    if lengths is None:
        words = f"all of generation.max_response_tokens, {most}: give --lengths for others"
        return costs, Responses(lambda _: most, prompt_tokens=prompt_tokens, words=words)
    draw = _run_lengths(lengths) if lengths.is_dir() else _file_lengths(lengths)
    seed = config.run.seed

    def length(name: TrajectoryId) -> int:
        return draw(random.Random((seed * _PRIME + name.group) * _MEMBERS + name.member))

    return costs, Responses(length, prompt_tokens=prompt_tokens, words=f"as in {lengths}")


def _of_own_engine(config: RunConfig) -> tuple[Costs, Responses] | None:
    engine = config.generation.engine
    if not is_import_path(engine):
        return None
    import_own("generation.engine", engine)
    path = getattr(sys.modules[engine.partition(":")[0]], "SIMULATED", None)
    return None if path is None else import_own("SIMULATED", path)(config)


def _file_lengths(path: Path) -> Callable[[random.Random], int]:
    try:
        numbers = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; expected a file with a response's tokens on each line"
        ) from error
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{path} has {len(numbers)} lengths, the least {min(numbers, default=0)}; expected 1 or more each"
        )
    return lambda stream: stream.choice(numbers)


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
