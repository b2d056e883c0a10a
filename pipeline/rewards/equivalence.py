r"""Symbolic mathematics: the response's final expression must equal the answer, by the math-verify package.

*Consumes* responses. *Produces* verdicts of accuracy 0 or 1. Runs in a sandbox process: simplifying an expression that
a model wrote can take for ever or all memory (``9**9**9**9``), and only killing the process ends that.

The answer is read as LaTeX, ``$`` or ``\boxed`` around it or not. Of a response the last 10,000 characters are read,
``\boxed`` first. A response without any readable expression is wrong; an answer without one is a failure of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pipeline.rewards.verifier import FailureKind, Outcome, Response, Verdict, VerifierFailure

_TAIL_CHARS = 10_000


def warm_up() -> None:
    """Build the parser's tables, so that the first response does not pay for them."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its own time limit is off: ours is outside
    _compare("\\frac{1}{2}", "\\boxed{0.5}")


def verify(responses: Sequence[Response]) -> list[Outcome]:
    """Compare the final expression of each response with its answer."""
    return [_compare(response.answer, response.response_text[-_TAIL_CHARS:]) for response in responses]


def _compare(answer: str, text: str) -> Outcome:
    from math_verify import parse
    from math_verify import verify as is_equal

    gold = _parse_answer(answer)
    if not gold:
        return VerifierFailure(
            kind=FailureKind.BAD_ANSWER,
            error=f"the answer {answer[:80]!r} is not an expression that math-verify can read; mend the data",
        )
    # The package's own limits need SIGALRM and end only pure Python code: they are off, the sandbox is the limit.
    found = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  None is documented
    return Verdict(accuracy=float(is_equal(list(gold), found, timeout_seconds=None)))


@lru_cache(maxsize=1024)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """Parse an answer; the members of a group share it."""
    from math_verify import parse

    bare = answer.strip()
    text = bare if "\\boxed" in bare or "$" in bare else f"\\boxed{{{bare}}}"
    return tuple(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]  None is documented
