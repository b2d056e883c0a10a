"""Judgments that the data has already, in the column ``judgment`` of a line."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.verifier import Response, VerifierFailure, VerifierFailureKind

COLUMN = "judgment"

_NONE = VerifierFailure(kind=VerifierFailureKind.NOTHING_FOUND, error=f"the line has no text in its column `{COLUMN}`")


def judgments(responses: Sequence[Response]) -> list[str | VerifierFailure]:
    """Return each line's judgment, or that it has none."""
    texts = (response.extra.get(COLUMN) for response in responses)
    return [text if isinstance(text, str) and text.strip() else _NONE for text in texts]
