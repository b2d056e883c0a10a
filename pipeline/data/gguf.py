"""GGUF, llama.cpp's format of models, which no engine here reads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError

_MAGIC: Final = b"GGUF"


def refuse_gguf(path: Path) -> None:
    """Raise ConfigError, with the command that makes a model folder, for a GGUF file or a folder
    that has one and is no model."""
    file = _gguf_of(path)
    if file is not None:
        # beside the file, by another name
        folder = file.with_suffix("") if file.suffix else file.with_name(f"{file.name}-model")
        command = shlex.join(["python", "-m", "workers.engines.convert_gguf", str(file), str(folder)])
        raise ConfigError(
            f"{file} is a GGUF file; expected a model folder in Hugging Face format: pip install 'headrace[gguf]', run "
            f"`{command}` and name the new folder"
        )


def _gguf_of(path: Path) -> Path | None:
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        return files[0] if files else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(len(_MAGIC)) == _MAGIC else None
