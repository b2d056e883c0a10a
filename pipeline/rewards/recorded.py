"""The verifier ``recorded``: takes a response's verdict and judgment from its line of a response file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome

VERDICT: Final = "verdict"
"""Key of the verdict in a prompt's ``extra``."""
FORMS: Final = "true or false, 1 or 0, right or wrong"
_TEXTS: Final = {
    "right": True, "wrong": False, "correct": True, "incorrect": False, "true": True, "false": False, "1": True, "0": False,
}  # fmt: skip


def verdict_of(value: object) -> bool | None:
    """Return whether a written verdict means right; None if it is not a verdict."""
    if isinstance(value, str):
        return _TEXTS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def verify(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    """Return each response's recorded verdict. A line without one is a failure, never wrong."""
    return [_recorded(response) for response in responses]


def _recorded(response: Response) -> VerifierOutcome:
    value = response.extra.get(VERDICT)
    is_right = verdict_of(value)
    if is_right is None:
        error = f"the verdict is {value!r:.80}; expected {FORMS} in the column {VERDICT} of the response"
        return VerifierFailure(kind=VerifierFailureKind.BAD_ANSWER, error=error)
    return Verdict(accuracy=float(is_right), reason=f"recorded as {'right' if is_right else 'wrong'}")


COLUMN = "judgment"

_NONE = VerifierFailure(kind=VerifierFailureKind.NOTHING_FOUND, error=f"the line has no text in its column `{COLUMN}`")


def judgments(responses: Sequence[Response]) -> list[str | VerifierFailure]:
    """Return each line's recorded judgment, or a failure if it has none."""
    texts = (response.extra.get(COLUMN) for response in responses)
    return [text if isinstance(text, str) and text.strip() else _NONE for text in texts]
