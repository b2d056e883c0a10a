"""Checks that a folder holds a model that workers can load, without loading it and without torch.

Of each weight file just the header is read. The header of a safetensors file has each tensor's
range. So a download that broke off shows here, not minutes later in every worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from pipeline.weights.digest import Digest, digest_file
from pipeline.weights.tensorfile import Contents, read_head
from protocol.errors import DataError, WeightsDamaged

_SINGLE = "model.safetensors"
_SHARDED = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that types of models give to their number of positions."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the longest sequence in a row."""


def read_model_config(folder: Path, *, with_weights: bool = True) -> dict[str, Any]:
    """Return a model's ``config.json``. Raises DataError for no model, or a damaged one; without
    ``with_weights`` those of the weights are not looked at."""
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
    """Return the most tokens that a model computes alike in every row, and why, in words; None for
    any number.

    The rotary positions of some models change for all tokens once a sequence in the row is longer
    than those of pre-training. Log-probs would depend on what else is in a batch."""
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
    """Return the size of a model's weight files. Raises DataError without any."""
    return sum(file.stat().st_size for file in _weight_files(folder))


def model_digest(folder: Path, *, with_weights: bool = True) -> str:
    """Return a digest of a model's ``config.json`` and of all its weights, which are read for it.
    The same files have it in any folder. Raises DataError for no model."""
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
            "code; save the model again with save_pretrained, where you trust it"
        )
    raise DataError(f"{folder} has no weights: neither {_SINGLE} nor {_SHARDED}; download the model again")


def _within(folder: Path, name: str) -> Path:
    """Return the file that an index names. Raises DataError for a file outside of the folder."""
    if Path(name).name != name:
        outside = f"names {name!r}, which is no file of this folder"
        raise DataError(f"{folder / _SHARDED} {outside}; download the model again")
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
