"""What one update asks of a fleet: responses and their lengths, and which roles see them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated

import msgspec
from msgspec.structs import replace

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Unit
from protocol.errors import ConfigError

_Positive = Annotated[float, msgspec.Meta(gt=0.0)]


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of lengths, in tokens; what it leaves out follows from the run file."""

    prompt_tokens: _Positive | None = None
    """Mean."""
    response_tokens: _Positive | None = None
    """Mean. By default half of the longest allowed."""
    variation: Annotated[float, msgspec.Meta(ge=0.0)] = 0.6
    """Standard deviation of response lengths over their mean."""
    trained_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    """Of the generated tokens. By default half with dynamic sampling, else all."""
    chunks: Annotated[float, msgspec.Meta(ge=1.0)] | None = None
    """Mean chunks of a response. By default its mean length in windows, and half of one."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Of one update."""

    responses: int
    """That are trained."""
    prompt_tokens: float
    response_tokens: float
    variation: float
    longest: int
    """Response, in tokens."""
    trained_share: float
    steps: int
    """Optimiser steps."""
    group_size: int
    has_reference: bool
    has_critic: bool
    has_old_logprobs: bool
    """A forward pass before the first step."""
    most_stale: int
    """Updates that sampling may be ahead."""
    window: int
    """Tokens of a chunk, at most."""
    chunks_each: float
    """Mean chunks of a response."""
    may_widen: bool
    """Whether windows are only how responses travel: neither what is trained nor what a critic's values are of."""

    def widened(self) -> Workload:
        """Return the same with windows twice as long."""
        window = min(2 * self.window, self.longest)
        # the last one is cut short, however long they are
        more = (self.chunks_each - 1.0) * self.window / window
        return replace(self, window=window, chunks_each=1.0 + more)

    @property
    def chunks(self) -> float:
        """Of an update's generated responses."""
        return self.generated * self.chunks_each

    @property
    def scored_tokens(self) -> float:
        """Tokens that a scorer reads of these: each chunk with all that is before it."""
        mean = self.prompt_tokens + self.response_tokens / 2.0 + min(self.window, self.response_tokens) / 2.0
        return self.chunks * mean

    @property
    def generated(self) -> float:
        """Responses that are sampled for an update."""
        return self.responses / self.trained_share

    @property
    def tokens(self) -> float:
        """Prompt and response tokens that are trained."""
        return self.responses * (self.prompt_tokens + self.response_tokens)

    @property
    def longest_expected(self) -> float:
        """Length of an update's longest response, if lengths are log-normal and none is above the limit."""
        variance = math.log(1.0 + self.variation**2)
        far = math.sqrt(2.0 * math.log(max(2.0, self.generated)))
        return min(self.longest, self.response_tokens * math.exp(far * math.sqrt(variance) - variance / 2.0))

    @property
    def mean_context(self) -> float:
        """Of a decode step's sequence: long responses are decoded for longer."""
        return self.prompt_tokens + self.response_tokens * (1.0 + self.variation**2) / 2.0


def read_lengths(path: Path) -> Lengths | list[int]:
    """Read a file of lengths: TOML, or the tokens of a response on each line. Raises ConfigError for a file that is
    missing or wrong."""
    names = ", ".join(Lengths.__struct_fields__)
    try:
        text = path.read_text(encoding="utf-8")
        if "=" in text:
            return msgspec.convert(tomllib.loads(text), Lengths)
        numbers = [int(word) for word in text.split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no file of lengths: {error}; expected TOML with some of {names}, or a response's tokens on each line"
        ) from error
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{path} has {len(numbers)} lengths, the least {min(numbers, default=0)}; expected 1 or more each"
        )
    return numbers


def lengths_of(numbers: Sequence[int]) -> Lengths:
    """Return the mean and the variation of measured lengths."""
    mean = fmean(numbers)
    return Lengths(response_tokens=mean, variation=pstdev(numbers) / mean)


def workload(config: RunConfig, lengths: Lengths) -> Workload:
    """Return what an update of a run asks for. Raises ConfigError for a mean response above the longest."""
    algorithm, longest = config.algorithm, config.generation.max_response_tokens
    mean = lengths.response_tokens or longest / 2
    if mean > longest:
        raise ConfigError(
            f"response_tokens is {mean:g}, above generation.max_response_tokens {longest}; expected a mean length below it"
        )
    proximal = getattr(algorithm, "proximal", "")
    return Workload(
        responses=algorithm.groups_per_update * algorithm.group_size,
        prompt_tokens=lengths.prompt_tokens or config.data.max_prompt_tokens / 2,
        response_tokens=mean,
        variation=lengths.variation,
        longest=longest,
        trained_share=lengths.trained_share or (0.5 if algorithm.dynamic_sampling else 1.0),
        steps=algorithm.num_minibatches,
        group_size=algorithm.group_size,
        has_reference=config.has_reference,
        has_critic=config.has_critic,
        has_old_logprobs=algorithm.num_minibatches > 1 and proximal == "recompute",
        most_stale=config.staleness.eta,
        window=config.generation.window_tokens,
        may_widen=config.declaration.unit is not Unit.CHUNK and not config.has_critic,
        chunks_each=lengths.chunks or max(1.0, mean / config.generation.window_tokens + 0.5),
    )
