"""Judgments by plain arithmetic: the first step of a chain, or the first equation, that is wrong.

Where a prompt is a chain of a one-digit counter, its response is read as one (``counter_chain``);
else the response's equations are (``equations``). A response whose steps all hold has no judgment:
its answer is wrong, but no step of it is, as where a task was misread."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.judgments import counter_chain, equations
from pipeline.rewards.verifier import Response


def judgments(responses: Sequence[Response]) -> list[str | None]:
    """Return what is wrong with each response: ``step 3 says 13, should be 12``; None where no step
    is."""
    return [_judgment(response) for response in responses]


def _judgment(response: Response) -> str | None:
    terms = counter_chain.chain_of(response.prompt_text)
    if terms:
        wrong = counter_chain.first_wrong_step(terms, response.response_text)
    else:
        wrong = equations.first_wrong_step(equations.equations(response.response_text))
    return None if wrong is None else wrong.judgment
