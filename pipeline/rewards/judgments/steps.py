"""The first wrong step of a response, as a judgment quotes it."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_QUOTE_CHARS = 200


@dataclass(frozen=True, slots=True)
class WrongStep:
    """A step that does not hold, whatever follows it."""

    number: int
    """Place among the response's steps, from 1."""
    said: str
    """The wrong piece, word for word."""
    should_be: str

    @property
    def judgment(self) -> str:
        """Return the judgment: ``step 3 says 13, should be 12``. The guided pass finds the
        wrong tokens by the quotation."""
        said = " ".join(self.said.split())
        if len(said) > _MAX_QUOTE_CHARS:
            said = said[: _MAX_QUOTE_CHARS - 3] + "..."
        return " ".join((f"step {self.number} says {said},", f"should be {self.should_be}"))
