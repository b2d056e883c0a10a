"""Pass rates by prompt, as a file to train on: one line a prompt, with its difficulty."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.rewards.verifier import Response
from protocol.errors import DataError


class PassRates:
    """Counts the right responses of each prompt. Its memory grows with the prompts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    def add(self, response: Response, accuracy: float) -> None:
        """Count a response that was judged; one without its prompt is left out."""
        if response.prompt_text.strip():
            key = (response.prompt_text, response.answer, response.verifier)
            right, judged = self._counts.get(key, (0, 0))
            self._counts[key] = (right + (accuracy == 1.0), judged + 1)

    def write(self, path: Path) -> None:
        """Write a JSON line for each prompt, in the order of their first responses. Raises
        DataError when no response had a prompt."""
        if not self._counts:
            raise DataError("no judged line has a `prompt`, so there are no pass rates; add that column")
        with path.open("wb") as file:
            for (prompt, answer, verifier), (right, judged) in self._counts.items():
                rate = right / judged
                line = {"prompt": prompt, "answer": answer, "verifier": verifier, "pass_rate": rate}
                file.write(msgspec.json.encode(line | {"difficulty": 1.0 - rate, "num_judged": judged}) + b"\n")
