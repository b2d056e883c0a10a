"""The tokens that end a response, and a response's text without them.

End tokens come from the tokenizer, the model's settings and the chat template together: a base
model's tokenizer names ``<|endoftext|>``, its chat template ends a turn with ``<|im_end|>``, and
``generation_config.json`` names either or both. A model may write any of them, so each ends a
response, in every engine.

Special tokens such as ``<think>`` are content that a format reward looks for. So is a token of
``generation.stop_token_ids`` that the model does not name as an end (``</answer>``), like a stop
string."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.data.tokenizer import TextTokenizer
from protocol.errors import ConfigError, DataError


def end_tokens(folder: Path, tokenizer: TextTokenizer, configured: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the sorted ids that end a response of the model in ``folder``; empty if only the
    length limit does.

    ``configured`` is ``generation.stop_token_ids``. Raises ConfigError if one is outside the
    model's vocabulary, DataError if one in the model's own files is."""
    config = _read(folder / "config.json")
    inner = config.get("text_config")
    text: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    size = text.get("vocab_size")
    vocabulary = size if isinstance(size, int) else tokenizer.num_tokens
    settings = _read(folder / "generation_config.json")
    named = {
        "generation_config.json": _ids(settings.get("eos_token_id")),
        "config.json": _ids(text.get("eos_token_id")),
        "the tokenizer": _ids(tokenizer.eos_token_id),
        "the chat template": _ids(tokenizer.turn_end_id),
    }
    for token in configured:
        if not 0 <= token < vocabulary:
            raise ConfigError(
                f"generation.stop_token_ids has {token}; expected ids from 0 to {vocabulary - 1}, the model's vocabulary: "
                "correct it"
            )
    for source, ids in named.items():
        if beyond := [token for token in ids if not 0 <= token < vocabulary]:
            raise DataError(
                f"{folder}: {source} names the end token {beyond[0]}; expected ids from 0 to {vocabulary - 1}, the model's "
                "vocabulary: correct eos_token_id there"
            )
    return tuple(sorted({*configured, *(token for ids in named.values() for token in ids)}))


def _ids(named: Any) -> list[int]:
    """Normalise one id, a list of ids, or None to a list."""
    return [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object; {} if the file does not exist."""
    try:
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}; download the model again") from error
    return read if isinstance(read, dict) else {}


@lru_cache(maxsize=8)
def model_ends(folder: Path, tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids that the model itself ends a response with, without the configured ones.
    Raises like ``end_tokens``."""
    return frozenset(end_tokens(folder, tokenizer))


def response_texts(tokens: Sequence[int], tokenizer: TextTokenizer, ends: Collection[int]) -> tuple[str, str]:
    """Return a response's text without special tokens, and with them. An end token of ``ends`` at
    its end is left out of both."""
    body = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    text = tokenizer.decode(body)
    return text, text if tokenizer.is_plain(body) else tokenizer.decode(body, skip_special_tokens=False)
