"""Guided columns of the table's responses, and judgments that are wrong on purpose.

Columns are of the start model, of the model as it learns, or of the verifier's own index."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from ops.demo.guided import Fault
from ops.demo.guided_responses import GuidedSample
from pipeline.config.schema import RunConfig
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.data.tokenizer import load_text_tokenizer
from protocol.trajectory import Guidance, GuidanceScore, Prompt
from workers.engines.model.loading import load_model
from workers.engines.scoring.torch import TorchScoring
from workers.scorers.guided_passes import GuidedPasses, guided_scores

_MICRO_BATCH_TOKENS = 4096
_SURELY_NOT = -12.0
"""Log-prob under the standard prompt of the token that the verifier points at: no chance at all."""


class Guide(Protocol):
    """Makes guided columns."""

    num_tokens: int
    """Read for them so far, prompts too."""

    def scores(
        self, samples: Sequence[GuidedSample], responses: Sequence[np.ndarray]
    ) -> Sequence[GuidanceScore | None]:
        """Return the columns of responses, int32 [tokens] each, in order."""
        ...


class NoGuide:
    """No guidance at all."""

    num_tokens = 0

    def scores(self, samples: Sequence[GuidedSample], responses: Sequence[np.ndarray]) -> list[None]:
        """Return None for each."""
        return [None] * len(samples)


class OracleGuide:
    """Points at the first wrong digit, and at nothing else: the verifier's index."""

    num_tokens = 0

    def scores(self, samples: Sequence[GuidedSample], responses: Sequence[np.ndarray]) -> list[GuidanceScore]:
        """Return columns in which that digit alone stands out."""
        made: list[GuidanceScore] = []
        for sample, response in zip(samples, responses, strict=True):
            standard = np.zeros(response.size, np.float32)
            if (place := place_of_error(sample)) is not None:
                standard[place] = _SURELY_NOT
            judge = np.zeros(response.size if place is not None else 0, np.float32)
            made.append(GuidanceScore(standard_logprobs=standard, judge_logprobs=judge, guide_version="verifier"))
        return made


class ModelGuide:
    """Reads responses after both prompts: each once by the start model, or anew by the policy as it
    is."""

    def __init__(self, config: RunConfig, live: Callable[[], Mapping[str, torch.Tensor]] | None = None) -> None:
        """``live``: returns the present policy; None: the start model reads."""
        self._passes = GuidedPasses(GuidedPrompts(load_text_tokenizer(config.model.path), config.guidance), None)
        self._model = load_model(config.model.path, torch.float32, torch.device("cpu"))
        self._engine = TorchScoring(self._model, temperature=1.0, micro_batch_tokens=_MICRO_BATCH_TOKENS)
        self._live = live
        self._kept: dict[GuidedSample, GuidanceScore] = {}
        self.num_tokens = 0

    def scores(self, samples: Sequence[GuidedSample], responses: Sequence[np.ndarray]) -> list[GuidanceScore]:
        """Return the log-probs after both prompts."""
        if self._live is not None:
            self._model.load_state_dict(dict(self._live()))
            return self._read(samples, responses)
        new = [pair for pair in zip(samples, responses, strict=True) if pair[0] not in self._kept]
        if new:
            asked, read = zip(*new, strict=True)
            self._kept |= dict(zip(asked, self._read(asked, read), strict=True))
        return [self._kept[sample] for sample in samples]

    def _read(self, samples: Sequence[GuidedSample], responses: Sequence[np.ndarray]) -> list[GuidanceScore]:
        plans = [
            self._passes.plan(
                prompt_of(sample), response, Guidance(gold_text=sample.problem.answer, judge_text=sample.judgment)
            )
            for sample, response in zip(samples, responses, strict=True)
        ]
        self.num_tokens += sum(plan.num_tokens for plan in plans)
        return guided_scores(self._passes, self._engine, plans)


def place_of_error(sample: GuidedSample) -> int | None:
    """Return the token of a wrong response that the verifier calls its first error, if there is
    one: a token is a character."""
    fault = None if sample.is_right else sample.fault
    return None if fault is None else 2 * fault.step - 1


def is_lucky(sample: GuidedSample) -> bool:
    """Return whether the answer is right and the working is not: the verifier reads the answer."""
    return sample.is_right and sample.fault is not None


def misjudge(samples: Sequence[GuidedSample], share: float, seed: int) -> list[GuidedSample]:
    """Let the judge be wrong about a share of the wrong responses: it calls another step wrong,
    and quotes what stands there."""
    dice = random.Random(f"misjudge:{seed}")
    judged = [number for number, sample in enumerate(samples) if sample.judgment]
    # the same order for every share: who is misjudged at 10 % is so at 30 %
    dice.shuffle(judged)
    made = list(samples)
    for number in judged[: round(share * len(judged))]:
        made[number] = _misjudged(samples[number], dice)
    return made


def _misjudged(sample: GuidedSample, dice: random.Random) -> GuidedSample:
    fault = sample.fault
    assert fault is not None
    step = dice.choice([number for number in range(1, sample.problem.num_terms + 1) if number != fault.step])
    quoted = int(sample.text[2 * step - 1])
    other = Fault(step, quoted, (quoted + dice.randint(1, 9)) % 10)
    return replace(sample, judgment=other.judgment)


def prompt_of(sample: GuidedSample, tokens: Sequence[int] = ()) -> Prompt:
    """Return the bare prompt with these tokens."""
    problem, ids = sample.problem, np.array(tokens, np.int32)
    return Prompt(
        prompt_id=problem.prompt, tokens=ids, text=problem.prompt, answer=problem.answer, verifier="arithmetic"
    )
