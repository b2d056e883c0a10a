"""Counts of the tokens that the rules flag in the start model's wrong responses, against the
verifier's index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ops.bench.ablation.guided.guides import ModelGuide, misjudge, place_of_error
from ops.bench.ablation.guided.rows import FIRST, PUBLISHED, START
from ops.demo.guided_responses import GuidedSample
from ops.demo.make_tiny_model import EOS
from pipeline.algorithms.guidance import PUBLISHED as CONSTANTS
from pipeline.algorithms.guided_loss import first_places, published_flags, suspicions
from pipeline.config.load import load_config
from pipeline.data.tokenizer import load_text_tokenizer
from workers.engines.build import build_scoring_engine
from workers.engines.scoring.seam import ScoringRequest


@dataclass(frozen=True, slots=True)
class FlagSums:
    """The flags of one rule in one seed's wrong responses, judged by one judge."""

    rule: str
    misjudged: float
    """Share of the responses about which the judge is wrong."""
    seed: int
    num_wrong: int
    """Responses with a first error."""
    num_found: int
    """Of these, those whose first error is flagged."""
    num_flags: int
    """Flagged tokens of them all."""
    num_before: int
    """Of the flagged tokens, those before the first error: right ones."""

    @property
    def recall(self) -> float:
        """Share of first errors that are flagged."""
        return self.num_found / self.num_wrong

    @property
    def precision(self) -> float:
        """Share of flags that are first errors; 1 without a flag."""
        return self.num_found / self.num_flags if self.num_flags else 1.0


def count_flags(samples: Sequence[GuidedSample], shares: Iterable[float], seed: int) -> list[FlagSums]:
    """Count the flags of both rules under the start model's guidance, for each share of wrong
    judgments."""
    config = load_config([START], [])
    guide, engine = ModelGuide(config), build_scoring_engine(config)
    tokenizer = load_text_tokenizer(config.model.path)
    wrong = [sample for sample in samples if place_of_error(sample) is not None]
    tokens = [np.array(tokenizer.encode(sample.text + ("" if sample.is_cut else EOS)), np.int32) for sample in wrong]
    prompts = [np.array(tokenizer.encode(sample.problem.prompt), np.int32) for sample in wrong]
    requests = [ScoringRequest(np.concatenate(pair), pair[1].size) for pair in zip(prompts, tokens, strict=True)]
    base = [torch.from_numpy(found) for found in engine.logprobs(requests)]
    made: list[FlagSums] = []
    for share in shares:
        # misjudged as in the table: of all responses, in their order
        judged = [sample for sample in misjudge(samples, share, seed) if place_of_error(sample) is not None]
        flagged: dict[str, list[np.ndarray]] = {PUBLISHED: [], FIRST: []}
        for policy, score in zip(base, guide.scores(judged, tokens), strict=True):
            standard, judge = torch.from_numpy(score.standard_logprobs), torch.from_numpy(score.judge_logprobs)
            suspected = suspicions(standard, judge, CONSTANTS)
            first = first_places(suspected, torch.zeros(len(standard), dtype=torch.int64), 1)
            flagged[PUBLISHED].append(published_flags(policy, standard, judge, CONSTANTS).numpy())
            flagged[FIRST].append((torch.arange(len(standard)) == first).numpy())
        made += [_sums(rule, share, seed, judged, flags) for rule, flags in flagged.items()]
    return made


def _sums(
    rule: str, share: float, seed: int, samples: Sequence[GuidedSample], flagged: Sequence[np.ndarray]
) -> FlagSums:
    places = [place for sample in samples if (place := place_of_error(sample)) is not None]
    pairs = list(zip(flagged, places, strict=True))
    return FlagSums(
        rule,
        share,
        seed,
        num_wrong=len(places),
        num_found=sum(bool(flags[place]) for flags, place in pairs),
        num_flags=sum(int(flags.sum()) for flags in flagged),
        num_before=sum(int(flags[:place].sum()) for flags, place in pairs),
    )
