"""The text of each token of a response, so that tokens can be coloured one by one.

The model's own tokenizer decodes them. It is read once a model folder, when answers are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from protocol.errors import DataError

_UNFINISHED = "\ufffd"


class TokenText:
    """Decodes the tokens of one run's model."""

    def __init__(self, model: Path) -> None:
        """``model``: its folder."""
        self._model = model

    def pieces(self, ids: Sequence[int], cuts: Sequence[tuple[int, int]]) -> list[str]:
        """Return a text for each token. The texts of a character's tokens are empty but for the
        last one's. Raises DataError without a tokenizer."""
        tokenizer = _tokenizer(self._model)

        def decode(some: Sequence[int]) -> str:
            return tokenizer.decode(some, skip_special_tokens=False)

        places = [0, *(place for place, _ in cuts if 0 < place < len(ids)), len(ids)]
        found: list[str] = []
        for begin, end in pairwise(places):
            found += split_text(decode, ids[begin:end])
        return found


def split_text(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. A token's text can depend on the token before it, so
    each is decoded together with the last one that ended a character."""
    found: list[str] = []
    context = done = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[context:done]), decode(ids[context:end])
        if now.endswith(_UNFINISHED) and end < len(ids):
            found.append("")
            continue
        found.append(now[len(before) :])
        context, done = done, end
    return found


@lru_cache(maxsize=4)
def _tokenizer(model: Path) -> TextTokenizer:
    try:
        return load_text_tokenizer(model)
    except DataError as error:
        raise DataError(f"tokens are not shown one by one: {error}") from error
