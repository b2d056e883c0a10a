"""``python3 .ci/install.py``: the tests' environment by uv, in half of pip's processor time.

uv takes the same versions where it is set up as pip is. Settings of pip that have no entry here
leave the installation to pip, as does any failure: ``make .venv/.dev`` does what is left to do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = Path(".venv")
LIMIT_S = 600.0
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
}
"""Settings of pip, and the same for uv."""
WITHOUT_EFFECT = frozenset(
    {"default-timeout", "disable-pip-version-check", "no-input", "options", "retries", "timeout"}
)
"""Settings of pip that change nothing of what is installed."""
SECTIONS = ("global", "install", ":env:")
"""Of pip's settings; a later one outweighs those before it."""


def pip_settings(python: Path) -> dict[str, str]:
    """Return pip's settings for an installation, whichever file or variable they are from."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    entries = [line.partition("=") for line in listed.stdout.splitlines()]
    of_section = {
        section: {
            name.rpartition(".")[2]: str(ast.literal_eval(value))
            for name, _, value in entries
            if name.startswith(f"{section}.")
        }
        for section in SECTIONS
    }
    return of_section["global"] | of_section["install"] | of_section[":env:"]


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Return the variables that let uv find what pip finds. ``ValueError`` where there are none."""
    if unknown := settings.keys() - UV_VARIABLES.keys() - WITHOUT_EFFECT:
        raise ValueError(f"pip has settings that are not carried over to uv: {', '.join(sorted(unknown))}")
    # pip takes the best version of all indexes, uv that of the first index
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, variable in UV_VARIABLES.items():
        if value := settings.get(name):
            variables[variable] = ("," if name == "find-links" else " ").join(value.split())
    return variables


def install() -> None:
    """Make the environment with all packages that ``make .venv/.dev`` installs."""
    python = ENVIRONMENT / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True, timeout=LIMIT_S)
    variables = os.environ | uv_variables(pip_settings(python))
    uv = [python, "-m", "uv", "pip"]
    for command in (
        [python, "-m", "pip", "install", "--quiet", "--no-compile", "uv>=0.9,<1"],
        [*uv, "install", "--quiet", "--python", python, "--editable", ".[dev]"],
        [*uv, "uninstall", "--quiet", "--python", python, "uv"],
    ):
        subprocess.run(command, check=True, env=variables, timeout=LIMIT_S)
    for stamp in (".run", ".dev"):
        (ENVIRONMENT / stamp).touch()


if __name__ == "__main__":
    try:
        install()
    except (OSError, SyntaxError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"uv has not installed all; pip does the rest: {error}")
