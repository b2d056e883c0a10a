"""The site's source folder: every page in its place, its links rewritten. Sphinx checks them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ops.docs import generated, nav
from ops.docs.links import Link, relative, relinked, resolved

ROOT = Path(__file__).resolve().parents[2]
FILES = "files"
"""Folder of the site with files that pages link to and that are no page."""
SETTINGS = "ops/docs/settings.md"
"""The page above those of the sections."""


@dataclass(slots=True)
class Site:
    """All pages, and what is wrong with them."""

    pages: dict[str, str] = field(default_factory=dict[str, str])
    """By place, with ``.md``: the text, its links those of the site."""
    files: set[str] = field(default_factory=set[str])
    """Of the repository, that are copied beside the pages."""
    wrong: list[str] = field(default_factory=list[str])
    """Pages and files that are not there, one a line."""

    def write(self, folder: Path) -> None:
        """Write the source folder anew."""
        shutil.rmtree(folder, ignore_errors=True)
        for place, text in self.pages.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name in self.files:
            path = folder / FILES / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)


def collect() -> Site:
    """Read and generate every page."""
    site = Site()
    sources = {source: f"{place}.md" for place, source in nav.entries()}
    for source in (source for source in sources if not (ROOT / source).is_file()):
        site.wrong.append(f"ops/docs/nav.py: {source} is not there")
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in sources if (ROOT / source).is_file()}
    for source, text in texts.items():
        site.pages[sources[source]] = _placed(site, source, text, sources)
    for source, ending in generated.ENDINGS.items():
        site.pages[sources[source]] += "\n" + "\n".join(ending())
    for name, text in generated.settings_pages().items():
        site.pages[f"{sources[SETTINGS].removesuffix('.md')}/{name}.md"] = text + "\n"
    for title, places in nav.SECTIONS.items():
        site.pages["index.md"] += _listed(places, "index", title)
    for above, places in nav.BELOW.items():
        site.pages[f"{above}.md"] += _listed(places, above)
    return site


def unlisted(documents: list[str]) -> list[str]:
    """Return the documents that are neither a page nor left out for a reason."""
    listed = {source for _, source in nav.entries()} | set(nav.LEFT_OUT)
    return [f"{path} is on no page: add it to ops/docs/nav.py" for path in documents if path not in listed]


def _placed(site: Site, source: str, text: str, sources: dict[str, str]) -> str:
    """Return a document's text with links as in the site; what it links to is noted."""
    place = sources[source]

    def target_of(target: str) -> str:
        link = Link(target)
        if link.is_elsewhere or not link.path:
            return target
        path = resolved(source, link.path)
        new = sources.get(path)
        if new is None:
            if not (ROOT / path).is_file():
                site.wrong.append(f"{source}: {target}: no such file")
                return target
            site.files.add(path)
            new = f"{FILES}/{path}"
        return relative(place, new) + (f"#{link.anchor}" if link.anchor else "")

    return relinked(text, target_of)


def _listed(places: Iterable[str], above: str, caption: str = "") -> str:
    """Return the list of pages that ``above`` adds to the navigation."""
    paths = [(relative(above, place), nav.TITLES.get(place)) for place in places]
    return "\n" + "\n".join(
        generated.toctree([f"{title} <{path}>" if title else path for path, title in paths], caption)
    )
