"""The site's source folder: the repository's files in their places, so that links between them work, and the
generated pages. Sphinx with MyST reads it, and checks the links."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ops.docs import generated, nav

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "ops/docs/settings"
"""Folder of the generated pages about settings."""
_GIT_S = 60.0


def tracked(*patterns: str) -> list[str]:
    command = ("git", "ls-files", *patterns)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=_GIT_S
    ).stdout.splitlines()


def problems(documents: Iterable[str]) -> list[str]:
    """Return the pages that do not exist, and the documents that are neither a page nor left out."""
    pages = list(nav.pages())
    missing = [f"ops/docs/nav.py: {page} does not exist" for page in pages if not (ROOT / page).is_file()]
    known = {*pages, *nav.LEFT_OUT}
    return missing + [f"{path} is on no page: add it to ops/docs/nav.py" for path in documents if path not in known]


def write_source(folder: Path) -> None:
    """Copy the repository into an empty folder, and add the generated pages."""
    for name in tracked():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, path)
    for name, text in generated.settings_pages().items():
        path = folder / SETTINGS / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def ending(page: str) -> str:
    """Return the end of a page: what is generated for it, and the lists of pages below it."""
    lines = generated.ENDINGS[page]() if page in generated.ENDINGS else []
    if page == nav.INDEX:
        lines += [line for title, places in nav.SECTIONS.items() for line in _toctree(places, title)]
    return "\n" + "\n".join([*lines, *(_toctree(nav.BELOW[page]) if page in nav.BELOW else ())])


def _toctree(pages: Iterable[str], caption: str = "") -> list[str]:
    places = [(f"/{page.removesuffix('.md')}", nav.TITLES.get(page)) for page in pages]
    return generated.toctree([f"{title} <{place}>" if title else place for place, title in places], caption)
