"""The texts of a response: as verifiers of answers read it, and as it was written.

Special tokens such as ``<think>`` are content: a reward for the form looks for them. The token that
ended the response is not, whichever of the model's end tokens it is, and whether or not its
tokenizer calls it special. A token of ``generation.stop_token_ids`` that the model does not name
(``</answer>``) is content too, as a stop string is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import TextTokenizer


@lru_cache(maxsize=8)
def model_ends(folder: Path, tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids by which the folder's model ends a response, without those of the
    configuration. Raises as ``end_tokens`` does."""
    return frozenset(end_tokens(folder, tokenizer))


def response_texts(tokens: Sequence[int], tokenizer: TextTokenizer, ends: Collection[int]) -> tuple[str, str]:
    """Return a response's text without special tokens, and with them; neither has the end token, of
    ``ends``, that ended it."""
    body = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    text = tokenizer.decode(body)
    return text, text if tokenizer.is_plain(body) else tokenizer.decode(body, skip_special_tokens=False)
