"""Checks that a folder holds a model that workers can load (policy, reward model, value model),
without loading it and without torch.

Only the header of each weight file is read. A safetensors header has each tensor's range, so an
incomplete download is found here, not minutes later in every worker."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from pipeline.weights.digest import Digest, digest_file
from pipeline.weights.tensorfile import Contents, read_head
from protocol.errors import ConfigError, DataError, WeightsDamaged

_SINGLE = "model.safetensors"
_SHARDED = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that types of models give to their number of positions."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the longest sequence in a row."""


def read_model_config(folder: Path, *, with_weights: bool = True) -> dict[str, Any]:
    """Return a model's ``config.json``. Raises DataError if there is no model or it is damaged.
    Without ``with_weights`` the weight files are not checked."""
    if not (folder / "config.json").is_file():
        give = "give a folder in Hugging Face format, or hf://OWNER/NAME for one on the hub"
        raise DataError(f"{folder} is not a model: it has no config.json; {give}")
    config = _read_json(folder / "config.json")
    for file in _weight_files(folder) if with_weights else ():
        if not file.is_file():
            raise DataError(f"{file}: no such file, though the model's index names it; download the model again")
        if file.suffix == ".safetensors":
            _head(file)
    return config


def longest_context(config: dict[str, Any]) -> tuple[int | None, str]:
    """Return the length, in tokens, up to which a sequence's log-probs do not depend on what else
    is in the batch, and the reason in words; None for no limit.

    Some models change the rotary positions of all tokens once a sequence in the batch is longer
    than those in pre-training."""
    text: dict[str, Any] = config.get("text_config") or config
    limit = next((text[name] for name in _LENGTHS if isinstance(text.get(name), int)), None)
    because = f"was made for {limit} positions"
    rotary: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for each in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):
        kind = each.get("rope_type", each.get("type"))
        if kind in _CHANGING:
            original = each.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
            if isinstance(original or limit, int):
                limit = original or limit
                because = f"has rotary positions of kind {kind}, which are the same in every row up to {limit} only"
    return limit, because


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weight files. Raises DataError if there are none."""
    return sum(file.stat().st_size for file in _weight_files(folder))


def model_digest(folder: Path, *, with_weights: bool = True) -> str:
    """Return a digest of a model's ``config.json`` and of all its weights, which are read in full.
    It does not depend on the folder. Raises DataError if there is no model."""
    files = [folder / "config.json", *(_weight_files(folder) if with_weights else ())]
    digest = Digest()
    try:
        for file in files:
            digest.update(f"{file.name} {digest_file(file)}\n".encode())
    except OSError as error:
        raise DataError(
            f"{folder} is not a model that can be read: {error}; give a folder in Hugging Face format"
        ) from error
    return str(digest)


def loading(folder: Path) -> str:
    """Return what a worker reports while it loads a model: name and size of its files."""
    try:
        return f"loading {folder.name}, {weight_bytes(folder) / 1e6:,.0f} MB"
    except (DataError, OSError):
        # loading it reports the fault
        return f"loading {folder.name}"


def tensor_names(folder: Path) -> list[str]:
    """Return the names of a model's tensors. Raises DataError for missing or damaged files."""
    return [tensor.spec.name for file in _weight_files(folder) for tensor in _head(file).tensors]


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name. Raises DataError as ``tensor_names``."""
    return {tensor.spec.name: tensor.spec.shape for file in _weight_files(folder) for tensor in _head(file).tensors}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _SHARDED).is_file():
        shards = cast("dict[str, str]", _read_json(folder / _SHARDED).get("weight_map", {}))
        return [_within(folder, shard) for shard in sorted(set(shards.values()))]
    if any((folder / name).is_file() for name in _PICKLED):
        raise DataError(
            f"{folder} has no weights in safetensors format, only pickled ones, which are not read since reading them may run "
            "code; if you trust the model, save it again with save_pretrained"
        )
    raise DataError(f"{folder} has no weights: neither {_SINGLE} nor {_SHARDED}; download the model again")


def _within(folder: Path, name: str) -> Path:
    """Return the file that an index names. Raises DataError for a file outside the folder."""
    if Path(name).name != name:
        raise DataError(
            f"{folder / _SHARDED} names {name!r}, which is not a file of this folder; download the model again"
        )
    return folder / name


def _head(file: Path) -> Contents:
    try:
        return read_head(file)
    except WeightsDamaged as error:
        raise _damaged(file, str(error)) from None


def _read_json(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(file, f"a JSON {type(value).__name__}, expected an object")
    return cast("dict[str, Any]", value)


def _damaged(file: Path, what: str) -> DataError:
    return DataError(f"{file}: {what}; the model folder is damaged, download or make it again")


_HEADS = ("score.", "classifier.", "classification_head.", "logits_proj.")
"""Prefixes of the heads of transformers' sequence classifiers."""
_NO_LIMIT = 1_000_000_000
"""A larger limit means none: a tokenizer without one has 1e30."""


def check_reward_model(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a sequence classifier with one label. Raises DataError for any
    other folder."""
    config = read_model_config(folder)
    architectures: list[str] = config.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        what = ", ".join(architectures) or "a model of unnamed architecture"
        raise DataError(
            f"{folder} holds {what}, which does not score texts; set reward.model.path to a sequence classifier with one "
            "label (TRL's RewardTrainer saves such a folder)"
        )
    # An absent setting means two labels.
    labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
    if labels != 1:
        raise DataError(f"{folder} is a sequence classifier with {labels} labels; expected 1, the score")
    if config.get("is_encoder_decoder"):
        raise DataError(
            f"{folder} holds {architectures[0]}, an encoder with a decoder, which cannot score texts of several lengths at "
            "once; set reward.model.path to an encoder or a decoder"
        )
    if not any(name.startswith(_HEADS) for name in tensor_names(folder)):
        raise DataError(
            f"{folder} names itself {architectures[0]}, but its weights have no head ({', '.join(_HEADS)}), so scores would "
            "be random: set reward.model.path to a trained reward model"
        )
    return config


def longest_input(folder: Path, config: dict[str, Any], max_tokens: int | None) -> int | None:
    """Return the most tokens that a reward model reads; None for no limit. ``max_tokens``, the
    setting, may exceed the tokenizer's limit. Raises ConfigError if it exceeds the model's
    positions."""
    positions, because = longest_context(config)
    if max_tokens is not None:
        if positions is not None and max_tokens > positions:
            raise ConfigError(f"reward.model.max_tokens is {max_tokens}, but {folder} {because}; lower it")
        return max_tokens
    limits = [limit for limit in (positions, _tokenizer_limit(folder)) if limit is not None]
    return min(limits, default=None)


def _tokenizer_limit(folder: Path) -> int | None:
    file = folder / "tokenizer_config.json"
    try:
        limit = json.loads(file.read_text(encoding="utf-8")).get("model_max_length") if file.is_file() else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; download or make the folder again") from error
    return int(limit) if isinstance(limit, int | float) and limit < _NO_LIMIT else None


HEAD_PREFIXES = ("score.", "classifier.")
"""Prefixes of the heads of transformers' token classifiers."""


class ValueSource(StrEnum):
    """What a folder that a value model starts from holds."""

    BACKBONE = "backbone"
    """A causal language model. Its layers are used, with a new head that starts at 0."""
    VALUE_MODEL = "value_model"
    """A token classifier with one output. Its layers and head are used."""


def value_source(path: Path) -> ValueSource:
    """Return what ``path`` holds. Raises DataError if it is neither."""
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
