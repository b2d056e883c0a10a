"""Checks a value model's start folder by its files alone, without torch."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.preflight.model_folder import tensor_names
from protocol.errors import DataError

HEAD_PREFIXES = ("score.", "classifier.")
"""Names that transformers gives to the head of its token classifiers."""


class ValueSource(StrEnum):
    """The kind of a folder."""

    BACKBONE = "backbone"
    """A causal language model: its layers are used, with a new head that starts at 0."""
    VALUE_MODEL = "value_model"
    """A token classifier with one output: layers and head are used."""


def value_source(path: Path) -> ValueSource:
    """Return the kind of ``path``. Raises DataError: it is neither."""
    config = _json(path / "config.json", f"{path} is not a model: it has no config.json")
    architectures: list[str] = config.get("architectures") or []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return ValueSource.BACKBONE
    advice = (
        "set value.path to a causal language model (its head is new), or a folder from `headrace dev pretrain-value`"
    )
    if not any(name.endswith("ForTokenClassification") for name in architectures):
        what = ", ".join(architectures) or "a model of unnamed architecture"
        raise DataError(f"{path} holds {what}, which is neither a causal language model nor a value model: {advice}")
    # An absent setting means two labels.
    labels: dict[str, str] = config.get("id2label") or {"0": "", "1": ""}
    if len(labels) != 1:
        raise DataError(f"{path} is a token classifier with {len(labels)} outputs, expected 1, the value: {advice}")
    if not any(name.startswith(HEAD_PREFIXES) for name in tensor_names(path)):
        raise DataError(f"{path} names itself {architectures[0]}, but its weights have no head: {advice}")
    return ValueSource.VALUE_MODEL


def _json(file: Path, when_absent: str) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{when_absent}; give a folder in Hugging Face format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; download or make the folder again") from error
