"""Judgments that the data has already, in the column ``judgment`` of a line."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.verifier import Response

COLUMN = "judgment"


def judgments(responses: Sequence[Response]) -> list[str | None]:
    """Return each line's judgment; None where it has none."""
    return [text if isinstance(text := response.extra.get(COLUMN), str) else None for response in responses]
