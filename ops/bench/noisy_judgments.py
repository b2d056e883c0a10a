"""Judgments that are wrong in a known share of cases: they name another step, with a false value.

For benchmarks of guidance by a judge that errs. A run names one by its import path:

    headrace up run.toml --set guidance.judgments=ops.bench.noisy_judgments:three_tenths

The responses are chains of the demo's task, or have equations. Other judgments are those of
``arithmetic``. The choice depends on a seed, the prompt and the response alone, so every worker and
every repeat makes the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from pipeline.rewards.judgments import counter_chain, equations
from pipeline.rewards.judgments.steps import WrongStep
from pipeline.rewards.verifier import Response

SEED = 0
_STEP = re.compile(r"[a-z=]([0-9]+)")


def noisy(share: float, *, seed: int = SEED) -> Callable[[Sequence[Response]], list[str | None]]:
    """Return a function that writes judgments, of which ``share`` name another step."""

    def judgments(responses: Sequence[Response]) -> list[str | None]:
        return [_judgment(response, share, seed) for response in responses]

    return judgments


def _judgment(response: Response, share: float, seed: int) -> str | None:
    terms = counter_chain.chain_of(response.prompt_text)
    if terms:
        wrong = counter_chain.first_wrong_step(terms, response.response_text)
        said = _STEP.findall(response.response_text)
    else:
        found = equations.equations(response.response_text)
        wrong, said = equations.first_wrong_step(found), [equation.quoted for equation in found]
    if wrong is None:
        return None
    rng = random.Random(f"{seed}:{response.prompt_text}:{response.response_text}")
    others = [number for number in range(1, len(said) + 1) if number != wrong.number]
    if not others or rng.random() >= share:
        return wrong.judgment
    number = rng.choice(others)
    step = said[number - 1]
    last = int(re.findall(r"[0-9]+", step)[-1])
    return WrongStep(number, step, str((last + rng.randint(1, 9)) % 10 if terms else last + rng.randint(1, 9))).judgment


tenth = noisy(0.1)
three_tenths = noisy(0.3)
half = noisy(0.5)
