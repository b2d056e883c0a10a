# pyright: reportMissingImports=false
"""Converts a GGUF file to a model folder that every engine reads: weights in safetensors,
``config.json``, tokenizer and chat template.

    pip install 'headrace[gguf]'
    python -m workers.engines.convert_gguf MODEL.gguf FOLDER

GGUF is llama.cpp's format, mostly with quantised weights, which transformers dequantises for
training. The folder appears whole or not at all. Conversion may take ten times the file's size in
memory."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pipeline.process.exit_codes import exit_code_of
from protocol.errors import ConfigError, DataError, HeadraceError
from protocol.printable import printable
from workers.engines.model.loading import DTYPES, resolve_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIGITS_ALONE: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""GGUF's names for pre-tokenizers that split off each digit and then work like GPT-2's."""
_GPT2: Final = frozenset({"gpt-2", "gpt2", "default"})


def convert(file: Path, folder: Path, dtype: str = "bfloat16") -> list[str]:
    """Write the model of ``file`` to ``folder`` with weights of ``dtype``; return warnings for the
    user.

    Raises DataError if there is no such file or transformers cannot read it, and ConfigError if
    packages are missing or ``folder`` exists."""
    if not file.is_file():
        raise DataError(f"{file}: no such file; give a GGUF file")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    number_type = resolve_dtype(dtype)
    _check_packages()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # the bar for dequantising tensors stays
    logging.disable_progress_bar()
    notes: list[str] = []
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        notes += _cut_as_trained(tokenizer, _text_field(file, "tokenizer.ggml.pre"))
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"{file} does not load as a causal language model of transformers: {error}; take the same model's folder in "
            "Hugging Face format"
        ) from error
    if not tokenizer.chat_template:
        notes.append("the file has no chat template: prompts can only be text, not messages")
    model = _without_quantization(read, number_type)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return notes


def _check_packages() -> None:
    try:
        import accelerate  # noqa: F401  transformers needs it
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs {error.name}; pip install 'headrace[gguf]'") from error


def _without_quantization(read: Any, dtype: torch.dtype) -> Any:
    """Return an unquantised model with the weights of ``read``, as ``dtype``.

    ``read`` itself is marked as quantised, and would be saved as such."""
    from transformers import AutoModelForCausalLM

    config, state = read.config, read.state_dict()
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state)
    model.generation_config = read.generation_config
    return model


def _text_field(file: Path, name: str) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field(name)
    return "" if field is None else str(field.contents())


def _cut_as_trained(tokenizer: PreTrainedTokenizerBase, way: str) -> list[str]:
    """Set a byte-level tokenizer's pre-tokenizer to the one that GGUF names ``way``; return
    warnings."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not way or backend is None or way in GGUF_PRE_TOKENIZER_SPLITS or way in _GPT2:
        return []
    if way not in _DIGITS_ALONE:
        unknown = f"the file's pre-tokenizer is {way!r}, which transformers does not know and treats as GPT-2's"
        return [f"{unknown}: compare its tokens with those of the model's own tokenizer before training"]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workers.engines.convert_gguf",
        description="Write a GGUF file's model as a folder that model.path can name.",
        epilog="example: python -m workers.engines.convert_gguf mine.Q4_1.gguf models/mine",
    )
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="the new folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        notes = convert(options.file, options.folder, options.dtype)
    except HeadraceError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return exit_code_of(error)
    for note in notes:
        sys.stderr.write(f"{printable(note)}\n")
    sys.stdout.write(f"{printable(str(options.folder))}: set model.path to it\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
